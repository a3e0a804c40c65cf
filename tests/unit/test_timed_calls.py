"""Spans of engine calls and of environments, of one episode a group."""

import asyncio
from pathlib import Path

import numpy as np

from r3async.record.engine_calls import time_engine_calls
from r3async.record.timeline import Timeline, read_timeline
from r3async.rollout.engine import GenerationRequest
from r3async.rollout.scripted import ScriptedEngine


def request(name: str, prompt: int) -> GenerationRequest:
    return GenerationRequest(name, np.arange(1, prompt + 1, dtype=np.int32), 4)


async def test_calls_of_the_first_episode_and_what_lies_between_them_are_on_the_timeline(tmp_path: Path) -> None:
    now = [100.0]
    inner = ScriptedEngine([[5, 6], [7, 8, 9]])
    await inner.start()
    answer = inner.generate

    async def generate(what):
        await asyncio.sleep(0)
        now[0] += 2.0
        return await answer(what)

    inner.generate = generate
    engine = time_engine_calls(inner, Timeline(tmp_path, "generator-0", clock=lambda: now[0]))
    assert engine.routing == inner.routing
    await engine.generate(request("g00000003e0000t0", 10))
    now[0] += 5.0
    beside = asyncio.gather(
        engine.generate(request("g00000003e0000t1", 17)), engine.generate(request("g00000003e0001t0", 10))
    )
    await asyncio.wait_for(beside, 120)
    await engine.generate(request("score", 3))
    spans = read_timeline(tmp_path)
    assert [(s.start, s.end) for s in spans if s.what == "busy"] == [(100.0, 102.0), (107.0, 111.0), (111.0, 113.0)]
    first, environment, second = (s for s in spans if s.what != "busy")
    assert (first.what, first.start, first.end) == ("call", 100.0, 102.0)
    assert (first.turn, first.tokens, first.prompt, first.running) == (0, 2, 10, 1)
    assert (environment.what, environment.start, environment.end) == ("environment", 102.0, 107.0)
    # Of 17 tokens of the second prompt the engine had 12.
    # The other episode's request came just after it.
    assert (second.turn, second.prompt, second.running) == (1, 5, 2)


def test_an_engine_is_left_alone_without_a_timeline(tmp_path: Path) -> None:
    inner = ScriptedEngine([[5]])
    assert time_engine_calls(inner, Timeline(tmp_path, "generator-0", enabled=False)) is inner
