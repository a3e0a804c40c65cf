"""A learner and transformers' own model, side by side: logits and the gradient of every weight."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from r3async.data.tokens import Sample
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batches import MicroBatch, collate_samples
from tests.helpers import architectures as ha
from tests.helpers import models as hm

TOLERANCE = 1e-5
"""Relative tolerance, in float32."""


def assert_equal_transformers(
    learner: LearnerBackend,
    plain: torch.nn.Module,
    samples: Sequence[Sample],
    *,
    logits: Callable[[Any, MicroBatch], torch.Tensor],
    gradients: Callable[[Any], Mapping[str, torch.Tensor]],
) -> None:
    """Assert that the learner's logits and gradients equal those of `plain`, and that no gradient is zero.

    The learner computes the logits, and all gradients of a random sum of them, for packed samples with their routes
    replayed; `plain` for one sample after the other, with its routers forced.

    Args:
        logits: computes the learner's logits.
        gradients: returns the learner's gradients by the names of a checkpoint.
    """
    micro_batch = collate_samples(samples)
    weight = torch.randn(micro_batch.num_tokens, hm.VOCAB, generator=torch.Generator().manual_seed(0))
    with learner.replay.bind_routes(micro_batch):
        ours = logits(learner, micro_batch)
        (ours * weight).sum().backward()
    got = gradients(learner)
    theirs, want = _one_by_one(plain, samples, weight)
    if plain.config.tie_word_embeddings:
        want.pop("lm_head.weight", None)
    assert set(got) == set(want)
    assert all(expected.abs().max() > 0 for expected in want.values())
    if plain.config.model_type not in hm.BY_TOPK:
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()
        for name, expected in want.items():
            error = (got[name] - expected).norm() / expected.norm()
            assert error < TOLERANCE, (name, float(error))
        return
    # A state sums over a sample, and transformers itself is off by more than the tolerance in float32.
    exact, slopes = _one_by_one(plain.double(), samples, weight)
    _assert_as_exact("logits", ours, theirs, exact)
    for name, slope in slopes.items():
        if name in want:
            _assert_as_exact(name, got[name], want[name], slope)


def _one_by_one(
    plain: torch.nn.Module, samples: Sequence[Sample], weight: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of all samples, each by a pass of its own, and the gradients of their weighted sum."""
    plain.zero_grad()
    parts, at = [], 0
    for sample in samples:
        rows = slice(at, at := at + len(sample.table))
        routes = sample.table["routed_experts"] if "routed_experts" in sample.table else np.zeros((0, 0, 0))
        with hm.forced_routes(plain, routes):
            logits = plain(torch.from_numpy(sample.table["token_ids"].astype(np.int64))[None]).logits[0]
        (logits * weight[rows]).sum().backward()
        parts.append(logits.detach())
    return torch.cat(parts), {name: gradient.clone() for name, gradient in ha.gradients_of(plain).items()}


def _assert_as_exact(name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that `ours` is within tolerance of the `exact` values, or about as near as `theirs` in this precision."""
    size = exact.abs().max()
    error, other = ((x.double() - exact).abs().max() / size for x in (ours, theirs))
    assert error < max(TOLERANCE, 3 * other), (name, float(error), float(other))
