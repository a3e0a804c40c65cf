"""Episodes that sample by top-p: each sampled token has its support beside it, in every sample, and no other token has one."""

import numpy as np
import pytest

from r3async.config import EpisodeConfig
from r3async.rollout.episode import EpisodePlayer, EpisodeTask, build_failed_trajectory
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.scripted import SCRIPTED_ROUTING, ScriptedEngine, scripted_supports
from r3async.schedule.validation import InvalidTrajectory, validate_trajectories
from r3async.tools.init_model import build_byte_tokenizer
from r3async.weights.manifest import WeightManifest
from tests.helpers.serving import answer_ids
from tests.unit.test_episodes import Talker

TASK = EpisodeTask(0, 0, 11)


@pytest.fixture(scope="module")
def chat():
    return ChatRenderer(build_byte_tokenizer())


async def played(chat, **settings):
    engine = ScriptedEngine(answer_ids(chat, "ab", "cde"))
    await engine.start()
    await engine.install_version(WeightManifest(version=0, path="", tensors={}, nbytes=0), timeout=1)
    config = EpisodeConfig(max_turns=2, max_new_tokens=8, max_prompt_tokens=64, max_total_tokens=128, **settings)
    return engine, await EpisodePlayer(TASK, Talker(), config, PlayContext(engine, chat)).play_episode()


def validate(trajectory, masked):
    validate_trajectories(
        [trajectory], vocab_size=264, learner_version=0, max_tokens=128, routing=SCRIPTED_ROUTING, needs_supports=masked
    )


@pytest.mark.parametrize("rows", ["merged", "stepwise"])
@pytest.mark.parametrize("truncated", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
async def test_sampled_tokens_have_their_supports(chat, rows, truncated):
    engine, trajectory = await played(chat, rows=rows, **truncated)
    assert all(call.needs_sampling_mask for call in engine.requests)
    assert all(getattr(call, name) == value for call in engine.requests for name, value in truncated.items())
    assert len(trajectory.samples) == (1 if rows == "merged" else 2)
    for sample in trajectory.samples:
        table = sample.table
        assert np.array_equal(table["support"].recorded_mask, table["loss_mask"])
        mask = np.flatnonzero(table["loss_mask"])
        assert table["support"].take_rows(mask) == scripted_supports(table["token_ids"][mask])
    validate(trajectory, masked=True)
    with pytest.raises(InvalidTrajectory, match="nothing here renormalises"):
        validate(trajectory, masked=False)
    # What stands for an episode that failed has none, and needs none.
    validate(build_failed_trajectory(TASK, SCRIPTED_ROUTING, 5), masked=True)


async def test_without_the_mask_nothing_is_recorded(chat):
    engine, trajectory = await played(chat)
    assert not any(call.needs_sampling_mask for call in engine.requests)
    assert not any("support" in sample.table for sample in trajectory.samples)
    with pytest.raises(InvalidTrajectory, match="has no supports"):
        validate(trajectory, masked=True)


async def test_answers_end_where_the_settings_say(chat):
    engine, _ = await played(chat, stop=["</answer>"])
    asked = {(call.stop_strings, call.stop_token_ids) for call in engine.requests}
    assert asked == {(("</answer>",), chat.stop_token_ids)}
    engine, trajectory = await played(chat, ignore_eos=True)
    assert {call.stop_token_ids for call in engine.requests} == {()}
    assert [turn.stop - turn.start for turn in trajectory.turns] == [3, 4]
