"""Blocking environments in processes of their own: a call that hangs is ended, one that crashes takes nothing else down.

Processes are started anew (never forked: this process has threads and may hold an engine), one call at a time each. A thread
for each process does the waiting, so the event loop never does, and the pool may be used from any loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from r3async.config import EnvConfig
from r3async.envs.base import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.pool_worker import Call, Reply

# The path comes first: what is imported there has to be what is imported here, the person's own modules included.
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import r3async.envs.pool_worker as w; w.main()"


class Worker:
    """One process and the thread that talks to it. Once `lost`, every call raises what it was lost to."""

    def __init__(self, path: str, arguments: dict[str, Any], config: EnvConfig):
        self.path, self.config = path, config
        self.playing = 0
        self.lost = ""
        self._arguments = arguments
        self._next_instance = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._closing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def new_instance(self) -> int:
        self.playing += 1
        self._next_instance += 1
        return self._next_instance

    async def call(self, call: Call) -> Reply:
        """Raises `EnvironmentFailed`: with the environment's own traceback, or with why the process is lost."""
        try:
            future = self._thread.submit(self._blocking_call, call)
        except RuntimeError as error:  # its thread has ended
            raise self._gone() from error
        reply = await asyncio.wrap_future(future)
        if reply.error:
            raise EnvironmentFailed(f"{self.path} raised in `{call.method}`:\n{reply.error}")
        return reply

    def drop(self, instance: int) -> None:
        """The episode is over. Never waits, and may be called from any thread."""
        self.playing -= 1
        with contextlib.suppress(RuntimeError):  # the thread was shut down with the pool
            self._thread.submit(self._blocking_drop, instance)

    def stop(self, why: str = "the pool of environments was closed") -> None:
        """Kill the process; calls that wait for it raise."""
        with self._closing:
            self.lost = self.lost or why
            if self._process is not None:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=10)
            self._thread.shutdown(
                wait=False
            )  # calls in its queue are made, and raise; cancelled, they would cancel their tasks

    def _blocking_call(self, call: Call) -> Reply:
        if self.lost:
            raise self._gone()
        if self._process is None:
            self._start()
        timeout = self.config.step_timeout
        return self._exchange(call, timeout, f"`{call.method}` took longer than env.step_timeout = {timeout:g} s")

    def _blocking_drop(self, instance: int) -> None:
        if self._process is not None and not self.lost:
            with contextlib.suppress(EnvironmentFailed):
                self._blocking_call(Call("drop", instance))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        with theirs, self._closing:
            if self.lost:
                raise self._gone()
            command = [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        timeout = self.config.start_timeout
        hello = Call("load", path=self.path, arguments=self._arguments)
        reply = self._exchange(hello, timeout, f"it took longer to start than env.start_timeout = {timeout:g} s")
        if reply.error:
            self.stop("it could not be loaded")
            raise EnvironmentFailed(f"{self.path} can not be loaded in a process of its own:\n{reply.error}")

    def _exchange(self, call: Call, timeout: float, late: str) -> Reply:
        assert self._pipe is not None
        assert self._process is not None
        deadline = time.monotonic() + timeout
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(call))
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                self.stop(late)
                raise EnvironmentFailed(f"{self.path}: {late}; its process was ended, and with it its other episodes")
            return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Reply)
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self.stop(f"it ended by itself in `{call.method}`, with exit code {self._process.returncode}")
            raise self._gone() from error

    def _gone(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"the process of {self.path} is gone: {self.lost}")


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
        return min(self.workers, key=lambda worker: worker.playing)

    def close(self) -> None:
        """End all processes. Episodes that are playing raise `EnvironmentFailed`."""
        for worker in self.workers:
            worker.stop()

    def __del__(self) -> None:
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

    def __init__(self, pool: Pool):
        self._pool = pool
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
        other = type(self)(self._pool)
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


def pooled(path: str, arguments: dict[str, Any], config: EnvConfig, *, has_oracle: bool) -> EnvironmentFactory:
    """Makes environments `path(**arguments)` in one pool. `arguments` must be plain data, as in TOML."""
    pool = Pool(path, arguments, config)
    kind = PooledOracle if has_oracle else PooledEnvironment
    return lambda: kind(pool)
