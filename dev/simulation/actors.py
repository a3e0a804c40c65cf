"""Simulated actors, and reservations of processes and GPUs on simulated hosts."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import numpy as np

from dev.simulation.loop import CURRENT_PROCESS, VirtualFuture, VirtualTask
from dev.simulation.network import draw_seconds
from dev.simulation.processes import HostProcess
from r3async.world import (
    ActorLostError,
    ActorOptions,
    ActorRef,
    ClusterNode,
    Reservation,
    ResourceBundle,
)

if TYPE_CHECKING:
    from dev.simulation.world import SimulatedHost, Simulation

__all__ = [
    "SharedValue",
    "SimulatedActor",
    "SimulatedActorRef",
    "SimulatedActors",
    "copy_as_sent",
    "copy_error_as_sent",
]

HOST_CPUS = 4096
"""CPUs of a host: as many as the processes that a run may have."""


class SimulatedReservation:
    """The result of `Actors.reserve_bundles`. It is released when the process that
    reserved it ends."""

    passes_between_processes = True

    def __init__(self, owner: HostProcess, bundles: Sequence[ResourceBundle]):
        self.bundles = list(bundles)
        self.released_bundles = set[int]()
        made = owner.simulation.reservations
        self.number = len(made)
        made.append(self)
        owner.reservations.append(self)

    def __len__(self) -> int:
        return len(self.bundles)

    def __reduce__(self) -> tuple[Callable[[int], SimulatedReservation], tuple[int]]:
        return _unpickle_reservation, (self.number,)


def _unpickle_reservation(number: int) -> SimulatedReservation:
    process = CURRENT_PROCESS.get()
    assert isinstance(process, HostProcess)
    return process.simulation.reservations[number]


def release_bundles(reservation: Reservation, bundle: int | None = None) -> None:
    """Implement `Actors.release_bundles`."""
    assert isinstance(reservation, SimulatedReservation)
    if bundle is None:
        reservation.released_bundles |= set(range(len(reservation)))
    elif reservation.bundles[bundle].can_move:
        reservation.released_bundles.add(bundle)


def list_nodes(simulation: Simulation, local_host: SimulatedHost) -> list[ClusterNode]:
    """Return the hosts that are not lost, with what is not reserved on each."""
    reservations = simulation.reservations
    reserved = [
        bundle
        for each in reservations
        for index, bundle in enumerate(each.bundles)
        if index not in each.released_bundles
    ]
    out = []
    for name, host in simulation.hosts.items():
        if not host.is_lost:
            on_host = [bundle for bundle in reserved if bundle.node_id == name]
            cpus = HOST_CPUS - sum(b.cpus for b in on_host)
            gpus = simulation.gpus - sum(b.gpus for b in on_host)
            out.append(
                ClusterNode(
                    name, name, HOST_CPUS, simulation.gpus, cpus, gpus, is_local=host is local_host
                )
            )
    return out


def find_bundle_host(
    simulation: Simulation, reserved_bundle: tuple[Reservation, int]
) -> tuple[SimulatedHost | None, bool]:
    """Return the host of a bundle, or None if it is lost, and whether the bundle is
    bound to that host."""
    reservation, index = reserved_bundle
    assert isinstance(reservation, SimulatedReservation)
    bundle = reservation.bundles[index]
    host = simulation.hosts[bundle.node_id]
    return (None if host.is_lost else host), not bundle.can_move


# Simulated actors: each is a process on a host. Every call takes a while to arrive, and so
# does its answer.
#
# As on a Ray cluster, calls to an actor that starts for the first time wait for it, and calls to
# one that restarts fail. If a process ends before it answers, the caller notices only some time
# later. An actor ends with the process that spawned it.


DEFAULT_OPTIONS = ActorOptions()
DEFAULT_CONCURRENCY = 1000
"""Maximum number of concurrent calls of an actor whose options set none."""
PLACE_RETRY_SECONDS = 1.0
"""Seconds between two attempts to place an actor on a host."""


class ActorCall:
    """One call of an actor's method."""

    __slots__ = ("answer", "args", "caller", "context", "kwargs", "method", "task")

    def __init__(
        self,
        caller: HostProcess,
        answer: VirtualFuture,
        method: str,
        args: Any,
        kwargs: Any,
        context: Context,
    ):
        self.caller = caller
        self.answer = answer
        self.context = context
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.task: VirtualTask | None = None
        """Task that serves the call. The reference keeps it alive, as Ray does: the loop alone does
        not protect a task that waits for ever from the garbage collector."""


