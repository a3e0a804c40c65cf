"""The engine core's process as its owner sees it: a process that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import psutil
import pytest

from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.client import EngineCoreClient
from r3async.rollout.vllm.messages import build_sampling_params
from tests.helpers.core_process import play


@contextlib.asynccontextmanager
async def core_of(do: str):
    """A core, its process, and what `outputs` returned; nothing is left of it."""
    core = EngineCoreClient({"do": do}, 1, 0, run_process=play)
    process, directory, left = psutil.Process(core._process.pid), core._directory, []

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
            await asyncio.to_thread(core.end_process, 1.0)
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


@pytest.mark.parametrize(("how", "why"), [("die", "ended with code 5"), ("fail", "an assertion failed")])
async def test_all_that_waits_learns_what_the_process_ended_with(how, why):
    async with core_of("serve") as (core, _, _):
        calls = [asyncio.create_task(core.collective_rpc(method)) for method in (how, "never")]
        for call in calls:
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


def test_the_owner_of_an_engine_imports_neither_vllm_nor_torch():
    program = (
        "import sys, r3async.rollout.vllm.engine; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout == "[]\n"
