"""The engine core's process, as its owner sees it: started, called, watched, and ended with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import multiprocessing
import multiprocessing.util
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.messages import (
    ABORT_MESSAGE,
    ADD_MESSAGE,
    CALL_MESSAGE,
    CORE_DEAD_MESSAGE,
    CoreCallResult,
    CoreOutput,
    CoreOutputDecoder,
    CoreReady,
    CoreRequest,
    CoreSamplingParams,
    EngineLoad,
)
from r3async.untrusted import decode_msgpack
from r3async.world.processes import hide_main_module, pause_garbage_collector

# vLLM's engine core, as the process that owns it sees it.
#
# The core runs in a process of its own, which alone imports vLLM (`vllm.core.run_core`).


KILL_SECONDS = 5.0
"""A process that was killed has ended by then."""


class EngineCoreClient:
    """The engine core's process, which begins to import vLLM at once. All calls belong to one event loop.

    `args` are those of vLLM's `AsyncEngineArgs`. `threads` and `kv_cache_bytes` matter on CPU only. What the process fails with
    is raised by whatever waits for it, as `EngineError`. `run_process`: what the process does.
    """

    def __init__(
        self, args: Mapping[str, Any], threads: int, kv_cache_bytes: int, run_process: Callable[..., None] | None = None
    ):
        self.load = EngineLoad()
        self.max_model_len = self.block_size = 0
        """Known after `start`."""
        self._directory = Path(tempfile.mkdtemp(prefix="r3async-engine-"))
        self._context: zmq.asyncio.Context = zmq.asyncio.Context(io_threads=2)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), CoreOutputDecoder()
        self._input_socket, self._output_socket = (
            self._bind_socket(zmq.ROUTER, "input"),
            self._bind_socket(zmq.PULL, "output"),
        )
        self._core_identity = b""
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._failure_pipe, says = multiprocessing.Pipe(duplex=False)
        workers = int(args.get("tensor_parallel_size", 1))
        self._process = _spawn_core(
            run_process or _run_core_process,
            threads,
            workers,
            (dict(args), self._build_address("start"), os.getpid(), kv_cache_bytes, says),
        )
        says.close()
        self._finalizer = multiprocessing.util.Finalize(
            self, _end_process, (self._process, self._directory, 0.0), exitpriority=10
        )
        self._loop = asyncio.get_running_loop()
        self._failure: EngineError | None = None
        self._pending_frames: asyncio.Future[Any] = self._loop.create_future()
        """The frames of the next message."""
        self._loop.add_reader(self._process.sentinel, self._handle_process_end)

    def _build_address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _bind_socket(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.bind(self._build_address(name))
        return socket

    async def start(self) -> None:
        """Until the core has loaded its model. Raises `EngineError` if it ends before that."""
        with self._bind_socket(zmq.ROUTER, "start") as starting:
            name, _ = await self._receive_frames(starting)
            addresses = {"inputs": [self._build_address("input")], "outputs": [self._build_address("output")]}
            await starting.send_multipart([name, self._encoder.encode({"addresses": addresses, "parallel_config": {}})])
            self._core_identity, ready = await self._receive_frames(self._input_socket)
            await self._receive_frames(starting)
        facts = decode_msgpack(ready, CoreReady)
        self.max_model_len, self.block_size = facts.max_model_len, facts.block_size

    async def add_request(
        self, request_id: str, prompt_ids: list[int], params: CoreSamplingParams, cache_salt: str | None
    ) -> None:
        """Raises `EngineError` for a request that the engine could not serve. The id must be new."""
        if not 0 < len(prompt_ids) < self.max_model_len:
            raise EngineError(f"a prompt of {len(prompt_ids)} tokens: it has to have 1 to {self.max_model_len - 1}")
        if params.max_tokens < 1:
            raise EngineError(f"at most {params.max_tokens} tokens are asked for: it has to be 1 or more")
        if not 0 <= params.routed_experts_prompt_start <= len(prompt_ids):
            raise EngineError(
                f"routes from position {params.routed_experts_prompt_start} of a prompt of {len(prompt_ids)} tokens"
            )
        await self._send_message(
            ADD_MESSAGE, CoreRequest(request_id, prompt_ids, None, params, None, time.time(), None, cache_salt, None)
        )

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Their last outputs come all the same. Nothing happens for those that have ended."""
        if request_ids and self._failure is None:
            await self._send_message(ABORT_MESSAGE, request_ids)

    async def receive_outputs(self) -> list[CoreOutput]:
        """The next ones, in the order in which they left. Raises `EngineError` when the engine is lost.

        Somebody has to wait here while calls run: their answers come in one line with the outputs. So whoever has the answer to a
        call knows that everything that left before it was returned here.
        """
        while True:
            frames = await self._receive_frames(self._output_socket)
            if frames[0] == CORE_DEAD_MESSAGE:
                raise await self._receive_failure()
            message = self._decoder.decode(frames)
            if message.utility_output is not None:
                self._resolve_call(message.utility_output)
            elif message.outputs or message.scheduler_stats:
                self.load.update_from(message)
                return message.outputs

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool) -> None:
        await self._call_core("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self._call_core("resume_scheduler")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the method of that name returns in each worker."""
        answers: list[Any] = await self._call_core("collective_rpc", method, None, args)
        return answers

    async def parse_tool_calls(self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        """See `vllm.core.VllmToolParser`."""
        return await self._call_core("r3_tool_calls", parser, text, tools)

    def close(self) -> None:
        """No call returns any more. Of the event loop, as all but `end_process`."""
        self._loop.remove_reader(self._process.sentinel)
        self._set_failure(EngineError("the engine was stopped"))
        self._context.destroy(linger=0)
        self._failure_pipe.close()

    def end_process(self, timeout: float) -> None:
        """Blocking: up to `timeout` seconds for the engine's processes to end."""
        self._finalizer.cancel()
        _end_process(self._process, self._directory, timeout)

    async def _send_message(self, kind: bytes, content: Any) -> None:
        if self._failure is not None:
            raise self._failure
        await self._input_socket.send_multipart([self._core_identity, kind, self._encoder.encode(content)], copy=False)

    async def _call_core(self, method: str, *args: Any) -> Any:
        number = next(self._call_numbers)
        self._pending_calls[number] = answer = self._loop.create_future()
        try:
            await self._send_message(CALL_MESSAGE, (0, number, method, args))
            return await answer
        finally:
            del self._pending_calls[number]

    def _resolve_call(self, answer: CoreCallResult) -> None:
        call = self._pending_calls.get(answer.call_id)
        if call is None or call.done():
            return
        if answer.failure_message is not None:
            call.set_exception(EngineError(answer.failure_message))
        else:
            call.set_result(answer.result[1])

    async def _receive_frames(self, socket: zmq.asyncio.Socket) -> list[Any]:
        """The frames of its next message. Raises what the process failed with, if it does first."""
        if self._failure is not None:
            raise self._failure
        self._pending_frames = receiving = asyncio.ensure_future(socket.recv_multipart(copy=False))
        return [frame.buffer for frame in await receiving]

    async def _receive_failure(self) -> EngineError:
        """What the process fails with: it is about to end, and to say it."""
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._receive_frames(self._output_socket)
        return self._set_failure(EngineError("the engine failed"))

    def _set_failure(self, failure: EngineError) -> EngineError:
        """From now on every call raises `failure`, or what there was before it, and so do those that wait."""
        self._failure = self._failure or failure
        for waiting in (self._pending_frames, *self._pending_calls.values()):
            if not waiting.done():
                waiting.set_exception(self._failure)
                waiting.exception()  # it is known, also where nobody waits
        return self._failure

    def _handle_process_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join(KILL_SECONDS)
        said = f"its process ended with code {self._process.exitcode}"
        with contextlib.suppress(EOFError, OSError):
            if self._failure_pipe.poll():
                said = self._failure_pipe.recv()
        self._set_failure(EngineError(said))


def _spawn_core(run: Callable[..., None], threads: int, workers: int, args: tuple[Any, ...]) -> SpawnProcess:
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with inherited_environment() as environment:
        environment.update({name: os.environ.get(name, value) for name, value in defaults.items()})
        # A forked child would share its parent's threads' locks, and not read OMP_NUM_THREADS any more.
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if is_cpu_vllm():
            environment["OMP_NUM_THREADS"] = str(threads)
            environment["TORCH_COMPILE_DISABLE"] = "1"
            # The worker lives in the engine's one process, and not in a pinned one of its own.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
            if (
                workers > 1
            ):  # vLLM gives each of several workers a NUMA node, and starts none where there are fewer nodes
                environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        process = multiprocessing.get_context("spawn").Process(target=run, name="EngineCore", args=args)
        with hide_main_module():
            process.start()
    return process


def _run_core_process(
    args: dict[str, Any], address: str, owner_pid: int, kv_cache_bytes: int, failure_pipe: Connection
) -> None:
    """The core's process. What it fails with goes to `failure_pipe`."""

    exit_with_owner(owner_pid)
    try:
        with pause_garbage_collector():
            from r3async.rollout.vllm.core import run_core

        run_core(args, address, owner_pid, kv_cache_bytes)
    except Exception as error:
        with contextlib.suppress(OSError):
            failure_pipe.send(str(error) or repr(error))
        raise


def is_cpu_vllm() -> bool:
    """Whether the installed vLLM computes on CPU, by what vLLM itself goes by."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # it is installed as vllm-cpu


def _end_process(process: SpawnProcess, directory: Path, timeout: float) -> None:
    """In order within `timeout` seconds, or by force."""
    process.terminate()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join(KILL_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def inherited_environment() -> Iterator[os._Environ[str]]:
    """Environment variables set inside are inherited by processes started inside, and taken back at the end."""
    before = dict(os.environ)
    try:
        yield os.environ
    finally:
        for name in set(os.environ) | set(before):
            if name not in before:
                os.environ.pop(name, None)
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]


# No process of an engine outlives the engine's owner: not the engine core, and not what it starts.
#
# Imports nothing that takes time: the watch begins before the process does anything else.


class OwnerBoundConfig(dict[str, Any]):
    """vLLM's `additional_config`; every process that it is unpickled in ends with process `owner_pid`.

    vLLM hands its whole configuration to each process it spawns, before that process does anything else. A hook in
    the worker would come too late: an owner that is killed during the start would leave its engine waiting.
    """

    def __init__(self, owner_pid: int, values: Mapping[str, Any]):
        super().__init__(values)
        self.owner_pid = owner_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_owner_bound, (self.owner_pid, dict(self))


def _restore_owner_bound(owner_pid: int, values: dict[str, Any]) -> OwnerBoundConfig:
    if owner_pid != os.getpid():
        exit_with_owner(owner_pid)
        from r3async.rollout.vllm.core import patch_vllm_for_cpu

        patch_vllm_for_cpu()
    return OwnerBoundConfig(owner_pid, values)


def exit_with_owner(owner_pid: int) -> None:
    """Start a daemon thread that ends this process as soon as process `owner_pid` has ended, however that happened.

    A worker sits in a subprocess of its own; if its owner is killed before it can clean up, nobody else would
    ever end the worker.
    """

    def watch_owner() -> None:
        _wait_for_exit(owner_pid)
        os._exit(1)

    threading.Thread(target=watch_owner, name="r3async-owner-watch", daemon=True).start()


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel or sandbox
        while _process_exists(pid):
            time.sleep(1.0)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(60_000):
        pass


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
