"""The common ground of all actor processes: how they are prepared, how they wait for others, and
which errors end a process or the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from r3async.checkpoint.run_lock import RunLock
from r3async.record.prometheus import serve_actor_metrics
from r3async.world import ActorLostError, ActorRef, World
from r3async.world.files import make_directory
from r3async.world.processes import add_user_module_path

T = TypeVar("T")
P = ParamSpec("P")

RPC_SECONDS = 30.0
"""Seconds within which a healthy actor has answered."""


KILL_AFTER_SECONDS = 5.0
"""Seconds after which a process that Ray has not ended is killed from here, if it
is on this host."""


class RunFailed(RuntimeError):
    """The run cannot continue; the message is for the person who started it."""


class NotTrained(RunFailed):
    """The run made all its steps, and none of them an update: its weights are those that
    it started with."""


class StoppedBeforeStep(RunFailed):
    """A stop was requested before the run had made a step: there is nothing of it."""


class ProcessLost(RunFailed, ActorLostError):
    """A process that the run cannot do without was lost. The run can resume from its
    newest checkpoint."""


class ActorNotLoaded(ActorLostError):
    """This process was started in place of one that was lost, and has not been set up yet."""


def describe_process(world: World) -> dict[str, Any]:
    """Return the `pid` and `host` of this process, by which it can be ended."""
    return {"pid": world.processes.pid, "host": world.processes.host}


def prepare_process(world: World, run_dir: Path, role: str) -> RunLock:
    """Make the user's modules importable, and send what this process and its children print to
    `logs/ROLE.log` of the run. If the run's configuration sets `observe.prometheus_port`, serve
    this process's memory and CPU time.

    Returns the shared lock on the run's directory, which the caller has to keep: nobody prepares
    the directory again before this process has ended. Raises `BlockingIOError` if somebody prepares
    it already: then this actor belongs to a start that is over.
    """
    add_user_module_path()
    make_directory(run_dir / "logs", files=world.files)
    lock = RunLock(run_dir, files=world.files)
    lock.acquire_shared()
    world.processes.redirect_output(run_dir / "logs" / f"{role}.log")
    world.processes.serve_metrics(partial(serve_actor_metrics, role, run_dir))
    return lock


async def call_with_limit(
    actor: ActorRef, method: str, *args: Any, failure: str, seconds: float
) -> Any:
    """Call an actor and return its answer. Raises `RunFailed`, which names `failure`, after
    `seconds`, one of the limits that `supervise.patience` multiplies."""
    try:
        return await actor.call(method, *args, timeout=seconds)
    except TimeoutError as error:
        if str(error):  # the actor's own, which is better
            raise
        raise RunFailed(f"{failure} within {seconds:g} s (supervise.patience)") from error


class PolledCall:
    """A call that is made to an actor again and again, one at a time.
    `make_call(*args)` makes the call."""

    def __init__(self, make_call: Callable[..., Awaitable[Any]]):
        self._make_call = make_call
        self._call: asyncio.Future[Any] | None = None
        self.answer_count = 0
        """Number of answers, including errors."""

    @property
    def is_pending(self) -> bool:
        """True if a call is not answered yet."""
        return self._call is not None

    async def poll_answer(self, seconds: float, *args: Any) -> Any:
        """Return the answer, which may be that of an earlier call with other `args`; None if there
        is none within `seconds`, or it is an error."""
        if self._call is None:
            self._call = asyncio.ensure_future(self._make_call(*args))
        await asyncio.wait([self._call], timeout=seconds)
        if not self._call.done():
            return None
        call = self._call
        self._call = None
        self.answer_count += 1
        return call.result() if call.exception() is None else None

    async def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)


async def end_process(world: World, actor: ActorRef, pid: int, host: str) -> None:
    """End the process of an actor, which is then restarted."""
    world.actors.kill_actor(actor, restart=True)
    await wait_for_process_end(world, pid, host)


async def wait_for_process_end(world: World, pid: int, host: str) -> None:
    """Wait until a process that was asked to end has ended. A paused process does not react to
    that, and is killed from here if it is on this host."""
    deadline = world.clock.monotonic() + KILL_AFTER_SECONDS
    while world.processes.is_alive(pid, host):
        if world.clock.monotonic() > deadline:
            world.processes.kill_process(pid, host)
            return
        await asyncio.sleep(0.1)


async def gather_or_cancel(*calls: Awaitable[Any]) -> list[Any]:
    """Return the results of all `calls`. If one fails, the others are cancelled, and its error is
    raised when they have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set. It is set after `seconds` in any case, which is cheaper than a
    time-out that cancels and raises."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


async def await_guarded(call: Awaitable[Any], background: list[asyncio.Task[None]]) -> Any:
    """Return the result of `call`. If a background task fails meanwhile, raises its error at once.
    Tasks that have ended well are removed from `background`."""
    waiting = asyncio.ensure_future(call)
    while True:
        for task in background:
            if task.done():
                error = task.exception()
                if error is not None:
                    waiting.cancel()
                    raise error
        background[:] = [t for t in background if not t.done()]
        if waiting.done():
            return waiting.result()
        await asyncio.wait(
            [waiting, *background], timeout=RPC_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )


def run_once(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Decorate a method so that it does its work once: further calls, meanwhile or later, return
    the result of the first call. After a failure the next call does the work again."""
    made: WeakKeyDictionary[Any, asyncio.Task[T]] = WeakKeyDictionary()

    @wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        task = made.get(self)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = made[self] = asyncio.create_task(method(self, *args, **kwargs))
        return await asyncio.shield(task)

    return call


def latest_call_only(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Decorate a method so that one call works at a time: a later call ends the earlier one, which
    then raises `ActorNotLoaded`, and begins when that has ended."""
    works: WeakKeyDictionary[Any, asyncio.Task[T]] = WeakKeyDictionary()

    @wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        while (before := works.get(self)) is not None and not before.done():
            before.cancel()
            await asyncio.wait([before])
        task = works[self] = asyncio.create_task(method(self, *args, **kwargs))
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                raise ActorNotLoaded(
                    f"`{method.__name__}` was called again, which ended this call"
                ) from None
            raise

    return call


async def await_or_stopped(stopped: asyncio.Event, call: Awaitable[T]) -> T | None:
    """Return the result of `call`. If `stopped` is set before, cancel the call and return None."""
    calling = asyncio.ensure_future(call)
    stop = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait([calling, stop], return_when=asyncio.FIRST_COMPLETED)
        return calling.result() if calling.done() else None
    finally:
        calling.cancel()
        stop.cancel()
        await asyncio.gather(calling, stop, return_exceptions=True)


def describe_root_cause(error: BaseException, run_dir: Path) -> str:
    """Return the innermost message that a person can use: a task group wraps the
    exceptions of its members."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RunFailed):
        return str(error)
    if isinstance(error, ActorLostError):
        reason = str(error).partition("\n")[0]
        return f"an actor process was lost ({reason}); its last output is in {run_dir}/logs"
    return f"{type(error).__name__}: {error}"
