"""A pool of processes for blocking environments: a call that hangs is ended, and a crash affects
no other process.

Processes are spawned (never forked: this process has threads and may hold an engine), and each
handles one call at a time. A thread for each process does the waiting, so the event loop never
does, and the pool may be used from any loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from r3async.config import EnvConfig
from r3async.envs import (
    Action,
    EnvironmentFactory,
    EnvironmentFailed,
    EnvironmentProtocolError,
    Message,
    StepResult,
)
from r3async.envs.errors import RemoteEnvironmentError
from r3async.envs.pool_worker import WorkerCall, WorkerReply, receive_message, send_message
from r3async.untrusted import MalformedError, decode_msgpack
from r3async.world.kept_programs import KeptProgram
from r3async.world.processes import hash_seed_variables

# The path comes first: the process must import the same modules as this one, the
# user's own included.
WORKER_BOOT_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import "
    "r3async.envs.pool_worker as w; w.main()"
)

PASSED_VARIABLES = frozenset(
    [
        *(
            "PATH",
            "HOME",
            "USER",
            "LOGNAME",
            "SHELL",
            "LANG",
            "LANGUAGE",
            "TZ",
            "TERM",
            "TMPDIR",
            "TEMP",
            "TMP",
        ),
        *(
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "LD_LIBRARY_PATH",
            "OMP_NUM_THREADS",
            "CUDA_VISIBLE_DEVICES",
        ),
        *(
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
            "REQUESTS_CA_BUNDLE",
            "CURL_CA_BUNDLE",
            "NO_PROXY",
            "no_proxy",
        ),
        *(
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_DATASETS_CACHE",
            "HF_DATASETS_OFFLINE",
            "R3ASYNC_USER_PATH",
        ),
    ]
)
PASSED_PREFIXES = ("LC_", "XDG_", "PYTHON")
"""Names, and prefixes, of the environment variables that every program needs. The others may hold
tokens of a cluster, of a model hub or of a metrics service: no task, and no program that plays
one, needs them."""


def filter_variables(
    extra_names: Iterable[str] = (), variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return those of `variables` (by default this process's) that every program needs, and those
    that `extra_names` names."""
    variables = os.environ if variables is None else variables
    wanted = PASSED_VARIABLES | set(extra_names)
    return {
        name: value
        for name, value in variables.items()
        if name in wanted or name.startswith(PASSED_PREFIXES)
    }


