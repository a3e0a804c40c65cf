"""Blocking environments in processes of their own: a call that hangs is ended, one that crashes takes nothing else down.

Processes are spawned (never forked: this process has threads and may hold an engine), one call at a time each. A thread
for each process does the waiting, so the event loop never does, and the pool may be used from any loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from r3async.config import EnvConfig
from r3async.envs import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult, WrongEnvironment
from r3async.envs.pool_worker import Call, Reply, receive_message, send_message
from r3async.envs.raised import EnvironmentRaised
from r3async.untrusted import Malformed, decode_msgpack

# The path comes first: what is imported there has to be what is imported here, the person's own modules included.
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import r3async.envs.pool_worker as w; w.main()"

VARIABLES = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TEMP", "TMP"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NO_PROXY", "no_proxy"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "R3ASYNC_USER_PATH"),
    ]
)
PREFIXES = ("LC_", "XDG_", "PYTHON")
"""Of our own environment variables, what every program needs. Among the others may be tokens of a cluster, of a model hub or of
a metrics service: no task, and no program that plays one, needs them."""


def passed_on(more: Iterable[str] = (), ours: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of `ours` (this process's) that every program needs, and those of them that `more` names."""
    ours = os.environ if ours is None else ours
    wanted = VARIABLES | set(more)
    return {name: value for name, value in ours.items() if name in wanted or name.startswith(PREFIXES)}


