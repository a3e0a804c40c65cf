"""Actors, placement and calls on Ray, and the network addresses of this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from r3async.world import (
    ActorLostError,
    ActorOptions,
    ActorRef,
    ClusterNode,
    InsufficientResourcesError,
    Reservation,
    ResourceBundle,
    World,
)
from r3async.world.interfaces import interface_address
from r3async.world.keeper import STOP_SIGNALS
from r3async.world.kept_programs import kill_processes, list_process_trees
from r3async.world.ray_placement_groups import (
    RayReservation,
    build_scheduling_strategy,
    reserve_placement_groups,
)

DEFAULT_OPTIONS = ActorOptions()
SPARE_ACTORS = 16
"""Number of actors that a run may have beyond those it begins with, on a cluster that
is started here."""
RESTART_RETRY_SECONDS = 1.0
"""Pause before a restarted actor that could not be constructed ends, and is restarted again."""
RESERVE_RETRY_SECONDS = 0.25
"""Seconds between two attempts to reserve resources."""


STARTUP_TIMEOUT_TEXT = "timed out during startup"
"""Part of the error that `ray.init` raises if the node did not report itself."""


class RayActorRef:
    """An actor of a Ray cluster, as a `world.ActorRef`."""

    def __init__(self, name: str, handle: Any):
        self.name = name
        self._handle = handle

    def __repr__(self) -> str:
        return f"RayRef({self.name!r})"

    async def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        answer = getattr(self._handle, method).remote(*args, **kwargs)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except Exception as error:
            _raise_actor_error(self.name, error)


def _raise_actor_error(name: str, error: Exception) -> None:
    """Raise the exception that the actor raised, or `ActorLostError` if it was lost."""
    from ray.exceptions import (
        ActorUnavailableError,
        GetTimeoutError,
        ObjectLostError,
        RayActorError,
        RayTaskError,
    )

    if isinstance(error, RayActorError | ActorUnavailableError | ObjectLostError):
        raise ActorLostError(
            f"{name or 'an actor'}: {str(error).strip() or type(error).__name__}"
        ) from error
    if isinstance(error, GetTimeoutError):
        raise TimeoutError(str(error)) from error
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):
            raise cause from error
    raise error


def _ending_if_its_restart_fails(actor_class: type) -> type:
    """Return the class, except that a restarted actor whose constructor raises ends its process.

    Ray restarts an actor whose process ends, but gives up one whose constructor raises, for
    ever. A disk that fails while an actor is restarted must not cost the actor. The first start
    raises as usual.
    """

    class RestartableActor(actor_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            import ray

            try:
                super().__init__(*args, **kwargs)
            except Exception:
                if not ray.get_runtime_context().was_current_actor_reconstructed:
                    raise
                traceback.print_exc()
                sys.stderr.flush()
                time.sleep(RESTART_RETRY_SECONDS)
                os._exit(1)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(RestartableActor, name, getattr(actor_class, name))
    return RestartableActor


class RayActors:
    """Actors on a Ray cluster, as `world.Actors`.

    Args:
        world: The world that an actor is created with. Sent to the actor's process, it becomes that
            process's world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._owns_cluster = False
        self._local_pids: list[int] = []
        """Process ids of the Ray that was started here."""

    def join_cluster(self, address: str | None, actor_count: int) -> None:
        import ray

        if ray.is_initialized():
            return
        address = address or os.environ.get("RAY_ADDRESS")
        try:
            if address:
                with _keep_sigterm_handler():
                    ray.init(address=address, log_to_driver=True, logging_level="error")
            else:
                # Local actors share few cores on purpose: logical CPUs only count actors.
                # "local": a separate cluster, even if somebody has started a head on this host.
                capacity = max(actor_count, os.cpu_count() or 1) + SPARE_ACTORS
                self._local_pids = _start_local_ray(capacity)
        except Exception as error:
            raise ConnectionError(
                _connection_error_text(address, str(error).partition("\n")[0])
            ) from error
        self._owns_cluster = True

    def list_nodes(self) -> list[ClusterNode]:
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        home = ray.get_runtime_context().get_node_id()
        return [
            _cluster_node(node, free.get(node["NodeID"], {}), home)
            for node in sorted(alive, key=_node_sort_key)
        ]

    def reserve_bundles(
        self, plan: Callable[[Sequence[ClusterNode]], Sequence[ResourceBundle]], timeout: float
    ) -> RayReservation:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return reserve_placement_groups(plan(self.list_nodes()))
            except InsufficientResourcesError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RESERVE_RETRY_SECONDS)

    def release_bundles(self, reservation: Reservation, bundle: int | None = None) -> None:
        from ray.util.placement_group import remove_placement_group

        assert isinstance(reservation, RayReservation)
        if bundle is None:
            ended = set(range(len(reservation.placement_groups)))
        else:
            group, _ = reservation.bundle_locations[bundle]
            ended = (
                {group}
                if sum(of == group for of, _ in reservation.bundle_locations) == 1
                else set()
            )
        for index in ended:
            remove_placement_group(reservation.placement_groups[index])

    def host_address(self, interface: str = "") -> str:
        import ray

        return interface_address(interface) if interface else str(ray.util.get_node_ip_address())

    def spawn_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_options: ActorOptions = DEFAULT_OPTIONS,
        **env: str,
    ) -> RayActorRef:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from r3async.world.processes import actor_environment

        options: dict[str, Any] = {
            "num_cpus": 1 if actor_options.threads else 0,
            "num_gpus": actor_options.gpus,
            "runtime_env": {"env_vars": actor_environment(actor_options.threads)},
        }
        if actor_options.max_restarts:
            options |= {"max_restarts": actor_options.max_restarts, "max_task_retries": 0}
        if actor_options.max_concurrency is not None:
            options["max_concurrency"] = actor_options.max_concurrency
        if actor_options.reserved_bundle is not None:
            options["scheduling_strategy"] = build_scheduling_strategy(
                *actor_options.reserved_bundle
            )
        elif actor_options.same_node:
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        spawned_class = (
            _ending_if_its_restart_fails(actor_class) if actor_options.max_restarts else actor_class
        )
        lanes = dict.fromkeys(actor_options.concurrency_groups, 1)
        # No option, unlike the others.
        remote = ray.remote(concurrency_groups=lanes) if lanes else ray.remote
        return RayActorRef(
            name, remote(spawned_class).options(**options).remote(self._world, *args)
        )

    def current_actor(self) -> RayActorRef:
        import ray

        return RayActorRef("", ray.get_runtime_context().current_actor)

    def kill_actor(self, actor: ActorRef, *, restart: bool = False) -> None:
        import ray

        ray.kill(_ray_handle(actor), no_restart=not restart)

    def put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout)
        except Exception as error:
            _raise_actor_error("", error)

    def begin_call(
        self, actor: ActorRef, method: str, *args: Any, concurrency_group: str = "", **kwargs: Any
    ) -> Any:
        call = getattr(_ray_handle(actor), method)
        return (
            call.options(concurrency_group=concurrency_group) if concurrency_group else call
        ).remote(*args, **kwargs)

    def wait_for_call(
        self, calls: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        import ray

        return ray.wait(list(calls), timeout=timeout)

    def leave_cluster(self) -> None:
        # Else an import of Ray may just have been interrupted, and it cannot be imported twice.
        if self._owns_cluster:
            import ray

            left = list_process_trees(self._local_pids)
            ray.shutdown()
            kill_processes(left)  # what Ray's processes started ends by itself, but later
            time.sleep(0.1)
        self._owns_cluster = False
        self._local_pids = []


def _node_sort_key(node: Any) -> tuple[str, str]:
    return node["NodeManagerHostname"], node["NodeID"]


def _cluster_node(node: Any, free: Any, home: str) -> ClusterNode:
    total = node["Resources"]
    kinds = [
        key.removeprefix("accelerator_type:")
        for key in total
        if key.startswith("accelerator_type:")
    ]
    return ClusterNode(
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


def _start_local_ray(capacity: int) -> list[int]:
    """Start a separate Ray on this machine, and return the ids of its processes. Its node has 30 s
    to report itself, which may be too short on a busy machine; then it is started once more."""
    import ray

    for last in (False, True):
        pids: list[int] = []
        try:
            with _keep_sigterm_handler(), _replace_in_ray(pids):
                ray.init(
                    "local",
                    num_cpus=capacity,
                    include_dashboard=False,
                    logging_level="error",
                    # Its environment is not that of an actor here: it would never be used.
                    _system_config={"prestart_worker_first_driver": False},
                )
            return pids
        except BaseException as error:  # a stop, too: Ray leaves the processes that it started
            left = list_process_trees(pids)
            ray.shutdown()
            kill_processes(left)
            if last or STARTUP_TIMEOUT_TEXT not in str(error):
                raise
    raise AssertionError


@contextlib.contextmanager
def _replace_in_ray(pids: list[int]) -> Iterator[None]:
    """Make `ray.init` start a cluster of this machine and this user alone, which only this process
    ends. The ids of Ray's processes are added to `pids`.

    * No dashboard process is started, which it would otherwise wait for even without a dashboard,
      and no process that requests further machines.
    * Everything listens on loopback.
    * Signals that stop a run are blocked in all processes of Ray and in what they start: `timeout`,
      systemd, Slurm and a closed terminal send them to all processes of the command, and the
      command alone is to end them. Ray does the same for SIGINT only.
    * Only this user can read the file with the cluster's token.

    A version of Ray that has other names keeps its own ways.
    """
    from ray._private import node, ray_constants, services
    from ray._private.authentication import authentication_token_setup as tokens

    def generate_private_token() -> None:
        before = os.umask(0o077)
        try:
            generate_token()
        finally:
            os.umask(before)

    def start_shielded(*args: Any, **options: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            started = start_process(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Or Ray would wait for each of them to obey.
        started.process.terminate = started.process.kill
        pids.append(started.process.pid)
        return started

    start_process = services.start_ray_process
    generate_token = tokens.generate_and_save_token
    with contextlib.suppress(OSError):  # there is none, or it is not ours
        tokens._get_default_token_path().chmod(0o600)
    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (services, "start_api_server", lambda *args, **options: (None, None)),
            (services, "start_ray_process", start_shielded),
            (node.Node, "start_monitor", lambda head: None),
            (tokens, "generate_and_save_token", generate_private_token),
            (ray_constants, "ENABLE_RAY_CLUSTER", False),
        ):
            theirs = getattr(owner, name, None)
            if theirs is not None:
                setattr(owner, name, instead)
                stack.callback(setattr, owner, name, theirs)
        yield


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which `ray.init` replaces at its beginning, and
    its C++ part later."""
    from ray._private import utils

    set_handler = utils.set_sigterm_handler
    handler = signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _connection_error_text(address: str | None, why: str) -> str:
    if not address:
        return (
            f"Ray did not start on this machine: {why} It waits 30 s, so on a busy machine repeat "
            "the command. Its logs are in the newest /tmp/ray/session_*/logs"
        )
    return (
        f"the Ray cluster at {address} (`cluster.address`, or RAY_ADDRESS) cannot be reached: {why}"
    )


def _ray_handle(actor: ActorRef) -> Any:
    assert isinstance(actor, RayActorRef)
    return actor._handle
