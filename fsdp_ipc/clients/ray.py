"""The Ray client: vLLM engines that are Ray actors, one or several, driven as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from fsdp_ipc.clients.base import ServerInfo, ServerRequestError, hint_for
from fsdp_ipc.clients.inprocess import init_request, update_request


class RayWeightSyncClient:
    """Drives Ray actors whose class is, or has the four weight-transfer methods of, vLLM's `LLM` or `AsyncLLM`.

    Every call goes to all actors at once, waits for all of them, and raises if one of them failed; the next call
    starts only after that. With several actors a version is published only when all of them closed the update.

    Args:
        actors: An actor handle, or the handles of all engines that must hold the same weights.
        call_timeout_s: Seconds after which a call is given up. The actor may still be busy with it then.

    Raises:
        ValueError: No actor, or one twice.
    """

    __module__ = "fsdp_ipc.clients.ray"

    def __init__(self, actors: Any, *, call_timeout_s: float = 300.0) -> None:
        self.actors: tuple[Any, ...] = tuple(actors) if isinstance(actors, Sequence) else (actors,)
        if not self.actors:
            raise ValueError("no Ray actor was given")
        if len(set(self.actors)) != len(self.actors):
            raise ValueError("an actor is named twice: it would get every update twice")
        self.call_timeout_s = call_timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand the backend's handshake to every worker of every actor."""
        request = init_request(init_info)
        self._each("init_weight_transfer_engine", lambda a: a.init_weight_transfer_engine.remote(request))

    def start_weight_update(self) -> None:
        """Open a weight update on every actor."""
        self._each("start_weight_update", lambda a: a.start_weight_update.remote())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Deliver one payload, raw handles and all, to every actor."""
        # One copy in the object store instead of one an actor.
        request = (
            ray.put(update_request(update_info)) if len(self.actors) > 1 else update_request(update_info)
        )
        self._each("update_weights", lambda a: a.update_weights.remote(request))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on every actor, then publish the version on all of them.

        Args:
            weight_version: Name of the weights; the actors need `update_weight_version` (vLLM >= 0.27).
        """
        self._each("finish_weight_update", lambda a: a.finish_weight_update.remote())
        if weight_version is not None:
            self._each("update_weight_version", lambda a: a.update_weight_version.remote(weight_version))

    def server_info(self) -> ServerInfo:
        """Look into every actor for its release, its backend and its number of workers.

        Returns:
            The facts, the same release and backend for every actor.

        Raises:
            ServerRequestError: An actor did not answer.
            ValueError: The actors differ in release or backend.
        """
        facts = self._each("server_info", lambda a: a.__ray_call__.remote(_look_into_actor()))
        if len({(fact["version"], fact["backend"]) for fact in facts}) != 1:
            raise ValueError(f"the actors must run the same release with the same backend, but are: {facts}")
        return ServerInfo(
            version=facts[0]["version"],
            backend=facts[0]["backend"],
            backend_known=all(fact["known"] for fact in facts),
            num_workers=tuple(fact["workers"] for fact in facts),
        )

    def reset_prefix_cache(self) -> bool | None:
        """Drop the cached keys and values of old weights on every actor; an update does not do it.

        Returns:
            False if one of them says that it was not done, None if one does not tell, else True.
        """
        answers = self._each("reset_prefix_cache", lambda a: a.reset_prefix_cache.remote())
        if any(answer is False for answer in answers):
            return False
        return True if all(answer is True for answer in answers) else None

    def _each(self, method: str, call: Callable[[Any], Any]) -> list[Any]:
        """Call every actor, wait for all, and raise the failures of all as one."""
        errors: list[ServerRequestError] = []
        refs: dict[int, Any] = {}
        for index, actor in enumerate(self.actors):
            try:
                refs[index] = call(actor)
            except AttributeError as error:
                errors.append(self._error(index, method, f"the actor has no such method: {error}"))
        pending: set[Any] = set()
        if refs:
            pending = set(
                ray.wait(
                    list(refs.values()), num_returns=len(refs), timeout=self.call_timeout_s, fetch_local=False
                )[1]
            )
        results: list[Any] = []
        for index, ref in refs.items():
            if ref in pending:
                errors.append(self._error(index, method, f"timed out after {self.call_timeout_s:g} s"))
                continue
            try:
                results.append(ray.get(ref, timeout=self.call_timeout_s))
            except ray.exceptions.RayTaskError as error:
                errors.append(self._error(index, method, f"{type(error.cause).__name__}: {error.cause}"))
            except ray.exceptions.RayError as error:
                errors.append(self._error(index, method, f"{type(error).__name__}: {error}"))
        if errors:
            first, *others = errors
            raise ServerRequestError(
                first.url, first.route, status=None, body=first.body, hint=first.hint, others=others
            )
        return results

    def _error(self, index: int, method: str, text: str) -> ServerRequestError:
        return ServerRequestError(
            f"Ray actor {index} of {len(self.actors)}",
            method,
            status=None,
            body=text,
            hint=hint_for(None, text),
        )


def _look_into_actor() -> Callable[[Any], dict[str, Any]]:
    """A function that Ray ships by value, because the actor's environment may lack this package."""

    def look(actor: Any) -> dict[str, Any]:
        try:
            import vllm

            version = str(vllm.__version__)
        except ImportError:
            version = "unknown"
        seen = [actor]
        config = None
        for item in seen:
            config = getattr(item, "vllm_config", None)
            if config is not None or len(seen) > 8:
                break
            inner = [getattr(item, name, None) for name in ("llm_engine", "engine", "llm")]
            seen.extend(found for found in inner if found is not None)
        transfer = getattr(config, "weight_transfer_config", None)
        workers = getattr(getattr(config, "parallel_config", None), "world_size_across_dp", None)
        return {
            "version": version,
            "backend": getattr(transfer, "backend", None),
            "known": config is not None,
            "workers": workers if isinstance(workers, int) else None,
        }

    return look