class EnvironmentWorker:
    """One process and the thread that talks to it. Once `lost_reason` is set, every call raises an
    error with that reason."""

    def __init__(self, path: str, arguments: dict[str, Any], config: EnvConfig):
        self.path = path
        self.config = config
        self.active_instances: set[int] = set()
        self.lost_reason = ""
        self._arguments = arguments
        self._last_instance_id = 0
        self._program: KeptProgram | None = None
        self._socket: socket.socket | None = None
        # Code that a finalizer may reach takes no lock that its own thread may hold: garbage is
        # collected anywhere, even in the middle of the same method. A SimpleQueue and a set allow
        # that, a ThreadPoolExecutor would deadlock.
        self._call_queue: queue.SimpleQueue[tuple[WorkerCall, Future[WorkerReply]] | None] = (
            queue.SimpleQueue()
        )
        self._stop_lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def register_instance(self) -> int:
        self._last_instance_id += 1
        self.active_instances.add(self._last_instance_id)
        return self._last_instance_id

    async def submit_call(self, call: WorkerCall) -> WorkerReply:
        """Send a call to the process and return its reply. Raises `EnvironmentFailed`, with the
        environment's own traceback, or with the reason why the process is lost."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_worker_thread, args=(weakref.ref(self), self._call_queue), daemon=True
            )
            self._thread.start()
        if self.lost_reason:  # its thread may have ended
            raise self._make_lost_error()
        future: Future[WorkerReply] = Future()
        self._call_queue.put((call, future))
        # Since the line above: its thread may have ended without having seen the call.
        if self.lost_reason:
            self._fail_pending_calls()
        reply = await asyncio.wrap_future(future)
        if reply.wrong:
            ours = self.path.startswith("r3async.")  # whose message names what it judges
            raise EnvironmentProtocolError(reply.wrong if ours else f"{self.path}: {reply.wrong}")
        if reply.raised:
            raise RemoteEnvironmentError(
                f"{self.path} raised in `{call.method}`:\n{reply.raised.trace}", reply.raised
            )
        return reply

    def drop_instance(self, instance: int) -> None:
        """Drop an instance whose episode is over. This never waits, and may be called from any
        thread and by a finalizer."""
        self.active_instances.discard(instance)
        self._call_queue.put((WorkerCall("drop", instance), Future()))

    def stop(self, reason: str = "the pool of environments was closed") -> None:
        """Kill the process and all that it started; calls that wait for it raise."""
        with self._stop_lock:
            self.lost_reason = self.lost_reason or reason
            if self._program is not None:
                self._program.end()
            self._call_queue.put(None)

    def _fail_pending_calls(self) -> None:
        """Make all pending calls of a lost process raise at once."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._call_queue.get_nowait()
                if item is not None:
                    self.execute_call(*item)
        self._call_queue.put(None)  # ends the thread; the earlier None may have been taken above

    def execute_call(self, call: WorkerCall, future: Future[WorkerReply]) -> None:
        """Execute a call and set the result of `future`. Runs on the worker's thread."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            unused = call.method == "drop" and (self._program is None or self.lost_reason)
            future.set_result(WorkerReply() if unused else self._call_process(call))
        except BaseException as error:
            future.set_exception(error)

    def _call_process(self, call: WorkerCall) -> WorkerReply:
        if self.lost_reason:
            raise self._make_lost_error()
        if self._program is None:
            self._start_process()
        timeout = self.config.step_timeout
        return self._send_and_receive(
            call, timeout, f"`{call.method}` took longer than env.step_timeout = {timeout:g} s"
        )

    def _start_process(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, self._stop_lock:
            if self.lost_reason:
                raise self._make_lost_error()
            self._program = KeptProgram(
                [
                    sys.executable,
                    "-c",
                    WORKER_BOOT_CODE,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                ],
                stdout=2,
                env=filter_variables(self.config.variables) | hash_seed_variables(),
                pass_fds=[theirs.fileno()],
            )
            if self.lost_reason:  # stopped by a finalizer, meanwhile
                self._program.end()
                raise self._make_lost_error()
        timeout = self.config.start_timeout
        hello = WorkerCall("load", path=self.path, arguments=self._arguments)
        reply = self._send_and_receive(
            hello, timeout, f"it took longer to start than env.start_timeout = {timeout:g} s"
        )
        if reply.raised:
            self.stop("it could not be loaded")
            raise RemoteEnvironmentError(
                f"{self.path} cannot be loaded in a process of its own:\n{reply.raised.trace}",
                reply.raised,
            )

    def _send_and_receive(
        self, call: WorkerCall, timeout: float, timeout_reason: str
    ) -> WorkerReply:
        """Send `call` and receive its reply. `timeout`, in seconds, covers both together, because a
        stopped process does not read a large call."""
        assert self._socket is not None
        assert self._program is not None
        message = msgspec.msgpack.encode(call)
        deadline = time.monotonic() + timeout
        try:
            send_message(self._socket, message, deadline)
            return decode_msgpack(receive_message(self._socket, deadline), WorkerReply)
        except TimeoutError as error:
            self.stop(timeout_reason)
            raise EnvironmentFailed(
                f"{self.path}: {timeout_reason}; its process was ended, and with it "
                "its other episodes"
            ) from error
        except MalformedError as error:
            why = f"its process sent what is no reply: {error}"
            self.stop(why)
            raise EnvironmentFailed(f"{self.path}: {why}") from error
        except (EOFError, OSError) as error:
            with self._stop_lock:
                self.stop(
                    f"it ended by itself in `{call.method}`, with exit code "
                    f"{self._program.wait(timeout=5)}"
                )
            raise self._make_lost_error() from error

    def _make_lost_error(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"the process of {self.path} is lost: {self.lost_reason}")


def _run_worker_thread(
    worker: weakref.ref[EnvironmentWorker],
    calls: queue.SimpleQueue[tuple[WorkerCall, Future[WorkerReply]] | None],
) -> None:
    """Run a worker's thread, which does not keep the worker alive. Calls that are still in the
    queue at the end are executed, and raise."""
    ending = False
    while not (ending and calls.empty()):
        item = calls.get()
        ending = ending or item is None
        alive = worker()
        if item is not None and alive is not None:
            alive.execute_call(*item)
        del alive


class WorkerPool:
    """A pool of at most `env.workers` processes, started when first needed and
    replaced when lost."""

    def __init__(self, path: str, arguments: dict[str, Any], config: EnvConfig):
        self._make_worker = lambda: EnvironmentWorker(path, arguments, config)
        self._max_workers = config.workers
        self.workers: list[EnvironmentWorker] = []
        atexit.register(_close_if_alive, weakref.ref(self))

    def pick_worker(self) -> EnvironmentWorker:
        """Return the worker with the fewest episodes; a new one while there are fewer
        than `env.workers`."""
        self.workers = [worker for worker in self.workers if not worker.lost_reason]
        if len(self.workers) < self._max_workers:
            self.workers.append(self._make_worker())
        return min(self.workers, key=lambda worker: len(worker.active_instances))

    def close(self) -> None:
        """End all processes. Episodes in progress raise `EnvironmentFailed`."""
        for worker in self.workers:
            worker.stop()

    def __del__(self) -> None:
        # At interpreter exit the pool is closed already, and a frozen thread may hold a
        # worker's lock for ever.
        if not sys.is_finalizing():
            self.close()


def _close_if_alive(pool: weakref.ref[WorkerPool]) -> None:
    alive = pool()
    if alive is not None:
        alive.close()


class PooledEnvironment:
    """An episode that lives in one process of the pool until it is done, closed, or
    garbage-collected here.

    A copy replays the same answers when it is first stepped, so it equals the original for an
    environment that is determined by seed and answers.
    """

    def __init__(self, pool: WorkerPool, size: int | None = None):
        self.pool = pool
        """The processes in which it is played, also those of other episodes."""
        self.size = size
        self._worker: EnvironmentWorker | None = None
        self._instance_id = 0
        self._seed: int | None = None
        self._actions: list[Action] = []
        self._oracle = ""

    async def reset(self, task_seed: int) -> list[Message]:
        self.close()
        self._seed = task_seed
        self._actions = []
        return await self._start_instance()

    async def step(self, action: Action) -> StepResult:
        if self._seed is None:
            raise EnvironmentFailed("an environment has to be reset before it is stepped")
        if self._worker is None:
            await self._start_instance()
            for earlier in self._actions:
                await self._step_instance(earlier)
        result = await self._step_instance(action)
        self._actions.append(action)
        if result.done:
            self.close()
        return result

    def close(self) -> None:
        """End the episode early. This also happens when the object is garbage-collected."""
        if self._worker is not None:
            self._finalizer()
            self._worker = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledEnvironment:
        other = type(self)(self.pool, self.size)
        other._seed = self._seed
        other._actions = list(self._actions)
        other._oracle = self._oracle
        return other

    async def _start_instance(self) -> list[Message]:
        worker = self.pool.pick_worker()
        self._instance_id = worker.register_instance()
        self._worker = worker
        self._finalizer = weakref.finalize(self, worker.drop_instance, self._instance_id)
        self._finalizer.atexit = False
        reply = await worker.submit_call(WorkerCall("reset", self._instance_id, seed=self._seed))
        self._oracle = reply.oracle
        return reply.messages

    async def _step_instance(self, action: Action) -> StepResult:
        assert self._worker is not None
        reply = await self._worker.submit_call(WorkerCall("step", self._instance_id, action=action))
        assert reply.result is not None
        self._oracle = reply.oracle
        return reply.result


class PooledOracleEnvironment(PooledEnvironment):
    """A pooled environment whose class has an oracle. The oracle's answer arrives with each prompt,
    so asking for it never waits."""

    def oracle(self) -> str:
        return self._oracle


def make_pooled_factory(
    path: str,
    arguments: dict[str, Any],
    config: EnvConfig,
    *,
    has_oracle: bool,
    size: int | None = None,
) -> EnvironmentFactory:
    """Return a factory of environments `path(**arguments)` that share one pool.

    Args:
        arguments: Plain data, as in TOML.
        size: Number of tasks, see `Environment`.
    """
    pool = WorkerPool(path, arguments, config)
    kind = PooledOracleEnvironment if has_oracle else PooledEnvironment
    return lambda: kind(pool, size)
