"""The client of vLLM's engine core, which starts, calls, watches and ends the core's process.

The core runs in a separate process (`vllm.core.run_core`), and only that process imports vLLM.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.metadata
import itertools
import multiprocessing
import multiprocessing.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from r3async.data.engine_models import find_engine_model
from r3async.rollout.engine import EngineError, EngineLostError
from r3async.rollout.vllm.engine_packages import expose_engine_packages
from r3async.rollout.vllm.messages import (
    ABORT_MESSAGE,
    ADD_MESSAGE,
    CALL_MESSAGE,
    CORE_DEAD_MESSAGE,
    CoreAdapterRequest,
    CoreCallResult,
    CoreOutput,
    CoreOutputDecoder,
    CoreReady,
    CoreRequest,
    CoreSamplingParams,
    EngineLoad,
)
from r3async.rollout.vllm.names import check_vllm_names
from r3async.rollout.vllm.owner_bound import OwnerBoundConfig
from r3async.rollout.vllm.scratch import EngineScratch, name_shared_memory
from r3async.untrusted import decode_msgpack, decode_python_json
from r3async.world.kept_programs import exit_with_owner, kill_processes, list_process_trees
from r3async.world.processes import hide_main_module, pause_garbage_collector

KILL_SECONDS = 5.0
"""Seconds after which a killed process has ended."""


class EngineCoreClient:
    """A client of the engine core, whose process begins to import vLLM at once. All calls belong
    to one event loop.

    If the process fails, every call that waits for it raises its error as `EngineLostError`.

    Args:
        args: Arguments of vLLM's `AsyncEngineArgs`.
        threads: CPU threads; matters on CPU only.
        kv_cache_bytes: Size of the KV cache; matters on CPU only.
        run_process: Function that the process runs; default: the engine core.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        threads: int,
        kv_cache_bytes: int,
        run_process: Callable[..., None] | None = None,
    ):
        self.load = EngineLoad()
        self.max_model_len = self.block_size = 0
        """Limits of the core in tokens, of a text and of a block of the cache;
        known after `start`."""
        self._scratch = EngineScratch()
        self._context: zmq.asyncio.Context = zmq.asyncio.Context(io_threads=2)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = CoreOutputDecoder()
        self._input_socket, self._output_socket = (
            self._bind_socket(zmq.ROUTER, "input"),
            self._bind_socket(zmq.PULL, "output"),
        )
        self._send_socket: zmq.Socket[bytes] = zmq.Socket(self._input_socket)
        """The input socket without an event loop: its queue has no end (`_bind_socket`), so that a
        send neither waits nor drops a message."""
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
            self._scratch.directory,
        )
        says.close()
        self._finalizer = multiprocessing.util.Finalize(
            self, _end_process, (self._process, self._scratch), exitpriority=10
        )
        self._loop = asyncio.get_running_loop()
        self._failure: EngineError | None = None
        self._pending_frames: asyncio.Future[Any] = self._loop.create_future()
        """Future of the next message's frames."""
        self._loop.add_reader(self._process.sentinel, self._handle_process_end)

    def _build_address(self, name: str) -> str:
        return f"ipc://{self._scratch.directory}/{name}"

    def _bind_socket(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.bind(self._build_address(name))
        return socket

    async def start(self) -> None:
        """Wait until the core has loaded its model. Raises `EngineError` if it ends before that."""
        with self._bind_socket(zmq.ROUTER, "start") as starting:
            name, _ = await self._receive_frames(starting)
            addresses = {
                "inputs": [self._build_address("input")],
                "outputs": [self._build_address("output")],
            }
            await starting.send_multipart(
                [name, self._encoder.encode({"addresses": addresses, "parallel_config": {}})]
            )
            self._core_identity, ready = await self._receive_frames(self._input_socket)
            await self._receive_frames(starting)
        facts = decode_msgpack(ready, CoreReady)
        self.max_model_len = facts.max_model_len
        self.block_size = facts.block_size

    async def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: CoreSamplingParams,
        cache_salt: str | None,
        adapter: CoreAdapterRequest | None = None,
    ) -> None:
        """Send a request, whose id must be new. Raises `EngineError` for one that the engine
        could not serve."""
        if not 0 < len(prompt_ids) < self.max_model_len:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens: it has to have 1 to "
                f"{self.max_model_len - 1}"
            )
        if params.max_tokens < 1:
            raise EngineError(
                f"at most {params.max_tokens} tokens are asked for: it has to be 1 or more"
            )
        if not 0 <= params.routed_experts_prompt_start <= len(prompt_ids):
            raise EngineError(
                f"routes from position {params.routed_experts_prompt_start} of a prompt of "
                f"{len(prompt_ids)} tokens"
            )
        self._send_message(
            ADD_MESSAGE,
            CoreRequest(
                request_id, prompt_ids, None, params, None, time.time(), adapter, cache_salt, None
            ),
        )

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests. Their last outputs still arrive. Requests that have ended are ignored."""
        if request_ids and self._failure is None:
            self._send_message(ABORT_MESSAGE, request_ids)

    async def receive_outputs(self) -> list[CoreOutput]:
        """Return the next outputs, in the order in which they left the core.

        Raises `EngineLostError` when the engine is lost.

        A task must wait here while calls run, because their results arrive in one stream with
        the outputs. So when a call has returned, everything that left the core before its result
        was returned here.
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
        """Call the method of that name in each worker and return the results."""
        answers: list[Any] = await self._call_core("collective_rpc", method, None, args)
        return answers

    async def parse_tool_calls(
        self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> Any:
        """Call `vllm.tool_parser_adapter.VllmToolParser` in the core's process."""
        return await self._call_core("r3_tool_calls", parser, text, tools)

    def close(self) -> None:
        """Close the client: no call returns any more. Belongs to the event loop, like all methods
        but `end_process`."""
        self._loop.remove_reader(self._process.sentinel)
        self._set_failure(EngineError("the engine was stopped"))
        self._context.destroy(linger=0)
        self._failure_pipe.close()

    def end_process(self) -> None:
        """End the engine's processes, and wait until they have ended."""
        self._finalizer.cancel()
        _end_process(self._process, self._scratch)

    def _send_message(self, kind: bytes, content: Any) -> None:
        if self._failure is not None:
            raise self._failure
        encoded = self._encoder.encode(content)
        self._send_socket.send_multipart(
            [self._core_identity, kind, encoded],
            zmq.DONTWAIT,
            copy=len(encoded) < zmq.COPY_THRESHOLD,
        )

    async def _call_core(self, method: str, *args: Any) -> Any:
        number = next(self._call_numbers)
        self._pending_calls[number] = answer = self._loop.create_future()
        try:
            self._send_message(CALL_MESSAGE, (0, number, method, args))
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
        """Return the frames of the socket's next message. Raises the process's failure if
        that comes first."""
        if self._failure is not None:
            raise self._failure
        self._pending_frames = receiving = asyncio.ensure_future(socket.recv_multipart(copy=False))
        return [frame.buffer for frame in await receiving]

    async def _receive_failure(self) -> EngineError:
        """Wait for the error of a core that is about to end, and return it."""
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._receive_frames(self._output_socket)
        return self._set_failure(EngineLostError("the engine failed"))

    def _set_failure(self, failure: EngineError) -> EngineError:
        """Make every waiting and later call raise `failure`, or the failure set before it;
        return that failure."""
        self._failure = self._failure or failure
        for waiting in (self._pending_frames, *self._pending_calls.values()):
            if not waiting.done():
                waiting.set_exception(self._failure)
                waiting.exception()  # mark it as retrieved, in case nobody waits
        return self._failure

    def _handle_process_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join(KILL_SECONDS)
        said = f"its process ended with code {self._process.exitcode}"
        with contextlib.suppress(EOFError, OSError):
            if self._failure_pipe.poll():
                said = self._failure_pipe.recv()
        self._set_failure(EngineLostError(said))


def _spawn_core(
    run: Callable[..., None], threads: int, workers: int, args: tuple[Any, ...], scratch: Path
) -> SpawnProcess:
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with inherited_environment() as environment:
        environment.update({name: os.environ.get(name, value) for name, value in defaults.items()})
        # vLLM's processes meet at files that they leave behind. What torch compiles is for
        # later engines too.
        environment.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}"
        )
        environment["TMPDIR"] = str(scratch)
        # A forked child would inherit locks of its parent's threads, and would not read
        # OMP_NUM_THREADS again.
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if is_cpu_vllm():
            environment["OMP_NUM_THREADS"] = str(threads)
            environment["TORCH_COMPILE_DISABLE"] = "1"
            # The worker runs in the engine's process, and not in a separate pinned one.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
            # vLLM gives each of several workers a NUMA node, and starts none where there
            # are fewer nodes.
            if workers > 1:
                environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        process = multiprocessing.get_context("spawn").Process(
            target=run, name="EngineCore", args=args
        )
        process._config["semprefix"] = f"/{scratch.name}"  # type: ignore[attr-defined]
        with hide_main_module():
            process.start()
    return process


