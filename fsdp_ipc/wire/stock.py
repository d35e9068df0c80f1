"""The stock `ipc` backend of vLLM 0.22 to 0.33: its dialects and its payloads, as data and pure functions.

Nothing here touches a GPU, a process group or a server: the sender asks `dialect_for` once it knows the server's
release, lays each chunk out as `packed_layout` says, and builds its payloads with a `StockWire`.

What the worker of each release does, read in the released wheels:

| vLLM | what changed |
|---|---|
| 0.17-0.21 | `(function, args)` pairs, one per parameter, without start and finish: not supported |
| 0.22 | bare `args` tuples; packed chunks, flagged in every update; start takes a JSON body, an empty object will do. A failed update leaves the session active |
| 0.23, 0.24 | the same wire; a failed update clears the session |
| 0.25, 0.26 | start takes no body (one that is sent is ignored) |
| 0.27 | `packed` belongs to the handshake, in an update it is an error; finish takes `weight_version`, `/weight_info` and `/update_weight_version` are new |
| 0.28 | the worker opens a packed export once and releases it at finish, or when another export follows; before, it opened and released it with every chunk |
| 0.29-0.31 | an update may be a list, one entry a worker: index `data_parallel_index * world_size + rank` |
| 0.32, 0.33 | 0-d tensors can be unpacked; `/weight_checker` |

All of them find a worker's handle by the UUID of its GPU, overwrite `args[6]` with their own device index, and split
the packed bytes back to back in the order of the names: there are no offsets and no padding.
"""

from __future__ import annotations

import base64
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_ipc.metadata import ParamMeta

RebuildArgs = tuple[Any, ...]
"""Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`, as `reduce_tensor(t)[1]` gives them."""

NUM_REBUILD_ARGS = 15
DEVICE_INDEX_ARG = 6


