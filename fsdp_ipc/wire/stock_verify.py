"""`verify=` on the stock wire: the checksums that vLLM's `/weight_checker` gives, compared between replicas.

The stock worker has no way to learn what the trainer meant to send, so this finds a replica that holds other weights than
the rest, not an error that all of them share. vLLM makes the checksums on the CPU: expect seconds for each GB of weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_ipc.wire.stock import StockDialect

__all__ = ["ReplicaCheck"]

_REPLICA = re.compile(r"dp(\d+):(.*)", re.DOTALL)
_EXPERTS = re.compile(r"\.experts\.|\.routed_experts\.")
_MAX_NAMED = 6


class ReplicaCheck:
    """Compares what the replicas of a server, or of several, hold.

    Args:
        client: The sender's client.
        dialect: The server's release.

    Raises:
        ValueError: There is nothing to compare: no `/weight_checker`, or one replica only.
    """

    def __init__(self, client: Any, dialect: StockDialect) -> None:
        instead = (
            'Use verify="off", or the back end "fsdp_ipc", whose workers compare their weights with the trainer\'s own '
            "digests"
        )
        if not dialect.checksums or not hasattr(client, "weight_checksums"):
            raise ValueError(
                "verify= on the stock wire asks the server's /weight_checker, which vLLM has from 0.32 on and only "
                f"HTTPWeightSyncClient asks: it is not there. {instead}"
            )
        info = client.server_info()
        parallel: Mapping[str, Any] = info.parallel_config or {}
        replicas = len(client.urls) * int(parallel.get("data_parallel_size") or 1)
        if replicas < 2:
            raise ValueError(
                f"verify= on the stock wire compares replicas, and this server has one. {instead}"
            )
        self._client = client
        self._experts_differ = bool(parallel.get("enable_expert_parallel"))

    def compare(self) -> int:
        """Sender: compare all replicas with the first.

        Returns:
            The number of parameters compared.

        Raises:
            ValueError: Replicas hold different weights; names the parameters, both checksums and the replicas.
        """
        replicas: dict[str, dict[str, str]] = {}
        for url, answer in zip(self._client.urls, self._client.weight_checksums(), strict=True):
            for key, checksum in answer.items():
                match = _REPLICA.fullmatch(key)
                replica, name = (f"{url} (dp{match[1]})", match[2]) if match else (url, key)
                if not (self._experts_differ and _EXPERTS.search(name)):
                    replicas.setdefault(replica, {})[name] = checksum
        (first, expected), *others = replicas.items()
        for replica, held in others:
            wrong = [n for n in {**expected, **held} if expected.get(n) != held.get(n)]
            if wrong:
                shown = ", ".join(
                    f"{n!r} ({str(expected.get(n))[:16]} and {str(held.get(n))[:16]})"
                    for n in wrong[:_MAX_NAMED]
                )
                more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
                raise ValueError(
                    f"replicas hold different weights after the update: {first} and {replica} differ in {shown}{more}. The "
                    "version is not published; send again"
                )
        return len(expected)

    def publish(self, version: str) -> None:
        """Sender: name the weights, after they were found to be equal."""
        self._client.publish_version(version)
