"""The same episodes as one row, and as a row a turn, give the same loss and gradient as a row that is built by hand."""

import numpy as np
import pytest
import torch

from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.learner.micro_batches import pack_samples
from r3async.learner.prepare import prepare_minibatches
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import torch as ht
from tests.helpers.stepwise import EPISODES, SHAPE, TURNS, VOCABULARY, Sampler, play


def by_hand(trajectory: Trajectory, engine: Sampler) -> Trajectory:
    """One row, put together from what the engine was asked and answered."""
    prompt, answer = engine.calls[-1]
    ids = np.asarray(prompt + answer)
    table = TokenTable.from_tokens(ids)
    mask, turn, rewards = np.zeros(len(ids), bool), np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.float32)
    turns = []
    for index, (before, said) in enumerate(engine.calls):
        rows = slice(len(before), len(before) + len(said))
        mask[rows], turn[rows] = True, index
        rewards[rows.stop - 1] = trajectory.turns[index].reward
        turns.append(Turn(index, 0, rows.start, rows.stop, trajectory.turns[index].reward, "stop"))
    recorded = np.ones(len(ids), bool)
    recorded[-1] = False
    routes = engine.routes[: len(ids)].copy()
    routes[-1] = np.arange(SHAPE.top_k)
    table = table.with_columns(
        loss_mask=mask,
        turn=turn,
        rewards=rewards,
        rollout_logprobs=np.where(mask, engine.logprobs[: len(ids)], np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        routed_experts=routes,
        routing_recorded=recorded,
    )
    return Trajectory("h", 0, trajectory.episode_index, 0, "", "env_done", turns, [Sample("hs0", table, 0.8)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ht.make_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCABULARY, max_position_embeddings=512)


@pytest.mark.long
@pytest.mark.parametrize("credit", ["trajectory", "turn", "token"])
def test_merged_and_stepwise_rows_give_loss_and_gradient_of_the_row_built_by_hand(model, credit):
    config = ht.settings(algorithm__credit=credit, episode__max_new_tokens=16)
    merged, engines = play("auto")
    stepwise, _ = play("stepwise")
    hand = [by_hand(t, e) for t, e in zip(merged, engines, strict=True)]
    assert [len(t.samples) for t in merged] == [1] * EPISODES
    assert [len(t.samples) for t in stepwise] == [TURNS] * EPISODES
    for mine, wanted in zip(merged, hand, strict=True):
        assert mine.samples[0].table == wanted.samples[0].table
    prepared = {
        name: prepare_minibatches([g], config)[0][0]
        for name, g in [("hand", hand), ("merged", merged), ("step", stepwise)]
    }
    assert len(prepared["step"]) == TURNS * EPISODES
    want_losses, want = ht.reference_step(model, prepared["hand"], config, torch.float64)
    assert want_losses["grad_norm"] > 0.01
    for name in ("merged", "step"):
        losses, got = ht.reference_step(model, prepared[name], config, torch.float64)
        # Transformers keeps norms in float32 whatever the model's dtype.
        assert losses == pytest.approx(want_losses, rel=1e-7)
        assert ht.worst_error(got, want)[0] < 1e-6
        learner = TorchLearner.from_pretrained(config, model)
        result, got = ht.gradients_of_step(learner, pack_samples(prepared[name], 400))
        assert result.metrics["loss/policy"] == pytest.approx(want_losses["loss/policy"], rel=1e-4)
        error, tensor = ht.worst_error(got, want)
        assert error < 1e-5, tensor
