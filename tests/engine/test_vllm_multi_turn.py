"""Episodes of several turns on real vLLM: prefix caching, weights that change in a turn, preemption, and all at once.

What is expected comes from transformers, run with the weights that were live when each position was fed.
"""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from r3async.config import EpisodeConfig
from r3async.data.versions import expand
from r3async.envs import Message, StepResult
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Generation
from r3async.rollout.engines.vllm import VllmEngine
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.samples import EpisodeSamples, SampleBuilder
from r3async.tools.init_model import byte_tokenizer
from r3async.weights.publish import Publisher
from tests.helpers.engine import (
    TOLERANCE,
    Weights,
    make_model,
    prompt,
    replay,
    replay_feeds,
    request,
    same_sets,
    sampled,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other"), dense_layers=(1,), seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def weights(vllm_engine, tiny_model, other_model, tmp_path_factory):
    with Publisher(tmp_path_factory.mktemp("published")) as publisher:
        yield Weights(tiny_model, other_model, publisher, vllm_engine.version)


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
        async with asyncio.timeout(30):
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
        await self.engine._llm.resume_generation()

    async def records(self):
        return msgspec.msgpack.decode((await self.engine._llm.collective_rpc("r3_feeds"))[0])

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
        versions = expand(generation.version_spans, len(generation.token_ids))
        assert versions.tolist() == first_fed_by[len(ids) - 1 :].tolist()
        return [(before[2], after[1]) for before, after in itertools.pairwise(feeds) if after[1] < before[2]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tiny_model, other_model, tmp_path_factory):
    engine = VllmEngine(
        str(tiny_model),
        dtype="float32",
        concurrency=4,
        max_model_len=288,
        kv_cache_gib=0.25,
        engine_args={
            "block_size": 32,
            "num_gpu_blocks_override": 11,
            "max_num_batched_tokens": 64,
            "long_prefill_token_threshold": 8,
            "scheduler_reserve_full_isl": False,
            "scheduler_cls": "tests.helpers.scheduler.ObservedScheduler",
            "worker_extension_cls": "tests.helpers.scheduler.ObservingExtension",
        },
    )
    await engine.start()
    try:
        with Publisher(tmp_path_factory.mktemp("small")) as publisher:
            yield Small(engine, Weights(tiny_model, other_model, publisher))
    finally:
        await engine.stop()


async def test_three_turns_share_prefixes_and_the_weights_change_in_the_second(vllm_engine, weights):
    """Each row is that of the first pass over its position; the engine gives none of them twice."""
    builder = SampleBuilder(vllm_engine.routing)
    system, expected, moved = prompt(140, seed=60), {}, 0
    builder.observe(system.tolist())
    neighbours = [
        asyncio.create_task(
            vllm_engine.generate(request(np.concatenate([system, prompt(9, seed=i)]), 150, f"near-{i}"))
        )
        for i in range(6)
    ]
    logprobs, versions = [], []
    for turn in range(3):
        fed, ids = builder.routes_from, np.asarray(builder.token_ids, np.int32)
        call = asyncio.create_task(vllm_engine.generate(request(ids, 100, f"turn-{turn}", routes_from=fed)))
        if turn == 1:
            await sampled(vllm_engine, "turn-1", 10)
            await vllm_engine.install(weights.publish(), 30)
        generation = await call
        sampled_by = expand(generation.version_spans, 100)
        assert len(set(sampled_by)) == (2 if turn == 1 else 1)
        ours, routes = replay(weights.by_version, ids, generation.token_ids, sampled_by)
        expected.update({p: row for p, row in enumerate(routes) if p not in expected})
        logprobs.append(ours)
        versions.append(sampled_by)
        moved += len(generation.routed_experts)
        builder.answer(turn, generation)
        if turn < 2:
            builder.observe(prompt(20, seed=70 + turn).tolist())
    await asyncio.gather(*neighbours)
    table = builder.build()
    assert moved == len(table) - 1
    assert table["routing_recorded"].tolist() == [True] * (len(table) - 1) + [False]
    assert same_sets(table["routed_experts"][:-1], np.stack([expected[p] for p in range(len(table) - 1)]))
    mask = table["loss_mask"]
    assert np.abs(table["rollout_logprobs"][mask] - np.concatenate(logprobs)).max() < TOLERANCE
    assert table["policy_version"][mask].tolist() == np.concatenate(versions).tolist()


async def test_a_branching_turn_after_an_update_has_the_routes_of_the_weights_that_computed_it(vllm_engine, weights):
    """What turn 1 recorded of the common prefix is of older weights; turn 3 finds turn 2's prefix in the cache and shares it."""
    rows = EpisodeSamples(vllm_engine.routing)
    thought, versions, moved = prompt(170, seed=64), [], []

    async def turn(ids: np.ndarray) -> Generation:
        call = rows.begin(ids.tolist())
        asked = request(
            ids, 40, f"branch-{rows.turns}", routes_from=call.routes_from, routes_version=call.routes_version
        )
        generation = await vllm_engine.generate(asked)
        rows.end(call, generation)
        versions.append(vllm_engine.version)
        moved.append(len(generation.routed_experts))
        return generation

    first = await turn(thought)
    await vllm_engine.install(weights.publish(), 30)
    # The template strips the end of what was said: the common prefix goes a little into the answer.
    shown = np.concatenate([thought, first.token_ids[:20], prompt(12, seed=65)])
    second = await turn(shown)
    third = np.concatenate([shown, second.token_ids[:20], prompt(12, seed=66)])
    await turn(third)
    samples, turns = rows.build("g", 1.0)
    assert [t.sample for t in turns] == [0, 1, 2]
    assert versions[0] != versions[1] == versions[2]
    for sample, version in zip(samples, versions, strict=True):
        table, reference = sample.table, weights.reference(version)
        ids, mask = table["token_ids"], table["loss_mask"]
        assert table["routing_recorded"].tolist() == [True] * (len(ids) - 1) + [False]
        assert same_sets(table["routed_experts"][:-1], reference.routes(ids)[:-1])
        assert np.abs(table["rollout_logprobs"][mask] - reference.score(ids)[mask[1:]]).max() < TOLERANCE
    older = weights.reference(versions[0]).routes(samples[1].table["token_ids"])[: len(thought)]
    assert not same_sets(samples[1].table["routed_experts"][: len(thought)], older)
    assert moved == [len(thought) + 39, len(shown) + 39, len(third) + 39 - (len(shown) + 20)]


class Asks:
    """Three turns, and how often it was begun."""

    begun = turns = 0

    async def reset(self, task_seed):
        self.begun += 1
        return [Message("user", "go on")]

    async def step(self, action):
        self.turns += 1
        return StepResult(1.0, [Message("user", "and on")], done=self.turns == 3)


class Interrupted:
    """The engine, whose second call is aborted when it has sampled a token; `then` happens before it is asked again."""

    def __init__(self, engine: VllmEngine, then):
        self.engine, self.then, self.routing, self.calls = engine, then, engine.routing, 0

    async def generate(self, request) -> Generation:
        self.calls += 1
        if self.calls != 2:
            return await self.engine.generate(request)
        endless = msgspec.structs.replace(request, stop_token_ids=())
        call = asyncio.create_task(self.engine.generate(endless))
        await sampled(self.engine, request.request_id, 1)
        await self.engine.abort(request.request_id)
        await self.then()
        return await call


@pytest.mark.parametrize("update", [False, True])
async def test_a_turn_that_vllm_aborts_is_asked_again_and_the_turns_before_it_stay(vllm_engine, weights, update):
    async def then():
        if update:
            await vllm_engine.install(weights.publish(), 30)

    env, reports = Asks(), []
    limits = EpisodeConfig(max_new_tokens=80, max_prompt_tokens=400, max_total_tokens=480)
    async with asyncio.timeout(60):
        trajectory = await EpisodePlayer(
            EpisodeTask(0, 0, 0),
            env,
            Interrupted(vllm_engine, then),
            ChatRenderer(byte_tokenizer()),
            limits,
            report=lambda event, **fields: reports.append((event, fields["attempt"])),
        ).play()
    assert env.begun == 1
    assert reports == [("call_failed", 1)]
    assert len(trajectory.turns) == 3
    (sample,) = trajectory.samples
    table = sample.table
    assert table["routing_recorded"].tolist() == [True] * (len(table) - 1) + [False]
    for turn in trajectory.turns:
        part = slice(turn.start, turn.stop)
        before, said, versions = (
            table["token_ids"][: turn.start],
            table["token_ids"][part],
            table["policy_version"][part],
        )
        ours, _ = replay(weights.by_version, before, said, versions)
        assert np.abs(table["rollout_logprobs"][part] - ours).max() < TOLERANCE


async def test_an_episode_with_new_weights_in_one_turn_and_a_preemption_in_the_next(small):
    """Others share its prefix meanwhile. What is recorded of it is what its calls returned, each row once."""
    builder, system, moved = SampleBuilder(small.engine.routing), prompt(64, seed=60), 0
    builder.observe(system.tolist())
    neighbours = [small.start(np.concatenate([system, prompt(9, seed=i)]), 90, f"near-{i}") for i in range(2)]
    prefilled_again: list[tuple[int, int]] = []
    rows, logprobs = [], []
    for turn in range(4):
        name = f"episode-{turn}" + ("", "-hold@125", "-preempt@170", "")[turn]
        first, ids = builder.routes_from, np.asarray(builder.token_ids, np.int32)
        call = small.start(ids, 40, name, routes_from=first)
        if turn == 1:
            await sampled(small.engine, name, 14)
            await small.engine.install(small.weights.publish(), 30)
        generation = await call
        assert len(generation.version_spans) == (2 if turn == 1 else 1)
        again = await small.check(name, ids, generation, first)
        prefilled_again += again if turn == 2 else []
        builder.answer(turn, generation)
        builder.observe(prompt(8, seed=70 + turn).tolist())
        moved += len(generation.routed_experts)
        rows.append(generation.routed_experts)
        logprobs.append(generation.logprobs)
    await asyncio.gather(*neighbours)
    assert prefilled_again
    table = builder.build()
    assert moved == len(table) - 9
    assert table["routing_recorded"].tolist() == [True] * moved + [False] * 9
    assert np.array_equal(table["routed_experts"][:moved], np.concatenate(rows))
    assert np.array_equal(table["rollout_logprobs"][table["loss_mask"]], np.concatenate(logprobs))


async def test_a_full_cache_preempts_and_every_row_stays(small):
    """Two requests of seven blocks each in a cache of ten."""
    ids = [prompt(40, seed=80), prompt(40, seed=81)]
    preemptions, usage = small.engine.stats()["preemptions"], []
    calls = asyncio.gather(*(small.generate(p, 170, f"full-{i}") for i, p in enumerate(ids)))
    while not calls.done():
        usage.append(small.engine.stats()["kv_cache_usage"])
        await asyncio.sleep(0.01)
    generations = await calls
    _, tokens = await small.preempted("full-")
    assert 0 < tokens < 170
    assert small.engine.stats()["preemptions"] > preemptions
    assert 0.9 <= max(usage) <= 1.0
    prefilled_again = [await small.check(f"full-{i}", ids[i], g) for i, g in enumerate(generations)]
    assert any(prefilled_again)


async def test_new_weights_and_then_a_preemption_of_the_same_request(small):
    """The re-prefill runs under newer weights; what was sampled before keeps its log-probs, routes and versions."""
    ids = [prompt(40, seed=82), prompt(40, seed=83)]
    # The one that stays takes so many blocks that the other finds only its first one again.
    calls = [small.start(p, 240, f"then-{i}-hold@{70 + 900 * i}") for i, p in enumerate(ids)]
    await sampled(small.engine, "then-0", 31)
    await small.engine.install(small.weights.publish(), 30)
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
    await small.engine.install(small.weights.publish(), 30)
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
    restarted = small.engine.stats()["restarted"]
    first = small.start(long, 200, f"long-{update}-hold@140")
    await sampled(small.engine, f"long-{update}", 101)
    second = small.start(ids, 20, name)
    await small.resume()
    fed, tokens = await small.preempted(name)
    assert 0 < fed < 250
    assert tokens == 0
    if update:
        await small.engine.install(small.weights.publish(), 30)
    generations = await asyncio.gather(first, second)
    await small.check(f"long-{update}", long, generations[0])
    again = await small.check(name, ids, generations[1])
    assert [s.version for s in generations[1].version_spans] == [small.weights.version]
    assert again or update  # what starts afresh is another request to the scheduler
    assert small.engine.stats()["restarted"] - restarted == update


async def test_an_aborted_request_that_was_preempted_keeps_its_rows(small):
    ids = [prompt(40, seed=88), prompt(40, seed=89)]
    calls = [small.start(p, 170, f"abort-{i}-hold@{60 + 900 * i}-hold@preemption") for i, p in enumerate(ids)]
    await sampled(small.engine, "abort-0", 21)
    await small.engine.install(small.weights.publish(), 30)
    _, tokens = await small.preempted("abort-")
    for i in range(2):
        await small.engine.abort(f"abort-{i}-hold@{60 + 900 * i}-hold@preemption")
    await small.resume()
    generations = await asyncio.gather(*calls)
    assert {g.stop_reason for g in generations} == {"abort"}
    assert tokens in [len(g.token_ids) for g in generations]
    for i, generation in enumerate(generations):
        await small.check(f"abort-{i}", ids[i], generation)
    assert small.engine.stats()["unrecorded_rows"] == 0


async def test_a_preemption_that_finds_its_own_prefix_in_the_cache(small):
    """Its first blocks are still there, in part of old weights and under the salt of these: they go on as they are."""
    ids = prompt(70, seed=90)
    call = small.start(ids, 60, "own-hold@90-preempt@120")
    await sampled(small.engine, "own-", 21)
    await small.engine.install(small.weights.publish(), 30)
    generation = await call
    assert len(generation.version_spans) == 2
    assert await small.check("own-", ids, generation) == [(120, 96)]
