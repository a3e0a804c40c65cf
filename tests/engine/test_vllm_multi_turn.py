"""Episodes of several turns on real vLLM: prefix caching, weights that change in a turn, and aborted answers.

What is expected comes from transformers, run with the weights that were live when each position was fed.
"""

import asyncio

import msgspec
import numpy as np
import pytest

from r3async.config import EpisodeConfig
from r3async.data.versions import expand_version_spans
from r3async.envs import Message, StepResult
from r3async.rollout.engine import Generation
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.samples import EpisodeSamples, SampleBuilder
from r3async.rollout.vllm.engine import VllmEngine
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers.engine import TOLERANCE, prompt, replay, request, same_sets, sampled

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_three_turns_share_prefixes_and_the_weights_change_in_the_second(vllm_engine, weights):
    """Each row is that of the first pass over its position; the engine gives none of them twice."""
    builder = SampleBuilder(vllm_engine.routing)
    system, expected, moved = prompt(140, seed=60), {}, 0
    builder.append_context(system.tolist())
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
            await vllm_engine.install_version(weights.publish(), 30)
        generation = await call
        sampled_by = expand_version_spans(generation.version_spans, 100)
        assert len(set(sampled_by)) == (2 if turn == 1 else 1)
        ours, routes = replay(weights.by_version, ids, generation.token_ids, sampled_by)
        expected.update({p: row for p, row in enumerate(routes) if p not in expected})
        logprobs.append(ours)
        versions.append(sampled_by)
        moved += len(generation.routed_experts)
        builder.append_answer(turn, generation)
        if turn < 2:
            builder.append_context(prompt(20, seed=70 + turn).tolist())
    await asyncio.gather(*neighbours)
    table = builder.build_table()
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
        call = rows.start_call(ids.tolist())
        asked = request(
            ids, 40, f"branch-{rows.turn_count}", routes_from=call.routes_from, routes_version=call.routes_version
        )
        generation = await vllm_engine.generate(asked)
        rows.finish_call(call, generation)
        versions.append(vllm_engine.version)
        moved.append(len(generation.routed_experts))
        return generation

    first = await turn(thought)
    await vllm_engine.install_version(weights.publish(), 30)
    # The template strips the end of what was said: the common prefix goes a little into the answer.
    shown = np.concatenate([thought, first.token_ids[:20], prompt(12, seed=65)])
    second = await turn(shown)
    third = np.concatenate([shown, second.token_ids[:20], prompt(12, seed=66)])
    await turn(third)
    samples, turns = rows.build_samples("g", 1.0)
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
        await self.engine.abort_request(request.request_id)
        await self.then()
        return await call


@pytest.mark.parametrize("update", [False, True])
async def test_a_turn_that_vllm_aborts_is_asked_again_and_the_turns_before_it_stay(vllm_engine, weights, update):
    async def then():
        if update:
            await vllm_engine.install_version(weights.publish(), 30)

    env, reports = Asks(), []
    limits = EpisodeConfig(max_new_tokens=80, max_prompt_tokens=400, max_total_tokens=480)
    async with asyncio.timeout(60):
        trajectory = await EpisodePlayer(
            EpisodeTask(0, 0, 0),
            env,
            limits,
            PlayContext(
                Interrupted(vllm_engine, then),
                ChatRenderer(build_byte_tokenizer()),
                report_event=lambda event, **fields: reports.append((event, fields["attempt"])),
            ),
        ).play_episode()
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


async def test_what_a_short_conversation_fed_before_is_not_fed_again(vllm_engine):
    ids = prompt(70, seed=80).tolist()
    first = await vllm_engine._run_single_text("cache", ids, use_cache=True)
    again = await vllm_engine._run_single_text("cache", [*ids, *prompt(9, seed=81).tolist()], use_cache=True)
    assert (first.cached_tokens, again.cached_tokens) == (0, 64)
