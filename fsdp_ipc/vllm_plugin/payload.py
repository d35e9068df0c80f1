"""What travels through vLLM's routes on the native wire, checked field by field before any of it is used.

Everything arrives as JSON from a peer that may be wrong, old or hostile. Nothing here opens, maps or reads memory;
a value that passes is of the right type, in range and, for tensors, inside the allocation that it names.
Reference: `init_info` and `update_info` of `wire.native`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_ipc.handles import IpcHandle
from fsdp_ipc.vllm_plugin.json_fields import (
    MAX_ENDPOINTS,
    MAX_NAME,
    MAX_ROWS,
    MAX_SYNC,
    MAX_TEXT,
    array_of,
    integer_of,
    object_of,
    seconds_of,
    session_of,
    shown,
    text_of,
)
from fsdp_ipc.vllm_plugin.payload_plan import Plan

PROTOCOL = 3

_CONTROL_FILE = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One trainer rank: the key of its device, the file name of its control block, and memory to try to read."""

    device: str
    control: str
    probe: IpcHandle | None = None


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """The handshake: which session this is and which trainer ranks take part, in group order."""

    session: str
    token: str | None
    endpoints: tuple[Endpoint, ...]
    timeout_s: float

    @classmethod
    def from_json(cls, obj: object) -> InitInfo:
        """Check a decoded `init_info`.

        Raises:
            ValueError: Naming the field that is missing, unknown or out of range.
        """
        fields = object_of(
            obj, "init_info", required=("protocol", "session", "endpoints", "timeout_s"), optional=("token",)
        )
        protocol = integer_of(fields["protocol"], "init_info.protocol", 0, 1 << 31)
        if protocol != PROTOCOL:
            raise ValueError(
                f"init_info.protocol: this worker speaks {PROTOCOL}, the trainer {protocol}. "
                "Install the same fsdp_ipc version beside the trainer and beside vLLM."
            )
        rows = array_of(fields["endpoints"], "init_info.endpoints", MAX_ENDPOINTS)
        if not rows:
            raise ValueError("init_info.endpoints: expected at least one trainer rank, got none")
        endpoints = []
        for index, row in enumerate(rows):
            where = f"init_info.endpoints[{index}]"
            entry = object_of(row, where, required=("device", "control"), optional=("probe",))
            control = text_of(entry["control"], f"{where}.control", MAX_NAME)
            # The name is joined to a directory later on, so it must not be able to leave it.
            if not _CONTROL_FILE.fullmatch(control) or control.startswith("."):
                raise ValueError(f"{where}.control: expected a plain file name, got {control!r}")
            device = text_of(entry["device"], f"{where}.device", MAX_NAME)
            probe = entry.get("probe")
            handle = None if probe is None else _handle(probe, f"{where}.probe", device)
            endpoints.append(Endpoint(device=device, control=control, probe=handle))
        token = fields.get("token")
        return cls(
            session=session_of(fields["session"], "init_info.session"),
            token=None if token is None else text_of(token, "init_info.token", MAX_NAME),
            endpoints=tuple(endpoints),
            timeout_s=seconds_of(fields["timeout_s"], "init_info.timeout_s"),
        )


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """One sync. `plan` and `allocations` are None when the worker has them from an earlier sync.

    `digests` is None without verification; else the file of each device's trainer rank, or empty likewise.
    """

    session: str
    sync: int
    plan: Plan | None
    plan_digest: str
    allocations: Mapping[str, tuple[IpcHandle, ...]] | None
    epoch: int
    digests: Mapping[str, str] | None = None

    @classmethod
    def from_json(cls, obj: object) -> UpdateInfo:
        """Check a decoded `update_info`; the handles' own fields are checked by `IpcHandle.from_json`.

        Raises:
            ValueError: Naming the field that is missing, unknown or out of range.
        """
        required = ("session", "sync", "plan", "plan_digest", "allocations", "epoch")
        fields = object_of(obj, "update_info", required=required, optional=("digests",))
        allocations: dict[str, tuple[IpcHandle, ...]] | None = None
        if fields["allocations"] is not None:
            sections = fields["allocations"]
            if not isinstance(sections, dict) or not sections or len(sections) > MAX_ENDPOINTS:
                raise ValueError(
                    f"update_info.allocations: expected an object of device keys, got {shown(sections)}"
                )
            allocations = {
                text_of(key, "update_info.allocations", MAX_NAME): tuple(
                    _handle(handle, f"update_info.allocations[{key!r}][{index}]", key)
                    for index, handle in enumerate(
                        array_of(handles, f"update_info.allocations[{key!r}]", MAX_ROWS)
                    )
                )
                for key, handles in sections.items()
            }
        digest = text_of(fields["plan_digest"], "update_info.plan_digest", MAX_NAME)
        if not digest:
            raise ValueError("update_info.plan_digest: expected a digest, got an empty string")
        return cls(
            session=session_of(fields["session"], "update_info.session"),
            sync=integer_of(fields["sync"], "update_info.sync", 1, MAX_SYNC),
            plan=None if fields["plan"] is None else Plan.from_json(fields["plan"]),
            plan_digest=digest,
            allocations=allocations,
            epoch=integer_of(fields["epoch"], "update_info.epoch", 0, 1 << 53),
            digests=_digest_files(fields.get("digests")),
        )


@dataclass(frozen=True, kw_only=True)
class AbortInfo:
    """Drop the update that is open, if any."""

    session: str
    abort: str


def parse_update(obj: object) -> UpdateInfo | AbortInfo:
    """An `update_info` is a sync or, when it has the field `abort`, the end of one that failed.

    Raises:
        ValueError: Naming the field that is missing, unknown or out of range.
    """
    if isinstance(obj, dict) and "abort" in obj:
        fields = object_of(obj, "update_info", required=("session", "abort"))
        return AbortInfo(
            session=session_of(fields["session"], "update_info.session"),
            abort=text_of(fields["abort"], "update_info.abort", MAX_TEXT),
        )
    return UpdateInfo.from_json(obj)


def _digest_files(obj: object) -> Mapping[str, str] | None:
    if obj is None:
        return None
    if not isinstance(obj, dict) or len(obj) > MAX_ENDPOINTS:
        raise ValueError(f"update_info.digests: expected an object of device keys, got {shown(obj)}")
    files: dict[str, str] = {}
    for key, name in obj.items():
        where = f"update_info.digests[{shown(key)}]"
        files[text_of(key, "update_info.digests", MAX_NAME)] = text_of(name, where, MAX_NAME)
        if not _CONTROL_FILE.fullmatch(name) or name.startswith("."):
            raise ValueError(f"{where}: expected a plain file name, got {shown(name)}")
    return files


def _handle(obj: object, where: str, device: str) -> IpcHandle:
    if not isinstance(obj, dict):
        raise ValueError(f"{where}: expected a handle object, got {shown(obj)}")
    try:
        handle = IpcHandle.from_json(obj)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    # Another rank signals when its memory may be read, so a handle under the wrong key must not pass unseen.
    if handle.device != device:
        raise ValueError(f"{where}: the handle is of device {shown(handle.device)}, not of {shown(device)}")
    return handle