class SimulatedActorRef:
    """An implementation of `world.ActorRef`."""

    passes_between_processes = True

    def __init__(self, name: str, actor: SimulatedActor):
        self.name = name
        self.actor = actor

    def __repr__(self) -> str:
        return f"SimulatedRef({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[int], SimulatedActorRef], tuple[int]]:
        return _unpickle_ref, (self.actor.number,)

    async def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        caller = CURRENT_PROCESS.get()
        if not isinstance(caller, HostProcess):
            raise RuntimeError(f"{self.name}.{method} is called outside every process")
        caller.raise_if_ended()
        loop = caller.simulation.loop
        answer = loop.create_future()
        self.actor.send_call(
            ActorCall(
                caller, answer, method, copy_as_sent(args), copy_as_sent(kwargs), caller.context
            )
        )
        if timeout is None:
            return await answer
        timer = loop.call_later(timeout, _time_out_answer, answer)
        try:
            return await answer
        finally:
            timer.cancel()


def _time_out_answer(answer: VirtualFuture) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def _fail_answer(answer: VirtualFuture, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _resolve_answer(answer: VirtualFuture, result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


def _unpickle_ref(number: int) -> SimulatedActorRef:
    process = CURRENT_PROCESS.get()
    assert isinstance(process, HostProcess)
    actor = process.simulation.actors[number]
    return SimulatedActorRef(actor.name, actor)


class SimulatedActor:
    """An actor through all its processes. `process` is None until one can be placed, while the
    actor waits for its restart, and when it is lost for good."""

    def __init__(
        self,
        simulation: Simulation,
        spawner: HostProcess,
        actor_class: type,
        args: Any,
        name: str,
        placement: ActorOptions,
    ):
        self.simulation = simulation
        self.spawner = spawner
        self.actor_class = actor_class
        self.args = args
        self.name = name
        self.placement = placement
        self.number = len(simulation.actors)
        self.process: HostProcess | None = None
        self.instance: Any = None
        """The actor's object; None until its process has constructed it."""
        self.start_count = 0
        self.lost_reason = ""
        """Reason why the actor is lost for good; "" if it is not."""
        self._open_calls: dict[ActorCall, None] = {}
        """Calls on their way to the current process, which may still be starting, or
        being served by it."""
        self._queued_calls: deque[ActorCall] = deque()
        """Calls that have arrived and are not being served yet."""
        self._serving_count = 0
        self._max_concurrency = placement.max_concurrency or DEFAULT_CONCURRENCY

    # -- starting and ending -----------------------------------------------------------------------

    def start_process(self) -> None:
        """Begin a process for the actor, or try again later if no host is there."""
        if self.lost_reason:
            return
        host = self.simulation.place_actor(self)
        if host is None:  # there may be one later
            self.simulation.loop.call_later(
                PLACE_RETRY_SECONDS, self.start_process, context=Context()
            )
            return
        self.start_count += 1
        self.process = process = self.simulation.begin_process(self.name, host, actor=self)
        seconds, fails = self.simulation.plan_start(self)
        begin = self._fail_start if fails else self._construct_instance
        self.simulation.loop.call_later(seconds, begin, process, context=process.context)

    def _fail_start(self, process: HostProcess) -> None:
        self.simulation.end_process(process, "its start failed")

    def _construct_instance(self, process: HostProcess) -> None:
        log = self.simulation.log
        try:
            self.instance = self.actor_class(process.world, *copy_as_sent(self.args))
        except Exception as error:
            log.log_event(self.name, "not_constructed", error=f"{type(error).__name__}: {error}")
            reason = f"its constructor raised {type(error).__name__}: {error}"
            if self.start_count == 1:
                self._mark_lost(reason)
            self.simulation.end_process(process, reason)
            return
        if not process.ended:
            log.log_event(self.name, "started", pid=process.pid, host=process.host.name)
            self._serve_queued()

    def on_process_end(self, reason: str) -> None:
        """Lose the open calls, and restart the actor if it may. Called by
        `Simulation.end_process`."""
        calls = self._open_calls
        self._open_calls = {}
        self._queued_calls.clear()
        self.process = None
        self.instance = None
        self._serving_count = 0
        for call in calls:
            self._send_actor_lost(call, reason)
        restarts_left = self.placement.max_restarts - self.start_count + 1
        if (
            not self.lost_reason
            and (restarts_left > 0 or self.placement.max_restarts < 0)
            and not self.spawner.ended
        ):
            after = draw_seconds(self.simulation.delays.restart, self.spawner.rng_for("restarts"))
            self.simulation.loop.call_later(after, self.start_process, context=Context())
        elif not self.lost_reason:
            self._mark_lost(reason)

    def kill(self, reason: str, *, restart: bool) -> None:
        if not restart:
            self._mark_lost(reason)
        if self.process is not None:
            self.simulation.end_process(self.process, reason)

    def _mark_lost(self, reason: str) -> None:
        self.lost_reason = self.lost_reason or reason

    # -- calls -------------------------------------------------------------------------------------

    def send_call(self, call: ActorCall) -> None:
        """Send a call to the actor's process. The calls of one caller arrive in order."""
        simulation = self.simulation
        caller = call.caller
        process = self.process
        simulation.log.log_detail(f"{caller.name} calls {self.name}.{call.method}")
        now = simulation.loop.now
        if process is None:
            self._send_actor_lost(call, self.lost_reason or "it restarts")
            return
        self._open_calls[call] = None
        if caller.holds_calls:
            caller.held_calls.append((self, call))
            return
        at = max(
            now + simulation.call_delay(caller.host, process.host, caller.rng_for("calls")),
            caller.last_arrivals.get(self, 0.0),
        )
        caller.last_arrivals[self] = at
        simulation.loop.call_at(at, self._receive_call, call, context=process.context)

    def receive_held_call(self, call: ActorCall) -> None:
        """Receive a call that was held, unless the process to which it was sent has ended."""
        if call in self._open_calls:
            self._receive_call(call)

    def _receive_call(self, call: ActorCall) -> None:
        if self.instance is None or self._serving_count >= self._max_concurrency:
            self._queued_calls.append(call)
        else:
            self._serve_call(call)

    def _serve_queued(self) -> None:
        while self._queued_calls and self._serving_count < self._max_concurrency:
            self._serve_call(self._queued_calls.popleft())

    def _serve_call(self, call: ActorCall) -> None:
        process = self.process
        assert process is not None
        try:
            args = [
                process.world.actors.get(arg) if type(arg) is SharedValue else arg
                for arg in call.args
            ]
            result = getattr(self.instance, call.method)(*args, **call.kwargs)
        except Exception as error:
            self._send_answer(process, call, _fail_answer, copy_error_as_sent(error))
            return
        if type(result) is CoroutineType:
            self._serving_count += 1
            call.task = self.simulation.loop.create_task(
                self._finish_call(process, call, result),
                name=call.method,
                context=process.context.copy(),
            )
        else:
            self._send_answer(process, call, _resolve_answer, copy_as_sent(result))

    async def _finish_call(
        self, process: HostProcess, call: ActorCall, answering: CoroutineType[Any, Any, Any]
    ) -> None:
        try:
            result = copy_as_sent(await answering)
        except asyncio.CancelledError:
            self._send_answer(
                process,
                call,
                _fail_answer,
                RuntimeError(f"{self.name}.{call.method} was cancelled"),
            )
        except Exception as error:
            self._send_answer(process, call, _fail_answer, copy_error_as_sent(error))
        else:
            self._send_answer(process, call, _resolve_answer, result)
        self._serving_count -= 1
        if self._queued_calls:
            self._serve_queued()

    def _send_answer(
        self,
        process: HostProcess,
        call: ActorCall,
        settle: Callable[[VirtualFuture, Any], None],
        value: Any,
    ) -> None:
        if process.ended or call not in self._open_calls:
            return
        del self._open_calls[call]
        simulation = self.simulation
        caller = call.caller
        simulation.log.log_detail(f"{self.name} answers {caller.name} {call.method}")
        after = simulation.call_delay(process.host, caller.host, process.rng_for("calls"))
        simulation.loop.call_later(after, settle, call.answer, value, context=caller.context)

    def _send_actor_lost(self, call: ActorCall, reason: str) -> None:
        """Fail the call with `ActorLostError` after a delay, when its caller notices that no
        answer will come."""
        after = draw_seconds(self.simulation.delays.notice, call.caller.rng_for("notices"))
        error = ActorLostError(f"{self.name}: {reason}")
        self.simulation.loop.call_later(
            after, _fail_answer, call.answer, error, context=call.caller.context
        )


class SharedValue:
    """The result of `Actors.put`: a value that its owner's process holds."""

    passes_between_processes = True

    def __init__(self, owner: HostProcess, value: Any):
        self.owner = owner
        self.value = value
        self.number = len(owner.simulation.shared_values)
        owner.simulation.shared_values.append(self)

    def __reduce__(self) -> tuple[Callable[[int], SharedValue], tuple[int]]:
        return _unpickle_shared_value, (self.number,)


def _unpickle_shared_value(number: int) -> SharedValue:
    process = CURRENT_PROCESS.get()
    assert isinstance(process, HostProcess)
    return process.simulation.shared_values[number]


class SimulatedActors:
    """An implementation of `world.Actors` without `begin_call` and `wait_for_call`, which are for
    blocking threads."""

    def __init__(self, process: HostProcess):
        self._process = process
        self._connected = False

    def join_cluster(self, address: str | None, actor_count: int) -> None:
        self._process.raise_if_ended()
        self._connected = True

    def list_nodes(self) -> list[ClusterNode]:
        return list_nodes(self._process.simulation, self._process.host)

    def reserve_bundles(
        self, plan: Callable[[Sequence[ClusterNode]], Sequence[ResourceBundle]], timeout: float
    ) -> SimulatedReservation:
        """Implement `Actors.reserve_bundles`. A simulated process cannot block: what is not free at
        once is refused."""
        self._process.raise_if_ended()
        return SimulatedReservation(self._process, plan(self.list_nodes()))

    def release_bundles(self, reservation: Reservation, bundle: int | None = None) -> None:
        release_bundles(reservation, bundle)

    def host_address(self, interface: str = "") -> str:
        return self._process.host.name

    def spawn_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_options: ActorOptions = DEFAULT_OPTIONS,
    ) -> SimulatedActorRef:
        process = self._process
        process.raise_if_ended()
        actor = SimulatedActor(
            process.simulation, process, actor_class, copy_as_sent(args), name, actor_options
        )
        process.simulation.actors.append(actor)
        process.spawned_actors.append(actor)
        actor.start_process()
        return SimulatedActorRef(name, actor)

    def current_actor(self) -> SimulatedActorRef:
        actor = self._process.actor
        if actor is None:
            raise RuntimeError(f"{self._process.name} is no actor")
        return SimulatedActorRef(actor.name, actor)

    def kill_actor(self, actor: ActorRef, *, restart: bool = False) -> None:
        self._process.raise_if_ended()
        assert isinstance(actor, SimulatedActorRef)
        actor.actor.kill(f"killed by {self._process.name}", restart=restart)
        self._process.raise_if_ended()

    def put(self, value: Any) -> SharedValue:
        self._process.raise_if_ended()
        return SharedValue(self._process, copy_as_sent(value))

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        self._process.raise_if_ended()
        if not isinstance(reference, SharedValue):
            raise NotImplementedError(
                "a simulated process cannot block until a call has ended: it awaits `ActorRef.call`"
            )
        if reference.owner.ended:
            raise ActorLostError(f"{reference.owner.name}: it ended, and what it shared with it")
        return copy_as_sent(reference.value)

    def begin_call(
        self, actor: ActorRef, method: str, *args: Any, concurrency_group: str = "", **kwargs: Any
    ) -> Any:
        raise NotImplementedError(
            "calls of a thread that blocks are not simulated: it awaits `ActorRef.call`"
        )

    def wait_for_call(
        self, calls: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        raise NotImplementedError(
            "a simulated process cannot block until a call has ended: it awaits `ActorRef.call`"
        )

    def leave_cluster(self) -> None:
        """End the cluster that `join_cluster` started, and all actors that this process spawned."""
        self._process.raise_if_ended()
        if self._connected:
            self._connected = False
            for actor in self._process.spawned_actors:
                actor.kill("the cluster has ended", restart=False)
            for reservation in self._process.reservations:
                release_bundles(reservation)


IMMUTABLE_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values are immutable and contain nothing mutable."""


def copy_as_sent(value: Any) -> Any:
    """Return a copy of a value, as it would arrive in another process. Raises what
    pickling raises."""
    kind = type(value)
    if kind in IMMUTABLE_TYPES:
        return value
    if kind is dict:  # its keys are hashable, so they do not change
        return {
            key: item if type(item) in IMMUTABLE_TYPES else copy_as_sent(item)
            for key, item in value.items()
        }
    if kind is list:
        return [item if type(item) in IMMUTABLE_TYPES else copy_as_sent(item) for item in value]
    if kind is tuple:
        return (
            tuple([item if type(item) in IMMUTABLE_TYPES else copy_as_sent(item) for item in value])
            if value
            else value
        )
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if getattr(kind, "passes_between_processes", False):
        return value
    return pickle.loads(pickle.dumps(value, protocol=5))


def copy_error_as_sent(error: Exception) -> Exception:
    """Return an exception as its caller receives it: as a `RuntimeError` with its message if it
    cannot be pickled."""
    try:
        arrived = copy_as_sent(error)
    except Exception:
        arrived = None
    if not isinstance(arrived, Exception):
        arrived = RuntimeError(f"{type(error).__name__}: {error}")
    return arrived.with_traceback(error.__traceback__)