def _run_core_process(
    args: dict[str, Any],
    address: str,
    owner_pid: int,
    kv_cache_bytes: int,
    failure_pipe: Connection,
) -> None:
    """Run the core in its process. The error with which it fails is sent to `failure_pipe`."""

    exit_with_owner(owner_pid)
    name_shared_memory()
    # Ends the process before Python takes vLLM's modules apart, for seconds: what is registered
    # first is called last.
    atexit.register(os._exit, 0)
    described = decode_python_json((Path(args["model"]) / "config.json").read_bytes())
    kind = described.get("text_config", described).get("model_type", "")
    if find_engine_model(kind).imports_torchvision:
        expose_engine_packages()
    try:
        with pause_garbage_collector():
            check_vllm_names()
            from r3async.rollout.vllm.core import run_core

        run_core(
            args, address, OwnerBoundConfig(owner_pid), kv_cache_bytes if is_cpu_vllm() else None
        )
    except Exception as error:
        atexit.unregister(os._exit)
        with contextlib.suppress(OSError):
            failure_pipe.send(str(error) or repr(error))
        raise


def is_cpu_vllm() -> bool:
    """Return True if the installed vLLM computes on CPU, by the criteria that vLLM itself uses."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # it is installed as vllm-cpu


def _end_process(process: SpawnProcess, scratch: EngineScratch) -> None:
    started = list_process_trees([process.pid])[1:] if process.pid else []
    process.kill()
    kill_processes(started)
    process.join(KILL_SECONDS)
    scratch.remove()


@contextlib.contextmanager
def inherited_environment() -> Iterator[os._Environ[str]]:
    """Yield `os.environ` and restore it at the end: variables set inside are inherited by
    processes started inside."""
    before = dict(os.environ)
    try:
        yield os.environ
    finally:
        for name in set(os.environ) | set(before):
            if name not in before:
                os.environ.pop(name, None)
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]
