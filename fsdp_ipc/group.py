"""Who takes part in a sync, who sends, and how all ranks come to know that one of them failed.

Every collective of the control plane runs on a gloo group of our own that has exactly the trainer ranks, with a
time-out of its own; the default process group is never used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ipc.errors import WeightSyncError

T = TypeVar("T")

_OK, _FAILED = 0, 1


class TrainerGroup:
    """The trainer ranks of a sync: an explicit group, its sender and its CPU control group.

    Collective on the members of the group only; ranks outside it must not build one, and need not.

    Args:
        group: The trainer ranks: a `ProcessGroup`, or a `DeviceMesh` whose ranks all take part.
        sender_rank: Rank *in the group* that talks to the server.
        timeout_s: Time-out of every control collective, in seconds.

    Raises:
        ValueError: No default process group, this process is not a member, or `sender_rank` is out of range.
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
        self.data_group: dist.ProcessGroup | None
        if isinstance(group, DeviceMesh):
            self.ranks = tuple(int(r) for r in group.mesh.flatten().tolist())
            self.data_group = group.get_group() if group.ndim == 1 else None
        elif isinstance(group, dist.ProcessGroup):
            self.ranks = tuple(dist.get_process_group_ranks(group))
            self.data_group = group
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
        # Only the members call this: the other ranks of the job are left alone.
        self._control: dist.ProcessGroup = dist.new_group(
            list(self.ranks),
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
        )
        # torch orders a new group by global rank, whatever order was given.
        by_global_rank = sorted(self.ranks)
        self._order = [by_global_rank.index(rank) for rank in self.ranks]

    @property
    def is_sender(self) -> bool:
        """Whether this rank talks to the server."""
        return self.rank == self.sender_rank

    def broadcast_group(self, device: torch.device) -> dist.ProcessGroup:
        """The group for broadcasts of tensor data on `device`; made at the first call (all ranks, collective)."""
        if device.type == "cpu":
            return self._control
        if self.data_group is None:
            self.data_group = dist.new_group(list(self.ranks), use_local_synchronization=True)
        return self.data_group

    def gather_objects(self, obj: T, step: str) -> list[T]:
        """All ranks, collective: everybody's small picklable object, in group order.

        The objects come from the trainer's own ranks over its own group, never from the network of the server.

        Raises:
            WeightSyncError: A rank did not take part within the time-out.
        """
        if self.size == 1:
            return [obj]
        gathered: list[Any] = [None] * self.size
        with self._named(step):
            dist.all_gather_object(gathered, obj, group=self._control)
        return [gathered[at] for at in self._order]

    def broadcast_object(self, obj: T | None, step: str) -> T:
        """All ranks, collective: the sender's object."""
        box: list[Any] = [obj]
        if self.size > 1:
            with self._named(step):
                dist.broadcast_object_list(box, src=self.ranks[self.sender_rank], group=self._control)
        return box[0]  # type: ignore[no-any-return]

    def vote(
        self,
        step: str,
        error: BaseException | str | None = None,
        *,
        same: Sequence[object] = (),
        flag: bool = False,
    ) -> bool:
        """All ranks, collective: go on together or fail together.

        1) (all ranks) contribute whether they are well, and digests of what must be the same everywhere;
        2) (all ranks) if any rank failed, exchange the causes and raise the same error.

        Args:
            step: Name of the protocol step, for the error.
            error: What went wrong on this rank, if anything did.
            same: Values that must be equal on every rank (compared by digest of their `repr`).
            flag: Any rank's True makes the result True on all ranks.

        Returns:
            Whether any rank set `flag`.

        Raises:
            WeightSyncError: A rank failed, ranks disagree on `same`, or a rank did not answer in time.
        """
        if self.size == 1:
            if error is not None:
                raise WeightSyncError(step, {0: describe(error)}) from _cause(error)
            return flag
        row = torch.tensor(
            [_FAILED if error is not None else _OK, int(flag), *(_digest64(value) for value in same)],
            dtype=torch.int64,
        )
        rows = torch.empty(self.size, row.numel(), dtype=torch.int64)
        with self._named(step, error):
            # Flat, so that ranks at different steps fail in gloo instead of mixing rows of different lengths.
            all_gather(rows.view(-1), row, self._control)
        rows = rows[self._order]
        if bool((rows[:, 0] == _FAILED).any()):
            causes = self.gather_objects(describe(error) if error is not None else None, step)
            failures = {rank: cause for rank, cause in enumerate(causes) if cause is not None}
            raise WeightSyncError(step, failures) from _cause(error)
        for column, value in enumerate(same, start=2):
            if bool((rows[:, column] != rows[0, column]).any()):
                values = self.gather_objects(repr(value)[:200], step)
                odd = {r: f"has {v}" for r, v in enumerate(values) if v != values[0]}
                odd[0] = f"has {values[0]}; all ranks must agree"
                raise WeightSyncError(step, odd)
        return bool(rows[:, 1].any())

    @contextmanager
    def together(self, step: str, *, same: Sequence[object] = ()) -> Iterator[None]:
        """All ranks, collective: each does its own part inside, then all vote on how it went.

        Raises:
            WeightSyncError: As `vote`; what a rank raised inside is that rank's cause.
        """
        error: Exception | None = None
        try:
            yield
        except WeightSyncError:
            raise  # all ranks have it already
        except Exception as caught:  # noqa: BLE001  the others must hear of it before anybody raises
            error = caught
        self.vote(step, error, same=same)

    def _named(self, step: str, error: BaseException | str | None = None) -> _NamedStep:
        return _NamedStep(self, step, error)

    def close(self) -> None:
        """This rank is done with the group. Not collective.

        The control group stays until the job destroys its process groups: torch names a group after its ranks and the
        number of groups there are, so a group made after this one was destroyed would take its name, find its addresses
        in the store, and connect to sockets that are gone.
        """


class _NamedStep:
    """Turns an error of the control group itself into a `WeightSyncError` that says where and what to do."""

    def __init__(self, group: TrainerGroup, step: str, error: BaseException | str | None) -> None:
        self._group, self._step, self._error = group, step, error

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            own = f"; this rank itself had failed: {describe(self._error)}" if self._error is not None else ""
            raise WeightSyncError(
                self._step,
                {
                    self._group.rank: f"another rank of the trainer group {list(self._group.ranks)} did not take part "
                    f"within {self._group.timeout_s:g} s, or died ({error}){own}. Every rank must call send() "
                    "together; after a rank died the job must be restarted"
                },
            ) from error


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


def _digest64(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)
