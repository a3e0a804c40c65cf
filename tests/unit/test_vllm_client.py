"""The engine core's process, and the requests inside vLLM, as their owner sees them: a core that the test plays."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from r3async.rollout.engine import EngineError, EngineLostError
from r3async.rollout.vllm.client import EngineCoreClient
from r3async.rollout.vllm.messages import build_sampling_params
from r3async.rollout.vllm.running_requests import RequestRegistry
from r3async.rollout.vllm.scratch import EngineScratch
from tests.helpers.core_process import play


class Core:
    """Takes requests in; `queue` has what leaves it, or the error that it is lost with."""

    def __init__(self):
        self.queue: asyncio.Queue = asyncio.Queue()
        self.added, self.aborted = [], []

    async def add_request(self, request_id, prompt_ids, params, salt, adapter):
        self.added.append(request_id)

    async def abort_requests(self, request_ids):
        self.aborted += request_ids

    async def receive_outputs(self):
        outputs = await self.queue.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs


def output(name, tokens, reason=None):
    return SimpleNamespace(
        request_id=name,
        new_token_ids=tokens,
        new_logprobs=SimpleNamespace(logprobs=np.zeros(len(tokens), np.float32)),
        routed_experts=None,
        new_prompt_logprobs_tensors=None,
        new_sampling_mask=None,
        prefill_stats=None,
        finish_reason=reason,
    )


async def started(count: int):
    requests = RequestRegistry()
    requests.core, requests.failure = Core(), None
    receiving = asyncio.create_task(requests.receive_outputs())
    running = [requests.create_request(f"r{i}", 3) for i in range(count)]
    calls = [asyncio.create_task(requests.run_request(r, [1], None, None)) for r in running]
    await asyncio.sleep(0)
    assert requests.core.added == [r.request_id for r in running]
    return requests, receiving, running, calls


async def test_callers_of_requests_that_end_together_go_on_one_after_the_other():
    requests, receiving, running, calls = await started(50)
    most, gone = 0, 0
    for call in calls:
        call.add_done_callback(lambda _: counted())

    def counted():
        nonlocal gone
        gone += 1

    requests.core.queue.put_nowait([output(r.request_id, [5], "stop") for r in running])
    async with asyncio.timeout(120):
        while gone < 50:
            before = gone
            await asyncio.sleep(0)
            most = max(most, gone - before)
    assert most <= 2
    assert [await call for call in calls] == [True] * 50
    assert len(requests) == 0
    receiving.cancel()


async def test_what_left_before_a_pause_is_counted_and_an_unbegun_request_starts_again():
    requests, receiving, (first, second, third), calls = await started(3)
    requests.core.queue.put_nowait([output(first.request_id, [5, 6])])
    requests.core.queue.put_nowait([output(first.request_id, [7]), output(third.request_id, [8], "length")])
    async with asyncio.timeout(120):
        while first.tokens != [5, 6, 7] or third.tokens != [8]:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    await requests.stamp_version(4)
    assert requests.core.aborted == [second.request_id]
    assert await calls[1] is False
    assert requests.restarted_count == 1
    requests.core.queue.put_nowait([output(second.request_id, [], "abort"), output(first.request_id, [9], "stop")])
    assert await calls[0] is True
    assert first.tokens == [5, 6, 7, 9]
    assert [(s.version, s.start, s.stop) for s in first.version_spans.finish_spans(4)] == [(3, 0, 3), (4, 3, 4)]
    assert await calls[2] is True
    assert [(s.version, s.start, s.stop) for s in third.version_spans.finish_spans(1)] == [(3, 0, 1)]
    receiving.cancel()


@pytest.mark.parametrize("error", [EngineLostError("its process ended"), RuntimeError("its process ended")])
async def test_an_engine_that_is_lost_raises_it_for_what_runs_and_what_comes(error):
    requests, receiving, _, calls = await started(2)
    requests.core.queue.put_nowait(error)
    for call in calls:
        with pytest.raises(EngineLostError, match="its process ended"):
            await call
    await receiving
    with pytest.raises(EngineLostError, match="its process ended"):
        await requests.run_request(requests.create_request("later", 3), [1], None, None)
    assert len(requests) == 0


async def test_a_cancelled_call_is_aborted_and_its_last_output_is_nobodys():
    requests, receiving, (running, _), (call, other) = await started(2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert requests.core.aborted == [running.request_id]
    assert requests.aborted_count == 1
    requests.core.queue.put_nowait([output(running.request_id, [5], "abort"), output("r1#1", [6], "stop")])
    assert await other is True
    receiving.cancel()


def begin_core(do: str):
    """Return a core, its process and its directory."""
    scratch, others = EngineScratch(), multiprocessing.active_children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("r3async.rollout.vllm.client.EngineScratch", lambda: scratch)
        core = EngineCoreClient({"do": do}, 1, 0, run_process=play)
    (child,) = set(multiprocessing.active_children()) - set(others)
    return core, child, scratch.directory


@contextlib.asynccontextmanager
async def core_of(do: str):
    """A core, its process, and what `outputs` returned; nothing is left of it."""
    core, child, directory = begin_core(do)
    process, left = psutil.Process(child.pid), []

    async def receive():
        while True:
            left.extend(await core.receive_outputs())

    async with asyncio.timeout(60):
        try:
            if do == "serve":
                await core.start()
            receiving = asyncio.create_task(receive()) if do == "serve" else asyncio.create_task(asyncio.sleep(0))
            yield core, process, left
        finally:
            receiving.cancel()
            core.close()
            await asyncio.to_thread(core.end_process)
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await receiving
    assert not process.is_running()
    assert not directory.exists()


async def test_an_answer_to_a_call_comes_after_all_that_left_before_it():
    async with core_of("serve") as (core, process, left):
        assert (core.max_model_len, core.block_size) == (32, 8)
        await core.add_request("one", [1, 2, 3], build_sampling_params(4, 1.0), None)
        assert await core.collective_rpc("r3_process_id") == [process.pid]
        assert [(o.request_id, o.new_token_ids) for o in left] == [("one", [3, 2, 1])]
        await core.resume_generation()
        assert [str(o.finish_reason) for o in left[1:]] == ["stop"] * 3


async def test_a_call_that_fails_fails_alone_and_wrong_requests_are_not_sent():
    async with core_of("serve") as (core, process, left):
        with pytest.raises(EngineError, match="the worker refused"):
            await core.collective_rpc("refuse")
        for ids, params, why in (
            ([], build_sampling_params(4, 1.0), "0 tokens"),
            ([1] * 32, build_sampling_params(4, 1.0), "32 tokens"),
            ([1], build_sampling_params(0, 1.0), "at most 0 tokens"),
            ([1], build_sampling_params(1, 1.0, routes_from=2), "from position 2"),
        ):
            with pytest.raises(EngineError, match=why):
                await core.add_request("wrong", ids, params, None)
        assert await core.collective_rpc("r3_process_id") == [process.pid]
        assert left == []


async def test_requests_to_a_core_that_does_not_read_neither_wait_nor_get_lost():
    """ZeroMQ drops a message for a peer whose queue is full, and this queue has no end."""
    async with core_of("serve") as (core, process, left):
        names = [str(i) for i in range(20_000)]
        process.suspend()
        try:
            for name in names:
                sending = core.add_request(name, [1, 2, 3], build_sampling_params(4, 1.0), None)
                with pytest.raises(StopIteration):
                    sending.send(None)
        finally:
            process.resume()
        assert await core.collective_rpc("r3_process_id") == [process.pid]
        assert [output.request_id for output in left] == names


@pytest.mark.parametrize(("how", "why"), [("die", "ended with code 5"), ("fail", "an assertion failed")])
async def test_all_that_waits_learns_what_the_process_ended_with(how, why):
    async with core_of("serve") as (core, _, _):
        for call in [asyncio.create_task(core.collective_rpc(method)) for method in (how, "never")]:
            with pytest.raises(EngineError, match=why):
                await call
        with pytest.raises(EngineError, match=why):
            await core.add_request("late", [1], build_sampling_params(1, 1.0), None)
        with pytest.raises(EngineError, match=why):
            await core.receive_outputs()
        await core.abort_requests(["late"])


async def test_a_start_that_fails_says_why():
    async with core_of("fail") as (core, _, _):
        with pytest.raises(EngineError, match="there is no such model"):
            await core.start()


async def test_a_start_that_is_cancelled_leaves_nothing():
    async with core_of("hang") as (core, _, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await core.start()


OWNER = """
import asyncio, os, tempfile
from r3async.rollout.vllm.client import EngineCoreClient
from tests.helpers.core_process import play

