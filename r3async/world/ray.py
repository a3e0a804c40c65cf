"""Actors as processes of a Ray cluster. The only file that calls Ray.

Ray is imported when it is first needed: a command that starts no actor does not pay for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from r3async.world import ActorLost, ActorRef, Placement

PLACEMENT = Placement()


class RayRef:
    """See `world.ActorRef`."""

    def __init__(self, name: str, handle: Any):
        self.name, self._handle = name, handle

    def __repr__(self) -> str:
        return f"RayRef({self.name!r})"

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        answer = getattr(self._handle, method).remote(*args, **kwargs)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except Exception as error:
            _raise(self.name, error)


def _raise(name: str, error: Exception) -> None:
    """The exception that the actor raised, or that it was lost."""
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

    if isinstance(error, RayActorError | ActorUnavailableError | ObjectLostError):
        raise ActorLost(f"{name or 'an actor'}: {str(error).strip() or type(error).__name__}") from error
    if isinstance(error, GetTimeoutError):
        raise TimeoutError(str(error)) from error
    if isinstance(error, RayTaskError) and isinstance(cause := getattr(error, "cause", None), Exception):
        raise cause from error
    raise error


class RayActors:
    """See `world.Actors`."""

    def __init__(self) -> None:
        self._owns = False

    def connect(self, address: str | None, actors: int) -> None:
        import ray

        if ray.is_initialized():
            return
        address = address or os.environ.get("RAY_ADDRESS")
        try:
            if address:
                ray.init(address=address, log_to_driver=True, logging_level="error")
            else:
                # Local actors share few cores on purpose: logical CPUs only count actors.
                # "local": one of its own, also where somebody has started a head on this host.
                capacity = max(actors, os.cpu_count() or 1)
                ray.init("local", num_cpus=capacity, include_dashboard=False, logging_level="error")
        except Exception as error:
            raise ConnectionError(_not_connected(address, str(error).partition("\n")[0])) from error
        self._owns = True

    def gpus(self) -> float:
        import ray

        return float(ray.cluster_resources().get("GPU", 0))

    def spawn(self, kind: type, *args: Any, name: str, placement: Placement = PLACEMENT, **env: str) -> RayRef:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from r3async.world.processes import environment
        from r3async.world.real import REAL

        options: dict[str, Any] = {
            "num_cpus": 1 if placement.threads else 0,
            "num_gpus": placement.gpus,
            "runtime_env": {"env_vars": environment(placement.threads)},
        }
        if placement.restarts:
            options |= {"max_restarts": placement.restarts, "max_task_retries": 0}
        if placement.concurrency is not None:
            options["max_concurrency"] = placement.concurrency
        if placement.beside:
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        lanes = dict.fromkeys(placement.lanes, 1)
        remote = ray.remote(concurrency_groups=lanes) if lanes else ray.remote  # no option, unlike the others
        return RayRef(name, remote(kind).options(**options).remote(REAL, *args))

    def current(self) -> RayRef:
        import ray

        return RayRef("", ray.get_runtime_context().current_actor)

    def kill(self, actor: ActorRef, *, restart: bool = False) -> None:
        import ray

        ray.kill(_handle(actor), no_restart=not restart)

    def put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout)
        except Exception as error:
            _raise("", error)

    def begin(self, actor: ActorRef, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        call = getattr(_handle(actor), method)
        return (call.options(concurrency_group=lane) if lane else call).remote(*args, **kwargs)

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        import ray

        return ray.wait(list(calls), timeout=timeout)

    def disconnect(self) -> None:
        if self._owns:  # else an import of Ray may just have been interrupted, and it cannot be imported twice
            import ray

            ray.shutdown()
            time.sleep(0.1)
        self._owns = False


def _not_connected(address: str | None, why: str) -> str:
    if not address:
        return f"Ray did not start on this machine: {why} Its logs are in /tmp/ray/session_latest/logs"
    return f"the Ray cluster at {address} (`cluster.address`, or RAY_ADDRESS) cannot be reached: {why}"


def _handle(actor: ActorRef) -> Any:
    assert isinstance(actor, RayRef)
    return actor._handle
