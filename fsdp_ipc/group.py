"""Who takes part in a sync, who sends, and how all ranks come to know that one of them failed.

Every collective of the control plane runs on a gloo group of our own that has exactly the trainer ranks, with a
time-out of its own; the default process group lends its store and nothing else. The group is built directly and not
by `torch.distributed.new_group`, which names a group after the number of groups that the process has: members with
different numbers (pipeline or expert parallel, a mesh that only some ranks join) would wait for each other in vain.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ipc.ballot import Ballot, differences, digest64
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.lost_ranks import RollCall
from fsdp_ipc.process import ProcessName

T = TypeVar("T")

_KINDS = ("votes", "gathers objects", "broadcasts an object")
_VOTE, _GATHER, _BROADCAST = range(3)

_built: Counter[tuple[int, ...]] = Counter()
"""How many trainer groups this process has built on some ranks."""


class TrainerGroup:
    """The trainer ranks of a sync: an explicit group, its sender and its CPU control group.

    Collective on the members of the group only; ranks outside it must not build one, and need not. All members build
    their trainer groups on the same ranks equally often and in the same order; what else each of them builds, and which
    groups torch has there, does not matter.

    Args:
        group: The trainer ranks: a `ProcessGroup`, or a `DeviceMesh` whose ranks all take part. Its order counts.
        sender_rank: Rank *in the group* that talks to the server.
        timeout_s: Time-out of every control collective, in seconds.

    Raises:
        ValueError: No default process group, this process is not a member, or `sender_rank` is out of range.
        WeightSyncError: A member did not come within the time-out.
    """

    __module__ = "fsdp_ipc"

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, *, sender_rank: int = 0, timeout_s: float = 360.0
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "no process group: start the trainer with torchrun and call torch.distributed.init_process_group() "
                "first (one rank is enough: torchrun --nproc-per-node 1)"
            )
        if isinstance(group, DeviceMesh):
            self.ranks = tuple(int(r) for r in group.mesh.flatten().tolist())
        elif isinstance(group, dist.ProcessGroup):
            self.ranks = tuple(dist.get_process_group_ranks(group))
        else:
            raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, not {type(group).__name__}")
        if dist.get_rank() not in self.ranks:
            raise ValueError(
                f"global rank {dist.get_rank()} is no member of the trainer group {list(self.ranks)}: "
                "build the sender on the trainer ranks only"
            )
        if not 0 <= sender_rank < len(self.ranks):
            raise ValueError(
                f"sender_rank={sender_rank} is a rank of the trainer group, which has {len(self.ranks)} ranks "
                f"(global ranks {list(self.ranks)})"
            )
        self.timeout_s = timeout_s
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self.sender_rank = sender_rank
        self._members = group
        self._store: Any = None
        self._meetings = 0
        self._broken = False
        self._lost: RollCall | None = None
        self._control = self._connect() if self.size > 1 else None
        if self.size > 1:
            names = self.gather_objects(ProcessName.own(), "group")
            self._lost = RollCall(self._store, self.rank, names, timeout_s)

    @property
    def is_sender(self) -> bool:
        """Whether this rank talks to the server."""
        return self.rank == self.sender_rank

    def gather_objects(self, obj: T, step: str) -> list[T]:
        """All ranks, collective: everybody's small picklable object, in group order.

        The objects come from the trainer's own ranks over its own group, never from the network of the server.

        Raises:
            WeightSyncError: A rank failed, is at another step, or did not take part within the time-out.
        """
        if self.size == 1:
            return [obj]
        data, error = _pickled(obj)
        rows = self._meet(_GATHER, step, value=len(data), error=error)
        return self._gather_bytes(data, [row.value for row in rows], step)

    def broadcast_object(self, obj: T | None, step: str) -> T:
        """All ranks, collective: the sender's small picklable object.

        Raises:
            WeightSyncError: As `gather_objects`.
        """
        if self.size == 1:
            return obj  # type: ignore[return-value]  # the sender's own
        data, error = _pickled(obj) if self.is_sender else (b"", None)
        size = self._meet(_BROADCAST, step, value=len(data), error=error)[self.sender_rank].value
        # Tensors over memory of our own: bytes come out of a tensor only by way of numpy otherwise.
        box = bytearray(data.ljust(size))
        memory = torch.frombuffer(box, dtype=torch.uint8)
        self._run(step, lambda gloo: gloo.broadcast(memory, self.sender_rank))
        return pickle.loads(box)  # type: ignore[no-any-return]  # noqa: S301  written by the job's own rank

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """All ranks, collective: the contiguous tensor of *global* rank `src`, into everybody's `tensor`.

        On the control group for the CPU; for a GPU on the groups that the trainer ranks have already, as the current
        stream's work.

        Raises:
            WeightSyncError: A rank did not take part within the time-out (CPU only).
        """
        if self.size == 1:
            return
        if tensor.device.type == "cpu":
            self._run("gather", lambda gloo: gloo.broadcast(tensor, self.ranks.index(src)))
        elif isinstance(self._members, DeviceMesh):
            broadcast_over_mesh(tensor, src, self._members)
        else:
            dist.broadcast(tensor, src=src, group=self._members)

    def vote(
        self,
        step: str,
        error: BaseException | str | None = None,
        *,
        same: Sequence[object] = (),
        flag: bool = False,
    ) -> bool:
        """All ranks, collective: go on together or fail together.

        1) (all ranks) contribute whether they are well, and a digest of what must be the same everywhere;
        2) (all ranks, only if anything is wrong) exchange the causes; 3) all raise the same error. One small
        collective while all is well.

        Args:
            step: Name of the protocol step, for the error.
            error: What went wrong on this rank, if anything did.
            same: Values that must be equal on every rank (compared by digest of their `repr`).
            flag: Any rank's True makes the result True on all ranks.

        Returns:
            Whether any rank set `flag`.

        Raises:
            WeightSyncError: A rank failed, ranks disagree on `same` or are at different steps, or a rank did not answer
                in time.
        """
        if self.size == 1:
            if error is not None:
                raise WeightSyncError(step, {0: describe(error)}) from _cause(error)
            return flag
        values = [repr(value) for value in same]
        rows = self._meet(_VOTE, step, value=int(flag), error=error, same=digest64(values))
        if any(row.same != rows[0].same for row in rows):
            # Digests beside them: long values may differ where nobody sees it.
            told = self.gather_objects([(value[:200], digest64(value)) for value in values], step)
            raise WeightSyncError(step, differences(told))
        return any(row.value for row in rows)

    @contextmanager
    def together(self, step: str, *, same: Sequence[object] = ()) -> Iterator[list[object]]:
        """All ranks, collective: each does its own part inside, then all vote on how it went.

        Collectives of this group may run inside: a rank that has failed before one tells the others there.

        Yields:
            What must be equal on every rank; starts as `same`, and more can be added.

        Raises:
            WeightSyncError: As `vote`; what a rank raised inside is that rank's cause.
        """
        error: Exception | None = None
        agreed = list(same)
        try:
            yield agreed
        except WeightSyncError:
            raise  # all ranks have it already
        except Exception as caught:  # noqa: BLE001  the others must hear of it before anybody raises
            error = caught
        self.vote(step, error, same=agreed)

    def tell(self, step: str, error: BaseException) -> BaseException:
        """Let all ranks hear, wherever they meet next, of what this one raised outside of a vote. Collective with that meeting.

        Returns:
            The error that all ranks raise; a `WeightSyncError`, which they have already, and an interrupt as they are.
        """
        if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
            return error
        try:
            self.vote(step, error)
        except WeightSyncError as told:
            return told
        return error

    def others_failed(self) -> bool:
        """Whether a rank has died, or has failed and is at the next exchange already. Not collective, a look at /proc and store.

        A rank that waits for something else than the others looks now and then, and then joins them there.
        """
        if self._lost is not None and self._lost.dead():
            return True
        try:
            return self.size > 1 and bool(self._store.check([f"alarm/{self._meetings + 1}"]))
        except RuntimeError:
            return False  # the exchange itself will tell

    def leave_note(self, name: str, text: str) -> None:
        """This rank: leave a text for the others in the job's store; not collective, and never an error."""
        if self.size > 1:
            with suppress(RuntimeError):
                self._store.set(f"note/{name}", text)

    def read_note(self, name: str, timeout_s: float) -> str | None:
        """A text that another rank leaves within a time, or None. Not collective."""
        try:
            self._store.wait([f"note/{name}"], timedelta(seconds=timeout_s))
            return bytes(self._store.get(f"note/{name}")).decode()
        except (RuntimeError, AttributeError):  # no such note, no store any more, or no others
            return None

    def _alarm(self) -> None:
        """Let the others know before they come: they may be waiting for what will not happen any more."""
        with suppress(RuntimeError):
            self._store.set(f"alarm/{self._meetings}", "1")

    def close(self) -> None:
        """This rank is done with the group: its connections and threads end. Idempotent, not collective."""
        control, self._control = self._control, None
        if control is not None:
            control.shutdown()

    def _connect(self) -> Any:
        """All ranks, collective: the control group, in the order of `ranks`."""
        # The class is public, but absent from a torch without gloo.
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        number = _built[self.ranks]
        _built[self.ranks] += 1
        # Private, and the only way to the store that every rank of the job has already (the same in torch 2.11 and 2.13).
        default_store = dist.distributed_c10d._get_default_store()
        digest = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        store = self._store = PrefixStore(f"fsdp_ipc/{digest}/{number}", default_store)
        begin = time.monotonic()
        try:
            store.set(f"here/{self.rank}", "1")
            return ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            waited = time.monotonic() - begin >= 0.9 * self.timeout_s
            absent = self._absent(store) if waited else []
            cause = (
                f"had not come to build trainer group number {number + 1} of global ranks {list(self.ranks)} after "
                f"{self.timeout_s:g} s. Every member must build the sender, equally often"
            )
            own = (
                f"can't connect to the other ranks: {error}. Do they reach each other over this host's network interface "
                "(GLOO_SOCKET_IFNAME names another one)?"
            )
            raise WeightSyncError("group", dict.fromkeys(absent, cause) or {self.rank: own}) from error

    def _absent(self, store: Any) -> list[int]:
        """The members that have not come, as far as the store still answers."""
        try:
            return [rank for rank in range(self.size) if not store.check([f"here/{rank}"])]
        except RuntimeError:
            return []

    def _meet(
        self, kind: int, step: str, *, value: int, error: BaseException | str | None = None, same: int = 0
    ) -> list[Ballot]:
        """All ranks, collective: begins every exchange, so that a rank which failed or went astray is found out.

        Raises:
            WeightSyncError: On every rank, at whatever exchange it is.
        """
        self._meetings += 1
        if error is not None:
            self._alarm()
        mine = Ballot(kind, int(error is not None), value, same, step)
        rows = [Ballot.decode(row) for row in self._gather_numbers(mine.encode(), step, error)]
        if any(row.failed for row in rows):
            data = pickle.dumps(None if error is None else describe(error))
            sizes = [size for (size,) in self._gather_numbers([len(data)], step, error)]
            causes = self._gather_bytes(data, sizes, step, error)
            where = next(row.step for row in rows if row.failed)
            failures = {rank: cause for rank, cause in enumerate(causes) if cause is not None}
            raise WeightSyncError(step if step.startswith(where) else where, failures) from _cause(error)
        if len({(row.kind, row.step) for row in rows}) > 1:
            astray = {rank: f"{_KINDS[row.kind]} at step {row.step!r}" for rank, row in enumerate(rows)}
            astray[0] += "; the ranks are out of step: all must make the same calls in the same order"
            raise WeightSyncError(step, astray)
        return rows

    def _gather_numbers(
        self, numbers: Sequence[int], step: str, error: BaseException | str | None
    ) -> list[list[int]]:
        row = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        out = torch.empty(self.size, len(numbers), dtype=torch.int64, device="cpu")
        self._run(step, lambda gloo: gloo.allgather([list(out)], [row]), error)
        return out.tolist()

    def _gather_bytes(
        self, data: bytes, sizes: Sequence[int], step: str, error: BaseException | str | None = None
    ) -> list[Any]:
        longest = max(sizes)
        box = bytearray(longest * self.size)
        out = torch.frombuffer(box, dtype=torch.uint8).view(self.size, longest)
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        self._run(step, lambda gloo: gloo.allgather([list(out)], [mine]), error)
        pieces = [memoryview(box)[n * longest : n * longest + size] for n, size in enumerate(sizes)]
        return [pickle.loads(piece) for piece in pieces]  # noqa: S301  written by the job's own ranks

    def _run(self, step: str, start: Callable[[Any], Any], error: BaseException | str | None = None) -> None:
        """A collective of the control group; its own error becomes one that says where and what to do."""
        gloo = self._control
        if gloo is None and not self._broken:
            raise RuntimeError("this trainer group is closed: build a new one on every rank")
        try:
            if gloo is None:
                raise RuntimeError("this trainer group has lost a rank")
            start(gloo).wait()
        except RuntimeError as caught:
            # The others may be waiting for this rank, not for the one that is missing. They notice at once that its
            # connections are gone; those go with the last reference.
            self._broken = True
            gloo = None
            self.close()
            own = None if error is None else describe(error)
            if self._lost is None:
                raise WeightSyncError(
                    step, {self.rank: own or f"can't reach the other ranks: {caught}"}
                ) from caught
            raise WeightSyncError(step, self._lost.verdict(own)) from caught
        finally:
            gloo = None  # else whoever keeps the error would keep the connections


