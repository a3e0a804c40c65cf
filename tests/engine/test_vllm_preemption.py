"""Preemption on real vLLM, alone and with new weights: each row is of the pass that fed it.

What is expected comes from transformers, run with the weights that were live when each position was fed.
"""

import asyncio
import itertools

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from r3async.data.versions import expand_version_spans
from r3async.rollout.engine import Generation
from r3async.rollout.samples import SampleBuilder
from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore
from tests.helpers.engine import (
    OBSERVED,
    TOLERANCE,
    Weights,
    prompt,
    replay_feeds,
    request,
    same_sets,
    sampled,
    started,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Small:
    """An engine whose cache holds 10 blocks of 32 tokens, and whose scheduler tells what it did."""

    def __init__(self, engine: VllmEngine, weights: Weights):
        self.engine, self.weights = engine, weights

    async def generate(self, *args, **values) -> Generation:
        return await self.engine.generate(request(*args, **values))

    def start(self, *args, **values) -> asyncio.Task[Generation]:
        return asyncio.create_task(self.generate(*args, **values))

    async def preempted(self, name: str) -> tuple[int, int]:
        """Wait until it has been; positions that were fed and tokens that were sampled by then."""
        found: list = []
        async with asyncio.timeout(120):
            while not found:
                found = [counts for key, *counts in (await self.records())[1] if name in key]
        return tuple(found[-1])

    async def feeds(self, name: str) -> list[tuple[int, int, int]]:
        """(version, start, stop) of all that the last call of that name was fed; steps that go on from each other as one."""
        feeds: list[tuple[int, int, int]] = []
        for version, start, stop in [f for key, f in (await self.records())[0].items() if name in key][-1]:
            if not feeds and start:
                feeds.append((version, 0, start))  # it found these in the prefix cache, which is of its version
            if feeds and feeds[-1][0] == version and feeds[-1][2] == start:
                start = feeds.pop()[1]
            feeds.append((version, start, stop))
        return feeds

    async def resume(self) -> None:
        """Go on after a `hold@`; `install` does that itself."""
        await asyncio.sleep(0.05)  # what was started before is in the scheduler's queue by then
        await self.engine.core.resume_generation()

    async def records(self):
        return msgspec.msgpack.decode((await self.engine.core.collective_rpc("r3_feeds"))[0])

    async def check(
        self, name: str, ids: np.ndarray, generation: Generation, routes_from: int = 0
    ) -> list[tuple[int, int]]:
        """Log-probs, routes and versions are those of the forward passes that really were, from `routes_from` on.

        Returns the re-prefills: how many positions had been fed, and which one was the first to be fed again.
        """
        everything = np.concatenate([ids, generation.token_ids])
        known = len(everything) - 1  # an aborted request may have been fed more than it could return
        feeds = [(version, start, min(stop, known)) for version, start, stop in await self.feeds(name) if start < known]
        logprobs, routes = replay_feeds(self.weights.by_version, everything, feeds)
        assert np.abs(generation.logprobs - logprobs[len(ids) - 1 :]).max() < TOLERANCE
        assert same_sets(generation.routed_experts, routes[routes_from:])
        first_fed_by = np.empty(len(everything) - 1, np.int32)
        for version, start, stop in reversed(feeds):
            first_fed_by[start:stop] = version
        versions = expand_version_spans(generation.version_spans, len(generation.token_ids))
        assert versions.tolist() == first_fed_by[len(ids) - 1 :].tolist()
        return [(before[2], after[1]) for before, after in itertools.pairwise(feeds) if after[1] < before[2]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tiny_model, other_model, tmp_path_factory):
    small = {
        "block_size": 32,
        "num_gpu_blocks_override": 11,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 8,
        "scheduler_reserve_full_isl": False,
    }
    async with started(tiny_model, 288, gib=0.25, **small, **OBSERVED) as engine:
        with VersionStore(tmp_path_factory.mktemp("small")) as publisher:
            yield Small(engine, Weights(tiny_model, other_model, publisher))


async def test_an_episode_with_new_weights_in_one_turn_and_a_preemption_in_the_next(small):
    """Others share its prefix meanwhile. What is recorded of it is what its calls returned, each row once."""
    builder, system, moved = SampleBuilder(small.engine.routing), prompt(64, seed=60), 0
    builder.append_context(system.tolist())
    neighbours = [small.start(np.concatenate([system, prompt(9, seed=i)]), 90, f"near-{i}") for i in range(2)]
    prefilled_again: list[tuple[int, int]] = []
    rows, logprobs = [], []
    for turn in range(4):
        name = f"episode-{turn}" + ("", "-hold@125", "-preempt@170", "")[turn]
        first, ids = builder.routes_from, np.asarray(builder.token_ids, np.int32)
        call = small.start(ids, 40, name, routes_from=first)
        if turn == 1:
            await sampled(small.engine, name, 14)
            await small.engine.install_version(small.weights.publish(), 30)
        generation = await call
        assert len(generation.version_spans) == (2 if turn == 1 else 1)
        again = await small.check(name, ids, generation, first)
        prefilled_again += again if turn == 2 else []
        builder.append_answer(turn, generation)
        builder.append_context(prompt(8, seed=70 + turn).tolist())
        moved += len(generation.routed_experts)
        rows.append(generation.routed_experts)
        logprobs.append(generation.logprobs)
    await asyncio.gather(*neighbours)
    assert prefilled_again
    table = builder.build_table()
    assert moved == len(table) - 9
    assert table["routing_recorded"].tolist() == [True] * moved + [False] * 9
    assert np.array_equal(table["routed_experts"][:moved], np.concatenate(rows))
    assert np.array_equal(table["rollout_logprobs"][table["loss_mask"]], np.concatenate(logprobs))


async def test_a_full_cache_preempts_and_every_row_stays(small):
    """Two requests of seven blocks each in a cache of ten."""
    ids = [prompt(40, seed=80), prompt(40, seed=81)]
    preemptions, usage = small.engine.collect_stats()["preemptions"], []
    calls = asyncio.gather(*(small.generate(p, 170, f"full-{i}") for i, p in enumerate(ids)))
    while not calls.done():
        usage.append(small.engine.collect_stats()["kv_cache_usage"])
        await asyncio.sleep(0.01)
    generations = await calls
    _, tokens = await small.preempted("full-")
    assert 0 < tokens < 170
    assert small.engine.collect_stats()["preemptions"] > preemptions
    assert 0.5 <= max(usage) <= 1.0  # it is told now and then, and asked for now and then
    prefilled_again = [await small.check(f"full-{i}", ids[i], g) for i, g in enumerate(generations)]
    assert any(prefilled_again)


async def test_new_weights_and_then_a_preemption_of_the_same_request(small):
    """The re-prefill runs under newer weights; what was sampled before keeps its log-probs, routes and versions."""
    ids = [prompt(40, seed=82), prompt(40, seed=83)]
    # The one that stays takes so many blocks that the other finds only its first one again.
    calls = [small.start(p, 240, f"then-{i}-hold@{70 + 900 * i}") for i, p in enumerate(ids)]
    await sampled(small.engine, "then-0", 31)
    await small.engine.install_version(small.weights.publish(), 30)
    replaced = 0
    for i, generation in enumerate(await asyncio.gather(*calls)):
        assert len(generation.version_spans) == 2
        boundary = 40 + generation.version_spans[0].stop
        replaced += sum(begin < boundary < fed for fed, begin in await small.check(f"then-{i}", ids[i], generation))
    assert replaced, "no re-prefill replaced keys and values of the old weights"


async def test_new_weights_while_a_preempted_request_waits(small):
    ids = [prompt(40, seed=84), prompt(40, seed=85)]
    calls = [small.start(p, 170, f"wait-{i}-hold@preemption") for i, p in enumerate(ids)]
    _, tokens = await small.preempted("wait-")
    await small.engine.install_version(small.weights.publish(), 30)
    generations = await asyncio.gather(*calls)
    for i, generation in enumerate(generations):
        if await small.check(f"wait-{i}", ids[i], generation):
            # What is sampled next comes from a prefill by the new weights: the boundary is where it was preempted.
            assert [span.stop for span in generation.version_spans] == [tokens, 170]
            break
    else:
        pytest.fail("nothing was fed again")


@pytest.mark.parametrize("update", [False, True])
async def test_a_preemption_before_the_first_token(small, update):
    """Half of a prompt was fed in chunks. Under new weights it starts afresh, so that no row is of the old ones."""
    long, ids, name = (
        prompt(40, seed=86),
        prompt(250, seed=87 + 100 * update),
        "before-hold@preemption" if update else "before",
    )
    restarted = small.engine.collect_stats()["restarted"]
    first = small.start(long, 200, f"long-{update}-hold@140")
    await sampled(small.engine, f"long-{update}", 101)
    second = small.start(ids, 20, name)
    await small.resume()
    fed, tokens = await small.preempted(name)
    assert 0 < fed < 250
    assert tokens == 0
    if update:
        await small.engine.install_version(small.weights.publish(), 30)
    generations = await asyncio.gather(first, second)
    await small.check(f"long-{update}", long, generations[0])
    again = await small.check(name, ids, generations[1])
    assert [s.version for s in generations[1].version_spans] == [small.weights.version]
    assert again or update  # what starts afresh is another request to the scheduler
    assert small.engine.collect_stats()["restarted"] - restarted == update


async def test_an_aborted_request_that_was_preempted_keeps_its_rows(small):
    ids = [prompt(40, seed=88), prompt(40, seed=89)]
    calls = [small.start(p, 170, f"abort-{i}-hold@{60 + 900 * i}-hold@preemption") for i, p in enumerate(ids)]
    await sampled(small.engine, "abort-0", 21)
    await small.engine.install_version(small.weights.publish(), 30)
    _, tokens = await small.preempted("abort-")
    for i in range(2):
        await small.engine.abort_request(f"abort-{i}-hold@{60 + 900 * i}-hold@preemption")
    await small.resume()
    generations = await asyncio.gather(*calls)
    assert {g.stop_reason for g in generations} == {"abort"}
    assert tokens in [len(g.token_ids) for g in generations]
    for i, generation in enumerate(generations):
        await small.check(f"abort-{i}", ids[i], generation)
    assert small.engine.collect_stats()["unrecorded_rows"] == 0


async def test_a_preemption_that_finds_its_own_prefix_in_the_cache(small):
    """Its first blocks are still there, in part of old weights and under the salt of these: they go on as they are."""
    ids = prompt(70, seed=90)
    call = small.start(ids, 60, "own-hold@90-preempt@120")
    await sampled(small.engine, "own-", 21)
    await small.engine.install_version(small.weights.publish(), 30)
    generation = await call
    assert len(generation.version_spans) == 2
    assert await small.check("own-", ids, generation) == [(120, 96)]
