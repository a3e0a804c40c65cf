"""One whole episode on the real engine: every recorded number equals what transformers computes for the same tokens."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from r3async.config import EpisodeConfig
from r3async.envs.builtin import ReverseText
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from tests.helpers.engine import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}assistant:"
SETTINGS = EpisodeConfig(max_turns=3, max_new_tokens=8, max_prompt_tokens=200, max_total_tokens=256, temperature=0.8)


async def test_three_turns_on_vllm_are_recorded_as_transformers_would_compute_them(vllm_engine, tiny_model):
    assert vllm_engine.version == -1, "this file runs before other weights are installed in the suite's engine"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    chat = ChatRenderer(tokenizer)
    trajectory = await EpisodePlayer(
        EpisodeTask(0, 0, 7), ReverseText(4, 3), SETTINGS, PlayContext(vllm_engine, chat)
    ).play_episode()
    table = trajectory.samples[0].table
    ids, sampled = table["token_ids"], np.flatnonzero(table["loss_mask"])
    assert [turn.index for turn in trajectory.turns] == [0, 1, 2]
    assert len(sampled) == sum(turn.stop - turn.start for turn in trajectory.turns) >= 3

    reference = Reference(tiny_model)
    expected = reference.score(ids, temperature=0.8)[sampled - 1]
    assert np.abs(table["rollout_logprobs"][sampled] - expected).max() < 1e-4

    recorded = table["routing_recorded"]
    assert recorded.tolist() == [True] * (len(ids) - 1) + [False]
    routes = np.sort(table["routed_experts"], axis=-1)
    assert np.array_equal(routes[recorded], reference.routes(ids)[recorded])
