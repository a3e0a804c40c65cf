"""The requests inside vLLM, as this process counts them: an engine's core that the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.engine import RequestRegistry


class Core:
    """Takes requests in; `queue` has what leaves it, or the error that it is lost with."""

    def __init__(self):
        self.queue: asyncio.Queue = asyncio.Queue()
        self.added, self.aborted = [], []

    async def add_request(self, request_id, prompt_ids, params, salt):
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
    async with asyncio.timeout(10):
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
    async with asyncio.timeout(10):
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


async def test_an_engine_that_is_lost_fails_what_runs_and_what_comes():
    requests, receiving, _, calls = await started(2)
    requests.core.queue.put_nowait(RuntimeError("its process ended"))
    for number, call in enumerate(calls):
        with pytest.raises(EngineError, match=f"request r{number}#{number}: its process ended"):
            await call
    await receiving
    with pytest.raises(EngineError, match="its process ended"):
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