@dataclass(frozen=True, kw_only=True)
class StockDialect:
    """What one span of vLLM releases expects of the stock `ipc` backend.

    Attributes:
        first: First release, major and minor.
        last: Last release, major and minor.
        start_takes_body: `start_weight_update` parses a JSON body, so one must be sent.
        packed_at: Where the `packed` flag goes: into every update, or into the handshake (and there only).
        export_per_chunk: The worker opens and releases the packed buffer with every chunk, so every chunk needs an
            export of its own. Otherwise one export serves one sync: all chunks in the same buffer, a fresh export
            for the next sync. An export per chunk is right on every release, and needed for more than one slot.
        weight_version: `finish_weight_update` publishes a version.
        list_payload: An update may be a list with one entry a worker.
        packed_scalars: 0-d tensors can be unpacked; before, they travel as shape `[1]`, which vLLM's default weight
            loader takes for a parameter of one element.
        checksums: The server has `/weight_checker`.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    start_takes_body: bool = False
    packed_at: Literal["update", "init"] = "init"
    export_per_chunk: bool = False
    weight_version: bool = True
    list_payload: bool = True
    packed_scalars: bool = True
    checksums: bool = True

    def __str__(self) -> str:
        first, last = (f"{major}.{minor}" for major, minor in (self.first, self.last))
        return f"vLLM {first}" if first == last else f"vLLM {first} to {last}"


DIALECTS: tuple[StockDialect, ...] = (
    StockDialect(
        first=(0, 22),
        last=(0, 24),
        start_takes_body=True,
        packed_at="update",
        export_per_chunk=True,
        weight_version=False,
        list_payload=False,
        packed_scalars=False,
        checksums=False,
    ),
    StockDialect(
        first=(0, 25),
        last=(0, 26),
        packed_at="update",
        export_per_chunk=True,
        weight_version=False,
        list_payload=False,
        packed_scalars=False,
        checksums=False,
    ),
    StockDialect(
        first=(0, 27),
        last=(0, 27),
        export_per_chunk=True,
        list_payload=False,
        packed_scalars=False,
        checksums=False,
    ),
    StockDialect(first=(0, 28), last=(0, 28), list_payload=False, packed_scalars=False, checksums=False),
    StockDialect(first=(0, 29), last=(0, 31), packed_scalars=False, checksums=False),
    StockDialect(first=(0, 32), last=(0, 33)),
)
"""Every dialect that is known, oldest first, without gaps."""

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:[.\d]*)")


def dialect_for(version: str, *, on_unknown: Literal["refuse", "nearest"] = "refuse") -> StockDialect:
    """Choose the dialect of a server by its release.

    Args:
        version: As `GET /version` gives it, for example `"0.28.0"` or `"0.32.0+cpu"`.
        on_unknown: What to do with a release newer than any that is known, or a build from source that has no
            release number: refuse, or take the newest dialect with a warning.

    Returns:
        The dialect.

    Raises:
        ValueError: The release is too old for the wire, or unknown and to be refused.
    """
    if on_unknown not in ("refuse", "nearest"):
        raise ValueError(f"on_unknown must be 'refuse' or 'nearest', got {on_unknown!r}")
    match = _RELEASE.match(version.strip())
    release = (int(match[1]), int(match[2])) if match else None
    # A build from a checkout without tags calls itself 0.1.dev<n>: of any age, but most likely new.
    if release is not None and release != (0, 1):
        for dialect in DIALECTS:
            if dialect.first <= release <= dialect.last:
                return dialect
        if release < DIALECTS[0].first:
            raise ValueError(
                f"vLLM {version} is too old: its weight transfer has no packed chunks and pairs each handle with a "
                f"function (0.17 to 0.21), or there is none (before). Use {_span()}"
            )
    if on_unknown == "refuse":
        raise ValueError(
            f"the server runs vLLM {version!r}, and the stock 'ipc' wire is known for {_span()} only. Set "
            f"on_unknown_version='nearest' of the sender to speak the newest of these with a warning, or use the 'fsdp_ipc' backend"
        )
    newest = DIALECTS[-1]
    warnings.warn(
        f"vLLM {version!r} is unknown; its stock 'ipc' backend is spoken to as if it were {newest}",
        stacklevel=2,
    )
    return newest


def _span() -> str:
    (a, b), (c, d) = DIALECTS[0].first, DIALECTS[-1].last
    return f"vLLM {a}.{b} to {c}.{d}"


@dataclass(frozen=True)
class PackedLayout:
    """Where the tensors of one packed chunk lie: back to back, so that each can be viewed in its own dtype.

    Attributes:
        metas: The tensors in the order in which they lie and are named.
        offsets: First byte of each, in the same order.
        order: Index of each in the sequence that was given.
        nbytes: Bytes of the chunk, the sum of its tensors.
    """

    metas: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]
    order: tuple[int, ...]
    nbytes: int


def packed_layout(metas: Sequence[ParamMeta]) -> PackedLayout:
    """Lay out one chunk: tensors of the widest element first, otherwise in the given order.

    The wire has no padding, and torch refuses to view bytes at an offset that the element size does not divide.
    Element sizes are powers of two and a tensor's bytes are a multiple of its own, so with the widest first every
    offset fits. The chunk is therefore never longer than its tensors, and any set of tensors can be a chunk.

    Args:
        metas: Tensors of the chunk, in the order in which they would be sent.

    Returns:
        The layout.

    Raises:
        ValueError: A name occurs twice.
    """
    names = [meta.name for meta in metas]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"named twice in one chunk: {twice}; the worker would take the first for the whole layer"
        )
    order = sorted(range(len(metas)), key=lambda index: -metas[index].dtype.itemsize)
    offsets = []
    end = 0
    for index in order:
        offsets.append(end)
        end += metas[index].nbytes
    return PackedLayout(tuple(metas[index] for index in order), tuple(offsets), tuple(order), end)


@dataclass(frozen=True)
class StockWire:
    """The payloads of one sender: a dialect, and whether chunks are packed.

    The handshake and the updates are built by the same object, so that the `packed` flag cannot differ between them.

    Attributes:
        dialect: Dialect of the server.
        packed: Whether updates are packed chunks (one buffer, one handle a GPU) or whole tensors (a handle each).
    """

    dialect: StockDialect
    packed: bool = True

    @property
    def exports_per_sync(self) -> Literal["one", "one a chunk", "one a tensor"]:
        """How often the sender exports: see `StockDialect.export_per_chunk`."""
        if not self.packed:
            return "one a tensor"
        return "one a chunk" if self.dialect.export_per_chunk else "one"

    def init_info(self) -> dict[str, Any]:
        """Handshake for `init_weight_transfer_engine`."""
        return {"packed": self.packed} if self.dialect.packed_at == "init" else {}

    def weight_version(self, version: str | None) -> str | None:
        """The version to pass to `finish_weight_update`: None where the release does not publish any."""
        return version if self.dialect.weight_version else None

    def update_info(
        self,
        metas: Sequence[ParamMeta],
        handles: Mapping[str, RebuildArgs] | Sequence[Mapping[str, RebuildArgs]],
    ) -> dict[str, Any]:
        """Payload of one update, with raw handles; over HTTP the client pickles them (`json_safe`).

        Args:
            metas: The tensors; of a packed chunk in the order in which they lie (`PackedLayout.metas`).
            handles: Rebuild arguments by GPU UUID: of the buffer if packed, otherwise one mapping for each tensor.

        Returns:
            The payload.

        Raises:
            ValueError: The handles are not those of a packed chunk, or of these whole tensors; a view would be
                misaligned; or something is not a tuple of rebuild arguments.
        """
        names = [meta.name for meta in metas]
        if self.packed != isinstance(handles, Mapping):
            kind = (
                "one handle mapping for the buffer"
                if self.packed
                else "a list with a handle mapping a tensor"
            )
            raise ValueError(
                f"packed={self.packed} was agreed on in the handshake, so an update carries {kind}, "
                f"not a {type(handles).__name__}"
            )
        info: dict[str, Any] = {
            "names": names,
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
            "shapes": [list(self._shape(meta)) for meta in metas],
        }
        if isinstance(handles, Mapping):
            _check_alignment(metas)
            info["ipc_handles"] = _checked(handles)
            info["tensor_sizes"] = [meta.nbytes for meta in metas]
        else:
            if len(handles) != len(metas):
                raise ValueError(f"{len(metas)} tensors but {len(handles)} handle mappings")
            info["ipc_handles"] = [_checked(mapping) for mapping in handles]
        if self.dialect.packed_at == "update":
            info["packed"] = self.packed
        return info

    def list_payload(
        self, entries: Sequence[dict[str, Any] | None], *, world_size: int | None = None
    ) -> list[dict[str, Any]]:
        """Payload with an entry of its own for every worker, for tensors that not every rank holds.

        Args:
            entries: `update_info` payloads, indexed by `data_parallel_index * world_size + rank` of the worker. A
                worker for which there is nothing gets a payload without tensors, but with its handle.
            world_size: Workers over all data-parallel replicas of the server, if known.

        Returns:
            The list payload.

        Raises:
            ValueError: The release has no list payloads, an entry is missing, or the number of entries is not the
                number of workers.
        """
        if not self.dialect.list_payload:
            raise ValueError(
                f"not every trainer rank holds every tensor, and {self.dialect} takes the same payload for all "
                f"workers: gather the tensors everywhere, or use vLLM >= 0.29 or the 'fsdp_ipc' backend"
            )
        if world_size is not None and len(entries) != world_size:
            raise ValueError(
                f"{len(entries)} rank-local payloads for {world_size} workers: vLLM wants one a worker over all "
                f"data-parallel replicas, so the trainer needs as many ranks as there are workers"
            )
        filled: list[dict[str, Any]] = []
        for index, entry in enumerate(entries):
            if entry is None:
                raise ValueError(
                    f"worker {index} has no payload: it may be one without tensors, but must be there"
                )
            filled.append(entry)
        return filled

    def _shape(self, meta: ParamMeta) -> tuple[int, ...]:
        if self.packed and not meta.shape and not self.dialect.packed_scalars:
            return (1,)
        return meta.shape


def merge_handles(per_rank: Sequence[Mapping[str, RebuildArgs]]) -> dict[str, RebuildArgs]:
    """Merge what each trainer rank exported for its own GPU into the mapping that the workers look into.

    Args:
        per_rank: `{gpu uuid: rebuild arguments}` by rank of the trainer group; empty for a rank without an export.

    Returns:
        All of it by bare UUID, as vLLM's worker looks it up.

    Raises:
        ValueError: Two ranks share a GPU, so that one of them would be lost.
    """
    merged: dict[str, RebuildArgs] = {}
    holder: dict[str, int] = {}
    for rank, handles in enumerate(per_rank):
        for key, args in handles.items():
            uuid = bare_uuid(key)
            if uuid in holder:
                raise ValueError(
                    f"2 trainer ranks share GPU {uuid}: ranks {holder[uuid]} and {rank} of the trainer group. The "
                    f"worker on that GPU can take only one rank's memory: start one trainer rank a GPU (check "
                    f"CUDA_VISIBLE_DEVICES and torch.cuda.set_device)"
                )
            holder[uuid] = rank
            merged[uuid] = args
    return merged


def bare_uuid(key: str) -> str:
    """A GPU's UUID without `GPU-` or `MIG-`, in lower case: the form of `torch.cuda.get_device_properties().uuid`."""
    lowered = key.strip().lower()
    return lowered.removeprefix("gpu-").removeprefix("mig-")


