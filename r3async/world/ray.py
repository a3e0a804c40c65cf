"""Actors as processes of a Ray cluster. The only file that calls Ray.

Ray is imported when it is first needed: a command that starts no actor does not pay for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from r3async.world import ActorLost, ActorRef, Bundle, Node, NotFree, Placement, Reservation
from r3async.world.network import address_of

PLACEMENT = Placement()
SPARE_ACTORS = 16
"""Of a cluster that is started here: a run may have that many more than it begins with."""
AGAIN_SECONDS = 0.25
"""Between two looks at what is free."""
RESERVE_SECONDS = 2.0
"""Ray reserves what is free in milliseconds; what it cannot in this time, others have taken."""


TOO_BUSY = "timed out during startup"
"""Of what `ray.init` raises where the node did not report itself."""


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


@dataclass(frozen=True)
class RayReservation:
    """`groups`: Ray's placement groups. `bundles`: the group of each bundle, and its number in it."""

    groups: tuple[Any, ...]
    bundles: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.bundles)


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
                capacity = max(actors, os.cpu_count() or 1) + SPARE_ACTORS
                with _bare_head(), _hangups_blocked():
                    _start(capacity)
        except Exception as error:
            raise ConnectionError(_not_connected(address, str(error).partition("\n")[0])) from error
        self._owns = True

    def nodes(self) -> list[Node]:
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        home = ray.get_runtime_context().get_node_id()
        return [_node(node, free.get(node["NodeID"], {}), home) for node in sorted(alive, key=_order)]

    def reserve(self, plan: Callable[[Sequence[Node]], Sequence[Bundle]], seconds: float) -> RayReservation:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return _reserve(plan(self.nodes()))
            except NotFree:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(AGAIN_SECONDS)

    def release(self, reservation: Reservation, bundle: int | None = None) -> None:
        from ray.util.placement_group import remove_placement_group

        assert isinstance(reservation, RayReservation)
        if bundle is None:
            ended = set(range(len(reservation.groups)))
        else:
            group, _ = reservation.bundles[bundle]
            ended = {group} if sum(of == group for of, _ in reservation.bundles) == 1 else set()
        for index in ended:
            remove_placement_group(reservation.groups[index])

    def address(self, interface: str = "") -> str:
        import ray

        return address_of(interface) if interface else str(ray.util.get_node_ip_address())

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
        if placement.within is not None:
            options["scheduling_strategy"] = _strategy(*placement.within)
        elif placement.beside:
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


def _order(node: Any) -> tuple[str, str]:
    return node["NodeManagerHostname"], node["NodeID"]


def _node(node: Any, free: Any, home: str) -> Node:
    total = node["Resources"]
    kinds = [key.removeprefix("accelerator_type:") for key in total if key.startswith("accelerator_type:")]
    return Node(
        node["NodeID"],
        node["NodeManagerHostname"] or node["NodeManagerAddress"],
        float(total.get("CPU", 0)),
        float(total.get("GPU", 0)),
        float(free.get("CPU", 0)),
        float(free.get("GPU", 0)),
        float(total.get("memory", 0)),
        kinds[0] if kinds else "",
        node["NodeID"] == home,
        float(total.get("object_store_memory", 0)),
    )


def _reserve(bundles: Sequence[Bundle]) -> RayReservation:
    """Those that stay in one group, whose hosts are certain; each that moves in one of its own, whose host is a wish."""
    from ray.util.placement_group import placement_group, remove_placement_group

    staying = [bundle for bundle in bundles if not bundle.moves]
    groups, at, fixed = [], list[tuple[int, int]](), 0
    if staying:
        wanted = [{"ray.io/node-id": bundle.node} for bundle in staying]
        groups.append(placement_group([_resources(b) for b in staying], "PACK", bundle_label_selector=wanted))
    for bundle in bundles:
        if bundle.moves:
            at.append((len(groups), 0))
            groups.append(
                placement_group([_resources(bundle)], "STRICT_PACK", _soft_target_node_id=bundle.node or None)
            )
        else:
            at.append((0, fixed))
            fixed += 1
    deadline = time.monotonic() + RESERVE_SECONDS
    if all(group.wait(max(0.01, deadline - time.monotonic())) for group in groups):
        return RayReservation(tuple(groups), tuple(at))
    for group in groups:
        remove_placement_group(group)
    asked = sum(bundle.gpus for bundle in bundles), sum(bundle.cpus for bundle in bundles)
    raise NotFree(f"others were faster: Ray could not reserve {asked[0]:g} GPUs and {asked[1]:g} CPUs as planned")


def _resources(bundle: Bundle) -> dict[str, float]:
    return {"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {})


def _strategy(reservation: Reservation, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    assert isinstance(reservation, RayReservation)
    group, index = reservation.bundles[bundle]
    return PlacementGroupSchedulingStrategy(reservation.groups[group], index)


def _start(capacity: int) -> None:
    """A Ray of our own on this machine. Its node has 30 s to report itself, however busy the machine is: once more, then."""
    import psutil
    import ray

    here = psutil.Process()
    before = set(here.children())
    for last in (False, True):
        try:
            ray.init(
                "local",
                num_cpus=capacity,
                include_dashboard=False,
                logging_level="error",
                # Its environment is not that of an actor here: it would never be used.
                _system_config={"prestart_worker_first_driver": False},
            )
            return
        except Exception as error:
            if last or TOO_BUSY not in str(error):
                raise
        # Ray leaves what it started.
        for process in set(here.children()) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in ("gcs_server", "raylet"):
                    process.kill()


@contextlib.contextmanager
def _bare_head() -> Iterator[None]:
    """Inside, `ray.init` starts no process for a dashboard, which it would wait for also where that is left out, and none that
    asks for further machines. A Ray that has other names for them starts them."""
    from ray._private import node, services

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (services, "start_api_server", lambda *args, **options: (None, None)),
            (node.Node, "start_monitor", lambda head: None),
        ):
            if (theirs := getattr(owner, name, None)) is not None:
                setattr(owner, name, instead)
                stack.callback(setattr, owner, name, theirs)
        yield


@contextlib.contextmanager
def _hangups_blocked() -> Iterator[None]:
    """What is started inside never gets SIGHUP: a closed terminal sends it to all processes of the command, which alone is to end
    them. Ray does the same for SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _not_connected(address: str | None, why: str) -> str:
    if not address:
        return f"Ray did not start on this machine: {why} Its logs are in /tmp/ray/session_latest/logs"
    return f"the Ray cluster at {address} (`cluster.address`, or RAY_ADDRESS) cannot be reached: {why}"


def _handle(actor: ActorRef) -> Any:
    assert isinstance(actor, RayRef)
    return actor._handle