def broadcast_over_mesh(tensor: torch.Tensor, src: int, mesh: DeviceMesh) -> None:
    """All ranks of a mesh, collective: the tensor of global rank `src`, along one dimension after the other.

    So the groups that the mesh has already suffice, whatever its number of dimensions, and each rank receives once.
    """
    target = [int(at) for at in (mesh.mesh == src).nonzero()[0]]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # members only
    mine = list(coordinate)
    for dim, at in enumerate(target):
        # The ranks that differ from `src` in dimensions up to this one; one in each line has the tensor already.
        if mesh.size(dim) > 1 and mine[dim + 1 :] == target[dim + 1 :]:
            holder = mesh.mesh[(*mine[:dim], at, *target[dim + 1 :])]
            dist.broadcast(tensor, src=int(holder), group=mesh.get_group(dim))


def all_gather(out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All ranks of `group`, collective: flat equal pieces, rank after rank; `piece` may be this rank's part of `out`."""
    # torch 2.13 renamed the function; 2.11 has only the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, piece, group=group)


def describe(error: BaseException | str) -> str:
    """A cause in one string, with its type where it is an exception."""
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}"


def _cause(error: BaseException | str | None) -> BaseException | None:
    return error if isinstance(error, BaseException) else None


def _pickled(obj: object) -> tuple[bytes, Exception | None]:
    try:
        return pickle.dumps(obj), None
    except Exception as error:  # noqa: BLE001  the others must hear of it before anybody raises
        return b"", error