def json_safe(update_info: dict[str, Any]) -> dict[str, Any]:
    """Turn an update payload into what JSON can carry: raw handles become base64 of their pickle.

    A payload without raw handles, such as one of our own backend, passes through unchanged.

    Args:
        update_info: Payload with `ipc_handles` as tuples, or any other backend's payload.

    Returns:
        The same payload with `ipc_handles_pickled` in place of `ipc_handles`.
    """
    if update_info.get("ipc_handles") is None:
        return {key: value for key, value in update_info.items() if key != "ipc_handles"}
    safe = {
        key: value for key, value in update_info.items() if key not in ("ipc_handles", "ipc_handles_pickled")
    }
    safe["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode("ascii")
    return safe


def _checked(handles: Mapping[str, Any]) -> dict[str, RebuildArgs]:
    if not handles:
        raise ValueError("no handle: at least one trainer rank must export")
    checked: dict[str, RebuildArgs] = {}
    for key, args in handles.items():
        if not isinstance(args, tuple) or len(args) != NUM_REBUILD_ARGS:
            got = f"a tuple of {len(args)}" if isinstance(args, tuple) else type(args).__name__
            raise ValueError(
                f"GPU {key}: expected the {NUM_REBUILD_ARGS} arguments of rebuild_cuda_tensor as a tuple, got {got}"
            )
        if not isinstance(args[DEVICE_INDEX_ARG], int):
            raise ValueError(
                f"GPU {key}: argument {DEVICE_INDEX_ARG} must be the device index, got {args[DEVICE_INDEX_ARG]!r}"
            )
        checked[bare_uuid(key)] = args
    return checked


def _check_alignment(metas: Sequence[ParamMeta]) -> None:
    offset = 0
    for meta in metas:
        if offset % meta.dtype.itemsize:
            raise ValueError(
                f"{meta.name} ({meta.dtype}) would lie at byte {offset}, which {meta.dtype.itemsize} does not divide: "
                f"lay the chunk out with packed_layout"
            )
        offset += meta.nbytes