class Worker:
    """One process and the thread that talks to it. Once `lost`, every call raises what it was lost to."""

    def __init__(self, path: str, arguments: dict[str, Any], config: EnvConfig):
        self.path, self.config = path, config
        self.playing: set[int] = set()
        self.lost = ""
        self._arguments = arguments
        self._next_instance = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        # What may be reached from a finalizer takes no lock that its own thread may hold: garbage is collected anywhere, also
        # in the middle of the very same method. A SimpleQueue and a set allow that, a ThreadPoolExecutor would deadlock.
        self._calls: queue.SimpleQueue[tuple[Call, Future[Reply]] | None] = queue.SimpleQueue()
        self._closing = threading.RLock()
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def new_instance(self) -> int:
        self._next_instance += 1
        self.playing.add(self._next_instance)
        return self._next_instance

    async def call(self, call: Call) -> Reply:
        """Raises `EnvironmentFailed`: with the environment's own traceback, or with why the process is lost."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._calls), daemon=True)
            self._thread.start()
        if self.lost:  # its thread may have ended
            raise self._failure()
        future: Future[Reply] = Future()
        self._calls.put((call, future))
        if self.lost:  # since the line above: its thread may have ended without having seen the call
            self._refuse_what_waits()
        reply = await asyncio.wrap_future(future)
        if reply.wrong:
            ours = self.path.startswith("r3async.")  # which says itself what it judges
            raise WrongEnvironment(reply.wrong if ours else f"{self.path}: {reply.wrong}")
        if reply.raised:
            raise EnvironmentRaised(f"{self.path} raised in `{call.method}`:\n{reply.raised.trace}", reply.raised)
        return reply

    def drop(self, instance: int) -> None:
        """The episode is over. Never waits; may be called from any thread and by a finalizer."""
        self.playing.discard(instance)
        self._calls.put((Call("drop", instance), Future()))

    def stop(self, why: str = "the pool of environments was closed") -> None:
        """Kill the process; calls that wait for it raise."""
        with self._closing:
            self.lost = self.lost or why
            if self._process is not None:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=10)
            self._calls.put(None)

    def _refuse_what_waits(self) -> None:
        """Every call of a lost process raises at once, whoever makes it."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._calls.get_nowait()
                if item is not None:
                    self.serve(*item)
        self._calls.put(None)  # ends the thread; the one before may have been among them

    def serve(self, call: Call, future: Future[Reply]) -> None:
        """On the worker's thread."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            unused = call.method == "drop" and (self._process is None or self.lost)
            future.set_result(Reply() if unused else self._blocking_call(call))
        except BaseException as error:
            future.set_exception(error)

    def _blocking_call(self, call: Call) -> Reply:
        if self.lost:
            raise self._failure()
        if self._process is None:
            self._start()
        timeout = self.config.step_timeout
        return self._exchange(call, timeout, f"`{call.method}` took longer than env.step_timeout = {timeout:g} s")

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, self._closing:
            if self.lost:
                raise self._failure()
            command = [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=passed_on(self.config.variables),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            if self.lost:  # stopped by a finalizer, meanwhile
                self._process.kill()
                raise self._failure()
        timeout = self.config.start_timeout
        hello = Call("load", path=self.path, arguments=self._arguments)
        reply = self._exchange(hello, timeout, f"it took longer to start than env.start_timeout = {timeout:g} s")
        if reply.raised:
            self.stop("it could not be loaded")
            raise EnvironmentRaised(
                f"{self.path} cannot be loaded in a process of its own:\n{reply.raised.trace}", reply.raised
            )

    def _exchange(self, call: Call, timeout: float, late: str) -> Reply:
        """Send `call` and receive its reply. `timeout` is for both together: a process that is stopped takes no large call in."""
        assert self._socket is not None
        assert self._process is not None
        message, deadline = msgspec.msgpack.encode(call), time.monotonic() + timeout
        try:
            send_message(self._socket, message, deadline)
            return decode_msgpack(receive_message(self._socket, deadline), Reply)
        except TimeoutError as error:
            self.stop(late)
            raise EnvironmentFailed(
                f"{self.path}: {late}; its process was ended, and with it its other episodes"
            ) from error
        except Malformed as error:
            self.stop(why := f"its process sent what is no reply: {error}")
            raise EnvironmentFailed(f"{self.path}: {why}") from error
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self.stop(f"it ended by itself in `{call.method}`, with exit code {self._process.returncode}")
            raise self._failure() from error

    def _failure(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"the process of {self.path} is lost: {self.lost}")


def _serve(worker: weakref.ref[Worker], calls: queue.SimpleQueue[tuple[Call, Future[Reply]] | None]) -> None:
    """The thread of a worker, which it does not keep alive. What is still in the queue at its end is made, and raises."""
    ending = False
    while not (ending and calls.empty()):
        item = calls.get()
        ending = ending or item is None
        alive = worker()
        if item is not None and alive is not None:
            alive.serve(*item)
        del alive


class Pool:
    """At most `env.workers` processes, started when they are first needed and replaced when they are lost."""

    def __init__(self, path: str, arguments: dict[str, Any], config: EnvConfig):
        self._new = lambda: Worker(path, arguments, config)
        self._size = config.workers
        self.workers: list[Worker] = []
        atexit.register(_close_if_alive, weakref.ref(self))

    def worker(self) -> Worker:
        """The one with the fewest episodes; a new one while there are fewer than `env.workers`."""
        self.workers = [worker for worker in self.workers if not worker.lost]
        if len(self.workers) < self._size:
            self.workers.append(self._new())
        return min(self.workers, key=lambda worker: len(worker.playing))

    def close(self) -> None:
        """End all processes. Episodes that are playing raise `EnvironmentFailed`."""
        for worker in self.workers:
            worker.stop()

    def __del__(self) -> None:
        # At the end of the interpreter it was closed already, and a thread that was frozen may hold a worker's lock for ever.
        if not sys.is_finalizing():
            self.close()


def _close_if_alive(pool: weakref.ref[Pool]) -> None:
    alive = pool()
    if alive is not None:
        alive.close()


class PooledEnvironment:
    """One episode, which lives in one process of the pool until it is done, closed, or forgotten here.

    A copy plays the same answers again when it is first stepped, so it is as good as the original for an environment that is
    determined by seed and answers.
    """

    def __init__(self, pool: Pool, size: int | None = None):
        self._pool = pool
        self.size = size
        self._worker: Worker | None = None
        self._instance = 0
        self._seed: int | None = None
        self._answers: list[Action] = []
        self._oracle = ""

    async def reset(self, task_seed: int) -> list[Message]:
        self.close()
        self._seed, self._answers = task_seed, []
        return await self._begin()

    async def step(self, action: Action) -> StepResult:
        if self._seed is None:
            raise EnvironmentFailed("an environment has to be reset before it is stepped")
        if self._worker is None:
            await self._begin()
            for earlier in self._answers:
                await self._step(earlier)
        result = await self._step(action)
        self._answers.append(action)
        if result.done:
            self.close()
        return result

    def close(self) -> None:
        """The episode will not be played on. Also done when this object is forgotten."""
        if self._worker is not None:
            self._forget()
            self._worker = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledEnvironment:
        other = type(self)(self._pool, self.size)
        other._seed, other._answers, other._oracle = self._seed, list(self._answers), self._oracle
        return other

    async def _begin(self) -> list[Message]:
        worker = self._pool.worker()
        self._worker, self._instance = worker, worker.new_instance()
        self._forget = weakref.finalize(self, worker.drop, self._instance)
        self._forget.atexit = False
        reply = await worker.call(Call("reset", self._instance, seed=self._seed))
        self._oracle = reply.oracle
        return reply.messages

    async def _step(self, action: Action) -> StepResult:
        assert self._worker is not None
        reply = await self._worker.call(Call("step", self._instance, action=action))
        assert reply.result is not None
        self._oracle = reply.oracle
        return reply.result


class PooledOracle(PooledEnvironment):
    """One whose class has an oracle. Its answer comes with what it asks, so that asking for it never waits."""

    def oracle(self) -> str:
        return self._oracle


def pooled(
    path: str, arguments: dict[str, Any], config: EnvConfig, *, has_oracle: bool, size: int | None = None
) -> EnvironmentFactory:
    """Makes environments `path(**arguments)` in one pool. `arguments`: plain data, as in TOML. `size`: see `Environment`."""
    pool = Pool(path, arguments, config)
    kind = PooledOracle if has_oracle else PooledEnvironment
    return lambda: kind(pool, size)