async def main():
    core = EngineCoreClient({"do": "hold"}, 1, 0, run_process=play)
    print(*os.listdir(tempfile.gettempdir()), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_what_a_killed_owner_left_is_removed_by_the_next_engine_and_nothing_that_another_uses(monkeypatch):
    home = Path(tempfile.mkdtemp(prefix="r3"))  # a path of a Unix socket has at most 107 bytes
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    command, variables = [sys.executable, "-c", OWNER], os.environ | {"TMPDIR": str(home)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=variables) as owner:
        name, holds = owner.stdout.readline().strip(), owner.stdout.readline()
        assert holds == "holds 2\n"
        living = EngineScratch()
        assert left_of(home / name) == 3, "what is in use stays"
        os.killpg(owner.pid, signal.SIGKILL)  # the tracker of its semaphores, too
    assert left_of(home / name) == 3
    other = EngineScratch()
    assert left_of(home / name) == 0
    assert living.directory.exists()
    for scratch in (living, other):
        scratch.remove()
    home.rmdir()


def test_temporary_files_of_an_engines_processes_are_in_its_own_directory(capfd, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where it compiled something

    async def start():
        core, child, directory = begin_core("say where")
        child.join(120)
        core.close()
        return directory

    directory = asyncio.run(start())
    assert capfd.readouterr().out.split() == [str(directory), f"{directory.parent}/torchinductor-{os.getuid()}"]
    assert not directory.exists()


def left_of(directory):
    return directory.exists() + sum(directory.name in path.name for path in Path("/dev/shm").iterdir())


def test_the_owner_of_an_engine_imports_neither_vllm_nor_torch():
    program = (
        "import sys, r3async.rollout.vllm.engine; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240).stdout == "[]\n"
