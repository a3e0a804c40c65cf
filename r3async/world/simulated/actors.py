"""Simulated actors: each is a process on a host, and every call takes a while to arrive, and its answer to come back.

As on a Ray cluster: calls to an actor that starts wait for it; those to one that restarts fail; an answer that its process does
not live to give is missed only some time after its end; and an actor ends with the process that spawned it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from r3async.world import ActorLost, ActorRef, Bundle, Node, Placement, Reservation
from r3async.world.simulated.loop import PROCESS, Future, Task
from r3async.world.simulated.network import draw
from r3async.world.simulated.processes import HostProcess
from r3async.world.simulated.reserved import SimulatedReservation, nodes, release

if TYPE_CHECKING:
    from r3async.world.simulated.world import Simulation
import pickle

import numpy as np

PLACEMENT = Placement()
CONCURRENCY = 1000
"""Calls at once, where a placement names none."""
WAIT_SECONDS = 1.0
"""Between two looks for a host."""


class Call:
    """One call of an actor's method."""

    __slots__ = ("answer", "args", "caller", "context", "kwargs", "method", "serving")

    def __init__(self, caller: HostProcess, answer: Future, method: str, args: Any, kwargs: Any, context: Context):
        self.caller, self.answer, self.context = caller, answer, context
        self.method, self.args, self.kwargs = method, args, kwargs
        self.serving: Task | None = None
        """Held here, as Ray holds it: a loop alone does not keep a task that waits for ever from the garbage collector."""


class SimulatedRef:
    """See `world.ActorRef`."""

    passes_between_processes = True

    def __init__(self, name: str, actor: Actor):
        self.name, self.actor = name, actor

    def __repr__(self) -> str:
        return f"SimulatedRef({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[int], SimulatedRef], tuple[int]]:
        return _ref, (self.actor.number,)

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        caller = PROCESS.get()
        if not isinstance(caller, HostProcess):
            raise RuntimeError(f"{self.name}.{method} is called outside every process")
        caller.check()
        loop = caller.simulation.loop
        answer = loop.create_future()
        self.actor.ask(Call(caller, answer, method, copied(args), copied(kwargs), caller.context))
        if timeout is None:
            return await answer
        timer = loop.call_later(timeout, _expire, answer)
        try:
            return await answer
        finally:
            timer.cancel()


