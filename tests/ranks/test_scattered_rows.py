"""One gradient of a model's episodes, however their rows are scattered over micro-batches and ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from r3async.config import Config, config_from_dict, config_to_dict
from r3async.data.tokens import Trajectory
from r3async.learner.micro_batches import MicroBatch, pack_samples
from r3async.learner.prepare import prepare_minibatches
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import torch as ht
from tests.helpers.parity import gradients_of_rank, of_rank
from tests.helpers.stepwise import EPISODES, VOCABULARY, play


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ht.make_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCABULARY, max_position_embeddings=512)


EPISODE_LEVEL = {
    "gspo": {"policy_loss": "gspo", "gspo": {"clip_low": 0.004, "clip_high": 0.004}, "reduction": "sequence_mean"},
    "cppo": {"policy_loss": "cppo", "cppo": {"threshold": 3e-4, "budget": 1e-4}},
    "m2po": {"policy_loss": "m2po", "m2po": {"limit": 0.01}},
    "masks": {
        "correction": {"geometric_high": 1.02, "product_low": 0.4, "max_token_kl": 0.5, "veto_low": 0.7},
        "reduction": "sequence_mean_token_sum_norm",
    },
}
"""Settings whose loss at a token depends on its whole episode, or on the whole minibatch."""


def sampled_near(trajectories: list[Trajectory], values: np.ndarray) -> list[Trajectory]:
    """With rollout log-probs `values` float32, of all sampled tokens in order: the same whatever the rows."""
    start = 0
    for trajectory in trajectories:
        for sample in trajectory.samples:
            mask = sample.table["loss_mask"]
            column = sample.table["rollout_logprobs"].copy()
            column[mask] = values[start : start + mask.sum()]
            start += int(mask.sum())
            sample.table = sample.table.with_columns(rollout_logprobs=column)
    assert start == len(values)
    return trajectories


def gradients_of_torch(path: str, settings: Config, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """As `gradients_of_rank`, of the other backend."""
    rank = dist.get_rank() if settings.learner.parallel.dp > 1 else 0
    learner = TorchLearner.from_pretrained(settings, Path(path))
    mine = of_rank(micro_batches, rank, settings.learner.parallel.dp)
    result, found = ht.gradients_of_step(learner, mine)
    return {"gradients": {n: g.numpy() for n, g in found.items()}, "result": result}


@pytest.mark.parametrize("level", EPISODE_LEVEL)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_model_has_one_gradient_however_the_rows_are_scattered(model, two_ranks, backend, level):
    """Of merged rows in one micro-batch; of step-wise rows in many; and of those on two ranks."""
    gradients = {"torch": gradients_of_torch, "megatron": gradients_of_rank}[backend]
    plain = config_to_dict(ht.settings(episode__max_new_tokens=16))
    plain["algorithm"] |= EPISODE_LEVEL[level]
    plain["learner"]["backend"] = backend
    config = config_from_dict(plain)
    learner = TorchLearner.from_pretrained(ht.settings(), model)
    rows, _ = play("auto")
    (together,) = pack_samples([s for t in rows for s in t.samples], 2000)
    known = learner.logprobs([together])[0][together.table["loss_mask"]]
    values = (known + np.random.default_rng(0).normal(0, 0.15, len(known))).astype(np.float32)
    merged, stepwise = (
        prepare_minibatches([sampled_near(play(m)[0], values)], config)[0][0] for m in ("auto", "stepwise")
    )

    want = gradients(str(model), config, pack_samples(merged, 2000))
    scattered = pack_samples(stepwise, max(len(s.table) for s in stepwise))
    assert len(scattered) > 2
    assert 0 < sum(want["result"].metrics[f"rollout_corr/{n}_fraction"] for n in ("clipped", "masked")) < 1
    plain["learner"]["parallel"] |= {"dp": 2}
    one = gradients(str(model), config, scattered)
    two = two_ranks.call(gradients, str(model), config_from_dict(plain), scattered)[0]
    figures = [n for n in want["result"].metrics if n.startswith(("loss/", "rollout_corr/", "rollout_kl/"))]
    assert want["result"].metrics["batch/split_episodes"] == 0
    for got in (one, two):
        assert got["result"].metrics["batch/split_episodes"] == (0 if level == "m2po" else EPISODES)
        assert {n: got["result"].metrics[n] for n in figures} == pytest.approx(
            {n: want["result"].metrics[n] for n in figures}, rel=1e-4, abs=1e-6
        )
        norm = np.sqrt(sum(float(np.square(g).sum()) for g in want["gradients"].values()))
        for name, exact in want["gradients"].items():
            assert np.linalg.norm(got["gradients"][name] - exact) <= 1e-5 * max(np.linalg.norm(exact), 0.1 * norm), name
