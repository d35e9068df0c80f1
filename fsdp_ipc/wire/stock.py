"""The stock `ipc` backend of vLLM 0.22 to 0.33: its dialects and its payloads, as data and pure functions."""

from __future__ import annotations

import base64
import pickle
from typing import Any


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