def _expire(answer: Future) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def _fail(answer: Future, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _succeed(answer: Future, result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


def _ref(number: int) -> SimulatedRef:
    process = PROCESS.get()
    assert isinstance(process, HostProcess)
    actor = process.simulation.actors[number]
    return SimulatedRef(actor.name, actor)


class Actor:
    """An actor, through all of its processes. `process` is None while it (re)starts, and when it is lost for good."""

    def __init__(
        self, simulation: Simulation, spawner: HostProcess, kind: type, args: Any, name: str, placement: Placement
    ):
        self.simulation, self.spawner, self.kind, self.args = simulation, spawner, kind, args
        self.name, self.placement = name, placement
        self.number = len(simulation.actors)
        self.process: HostProcess | None = None
        self.instance: Any = None
        """Once the process has made it."""
        self.starts = 0
        self.lost = ""
        """Why it is lost for good."""
        self._calls: dict[Call, None] = {}
        """On their way to the process that is there, or starts for the first time, or served by it."""
        self._waiting: deque[Call] = deque()
        """Arrived, and not begun."""
        self._serving = 0
        self._concurrency = placement.concurrency or CONCURRENCY

    # -- starting and ending -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process for it."""
        if self.lost:
            return
        host = self.simulation.place(self)
        if host is None:  # there may be one later
            self.simulation.loop.call_later(WAIT_SECONDS, self.start, context=Context())
            return
        self.starts += 1
        self.process = process = self.simulation.begin_process(self.name, host, actor=self)
        seconds, fails = self.simulation.plan_start(self)
        begin = self._die_early if fails else self._construct
        self.simulation.loop.call_later(seconds, begin, process, context=process.context)

    def _die_early(self, process: HostProcess) -> None:
        self.simulation.end(process, "its start failed")

    def _construct(self, process: HostProcess) -> None:
        log = self.simulation.log
        try:
            self.instance = self.kind(process.world, *copied(self.args))
        except Exception as error:
            log.event(self.name, "not_constructed", error=f"{type(error).__name__}: {error}")
            self._lose(f"its constructor raised {type(error).__name__}: {error}")
            self.simulation.end(process, self.lost)
            return
        if not process.ended:
            log.event(self.name, "started", pid=process.pid, host=process.host.name)
            self._serve_waiting()

    def process_ended(self, reason: str) -> None:
        """Of `Simulation.end`: its calls are lost, and it restarts if it may."""
        calls, self._calls = self._calls, {}
        self._waiting.clear()
        self.process, self.instance, self._serving = None, None, 0
        for call in calls:
            self._miss(call, reason)
        left = self.placement.restarts - self.starts + 1
        if not self.lost and (left > 0 or self.placement.restarts < 0) and not self.spawner.ended:
            after = draw(self.simulation.delays.restart, self.spawner.rng("restarts"))
            self.simulation.loop.call_later(after, self.start, context=Context())
        elif not self.lost:
            self._lose(reason)

    def kill(self, reason: str, *, restart: bool) -> None:
        if not restart:
            self._lose(reason)
        if self.process is not None:
            self.simulation.end(self.process, reason)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason

    # -- calls -------------------------------------------------------------------------------------------------------

    def ask(self, call: Call) -> None:
        """Send a call on its way."""
        simulation, caller, process = self.simulation, call.caller, self.process
        simulation.log.detail(f"{caller.name} calls {self.name}.{call.method}")
        now = simulation.loop.now
        if process is None:
            self._miss(call, self.lost or "it restarts")
            return
        self._calls[call] = None
        at = max(now + simulation.delay(caller.host, process.host, caller.rng("calls")), caller.arrivals.get(self, 0.0))
        caller.arrivals[self] = at
        simulation.loop.call_at(at, self._arrive, call, context=process.context)

    def _arrive(self, call: Call) -> None:
        if self.instance is None or self._serving >= self._concurrency:
            self._waiting.append(call)
        else:
            self._serve(call)

    def _serve_waiting(self) -> None:
        while self._waiting and self._serving < self._concurrency:
            self._serve(self._waiting.popleft())

    def _serve(self, call: Call) -> None:
        process = self.process
        assert process is not None
        try:
            args = [process.world.actors.get(arg) if type(arg) is Shared else arg for arg in call.args]
            result = getattr(self.instance, call.method)(*args, **call.kwargs)
        except Exception as error:
            self._answer(process, call, _fail, copied_error(error))
            return
        if type(result) is CoroutineType:
            self._serving += 1
            call.serving = self.simulation.loop.create_task(
                self._finish(process, call, result), name=call.method, context=process.context.copy()
            )
        else:
            self._answer(process, call, _succeed, copied(result))

    async def _finish(self, process: HostProcess, call: Call, answering: CoroutineType[Any, Any, Any]) -> None:
        try:
            result = copied(await answering)
        except asyncio.CancelledError:
            self._answer(process, call, _fail, RuntimeError(f"{self.name}.{call.method} was cancelled"))
        except Exception as error:
            self._answer(process, call, _fail, copied_error(error))
        else:
            self._answer(process, call, _succeed, result)
        self._serving -= 1
        if self._waiting:
            self._serve_waiting()

    def _answer(self, process: HostProcess, call: Call, settle: Callable[[Future, Any], None], value: Any) -> None:
        if process.ended or call not in self._calls:
            return
        del self._calls[call]
        simulation, caller = self.simulation, call.caller
        simulation.log.detail(f"{self.name} answers {caller.name} {call.method}")
        after = simulation.delay(process.host, caller.host, process.rng("calls"))
        simulation.loop.call_later(after, settle, call.answer, value, context=caller.context)

    def _miss(self, call: Call, reason: str) -> None:
        """The caller notices after a while that no answer will come."""
        after = draw(self.simulation.delays.notice, call.caller.rng("notices"))
        error = ActorLost(f"{self.name}: {reason}")
        self.simulation.loop.call_later(after, _fail, call.answer, error, context=call.caller.context)


class Shared:
    """What `Actors.put` returns: a value that its owner's process holds."""

    passes_between_processes = True

    def __init__(self, owner: HostProcess, value: Any):
        self.owner, self.value, self.number = owner, value, len(owner.simulation.shared)
        owner.simulation.shared.append(self)

    def __reduce__(self) -> tuple[Callable[[int], Shared], tuple[int]]:
        return _shared, (self.number,)


def _shared(number: int) -> Shared:
    process = PROCESS.get()
    assert isinstance(process, HostProcess)
    return process.simulation.shared[number]


class SimulatedActors:
    """See `world.Actors`. `begin` and `wait`, which are for threads that block, are not there."""

    def __init__(self, process: HostProcess):
        self._process = process
        self._connected = False

    def connect(self, address: str | None, actors: int) -> None:
        self._process.check()
        self._connected = True

    def nodes(self) -> list[Node]:
        return nodes(self._process.simulation, self._process.host)

    def reserve(self, plan: Callable[[Sequence[Node]], Sequence[Bundle]], seconds: float) -> SimulatedReservation:
        """A process cannot block here: what is not free at once is refused."""
        self._process.check()
        return SimulatedReservation(self._process, plan(self.nodes()))

    def release(self, reservation: Reservation, bundle: int | None = None) -> None:
        release(reservation, bundle)

    def address(self, interface: str = "") -> str:
        return self._process.host.name

    def spawn(self, kind: type, *args: Any, name: str, placement: Placement = PLACEMENT) -> SimulatedRef:
        process = self._process
        process.check()
        actor = Actor(process.simulation, process, kind, copied(args), name, placement)
        process.simulation.actors.append(actor)
        process.spawned.append(actor)
        actor.start()
        return SimulatedRef(name, actor)

    def current(self) -> SimulatedRef:
        actor = self._process.actor
        if actor is None:
            raise RuntimeError(f"{self._process.name} is no actor")
        return SimulatedRef(actor.name, actor)

    def kill(self, actor: ActorRef, *, restart: bool = False) -> None:
        self._process.check()
        assert isinstance(actor, SimulatedRef)
        actor.actor.kill(f"killed by {self._process.name}", restart=restart)
        self._process.check()

    def put(self, value: Any) -> Shared:
        self._process.check()
        return Shared(self._process, copied(value))

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        self._process.check()
        if not isinstance(reference, Shared):
            raise NotImplementedError(
                "a simulated process cannot block until a call has ended: it awaits `ActorRef.call`"
            )
        if reference.owner.ended:
            raise ActorLost(f"{reference.owner.name}: it ended, and what it shared with it")
        return copied(reference.value)

    def begin(self, actor: ActorRef, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        raise NotImplementedError("calls of a thread that blocks are not simulated: it awaits `ActorRef.call`")

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        raise NotImplementedError("a simulated process cannot block until a call has ended: it awaits `ActorRef.call`")

    def disconnect(self) -> None:
        """The cluster that `connect` started ends, and all actors that this process spawned."""
        self._process.check()
        if self._connected:
            self._connected = False
            for actor in self._process.spawned:
                actor.kill("the cluster has ended", restart=False)
            for reservation in self._process.reserved:
                release(reservation)


__all__ = ["Actor", "Shared", "SimulatedActors", "SimulatedRef"]


SHARED = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values cannot change, and hold nothing that can."""


def copied(value: Any) -> Any:
    """What would arrive. Raises what pickling raises."""
    kind = type(value)
    if kind in SHARED:
        return value
    if kind is dict:  # whose keys are hashable: they do not change
        return {key: item if type(item) in SHARED else copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in SHARED else copied(item) for item in value]
    if kind is tuple:
        return tuple([item if type(item) in SHARED else copied(item) for item in value]) if value else value
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if getattr(kind, "passes_between_processes", False):
        return value
    return pickle.loads(pickle.dumps(value, protocol=5))


def copied_error(error: Exception) -> Exception:
    """The exception as its caller gets it; one that cannot be pickled, as a `RuntimeError` that has its words."""
    try:
        arrived = copied(error)
    except Exception:
        arrived = None
    if not isinstance(arrived, Exception):
        arrived = RuntimeError(f"{type(error).__name__}: {error}")
    return arrived.with_traceback(error.__traceback__)


__all__ = ["copied", "copied_error"]
