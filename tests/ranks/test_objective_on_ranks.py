"""Every loss, reduction and term: two ranks, with micro-batches of their own and padding, have the gradient of one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from r3async.config import BUILTIN_POLICY_LOSSES, config_from_dict
from r3async.learner.loss import compute_loss, compute_loss_weights
from tests.helpers import models as hm
from tests.helpers.algorithms import REDUCTIONS, algorithm, batch_of, make_samples
from tests.helpers.parity import LENGTHS, gradients_of_rank
from tests.helpers.parity import batch as packed_batch

FEATURES = 5
TERMS = {
    "entropy_coef": 0.03,
    "reference_kl": {"coef": 0.2},
    "rollout_kl": {"estimator": "k3", "coef": 0.1},
    "correction": {"icepop_low": 0.6, "icepop_high": 1.6},
}


def features(tokens: int, sample: int) -> torch.Tensor:
    """float64 `[T, FEATURES]`: how a sample's log-probs depend on the parameters."""
    return torch.randn(tokens, FEATURES, generator=torch.Generator().manual_seed(sample), dtype=torch.float64)


def gradient(micro_batches: list[list[int]], settings: dict, reduction: str) -> torch.Tensor:
    """float64 `[FEATURES]`: of those micro-batches of samples; weights are of the whole step."""
    samples = make_samples(0, LENGTHS)
    weights = compute_loss_weights(
        [s.mask for s in samples], range(7), [0, 0, 0, 1, 1, 2, 2], reduction, norm_length=50
    )
    for sample, weight in zip(samples, weights, strict=True):
        sample.weights = np.where(sample.mask, weight.astype(np.float64), np.nan)
    theta = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    config = algorithm(**settings)
    for members in micro_batches:
        batch, logprobs, entropies = batch_of([samples[i] for i in members], torch.float64)
        slopes = [features(len(samples[i]), i)[torch.from_numpy(samples[i].mask)] for i in members]
        change = torch.cat(slopes) @ theta if slopes else theta[:0]
        loss, _ = compute_loss(
            batch, logprobs.detach() + change, entropies.detach() + change, config, rollout_kl_coef=0.1
        )
        loss.backward()
    assert theta.grad is not None
    return theta.grad


def share(settings: dict, reduction: str) -> list[float]:
    """Rank 0 has an empty micro-batch where rank 1 still has samples."""
    mine = [[5, 0], []] if dist.get_rank() == 0 else [[1], [6, 2, 4, 3]]
    total = gradient(mine, settings, reduction)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("anchor", ["rollout", "recomputed"])
@pytest.mark.parametrize("loss", BUILTIN_POLICY_LOSSES)
def test_two_ranks_have_the_gradient_of_one(two_ranks, loss, anchor, reduction):
    settings = {"policy_loss": loss, "anchor": anchor, **TERMS}
    exact = gradient([list(range(len(LENGTHS)))], settings, reduction)
    for found in two_ranks.call(share, settings, reduction):
        assert (torch.tensor(found, dtype=torch.float64) - exact).norm() <= 1e-9 * exact.norm()


def with_everything(**parallel: int):
    return config_from_dict(
        {
            "learner": {"dtype": "float32", "lr": 1e-2, "parallel": parallel},
            "routing": {"min_recorded_fraction": 0.0},
            "algorithm": {"policy_loss": "gspo", "anchor": "recomputed", "gspo": {"clip_low": 0.5, "clip_high": 2.0}}
            | {k: v for k, v in TERMS.items() if k != "correction"},
        }
    )


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=["dp2", "tp2", "pp2"])
def test_a_learner_on_two_ranks_has_the_gradient_of_one_with_every_term(two_ranks, tmp_path_factory, layout):
    path = hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[0], vocab_size=97)
    rng = np.random.default_rng(0)
    micro_batches = []
    for m in packed_batch():
        near = (m.table["rollout_logprobs"] + rng.normal(0, 0.1, m.num_tokens)).astype(np.float32)
        weights = rng.random(m.num_tokens).astype(np.float32) / 100
        columns = {"old_logprobs": near, "reference_logprobs": near, "loss_weights": weights}
        micro_batches.append(type(m)(m.table.with_columns(**columns), m.cu_seqlens, m.temperatures, m.sample_ids))
    expected = gradients_of_rank(str(path), with_everything(), micro_batches)
    answer = two_ranks.call(gradients_of_rank, str(path), with_everything(**layout), micro_batches)[0]
    assert answer["result"].metrics == pytest.approx(expected["result"].metrics, rel=1e-4, abs=1e-6)
    assert expected["result"].metrics["loss/entropy"] != 0
    assert expected["result"].metrics["loss/reference_kl"] > 0
    for name, exact in expected["gradients"].items():
        assert np.linalg.norm(answer["gradients"][name] - exact) <= 1e-5 * max(np.linalg.norm(exact), 1e-6), name
