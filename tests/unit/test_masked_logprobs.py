"""The learner's log-probs over supports are a dense renormalisation, in value and gradient, however they are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.supports import SupportSets
from r3async.learner.kernels import SupportMask, select_supports, token_logprobs


def case(vocab_size: int, tokens: int, seed: int):
    """Hidden states, output matrix, targets, temperatures, bool `[tokens, vocab_size]` and the same as supports."""
    rng = np.random.default_rng(seed)
    dense = rng.random((tokens, vocab_size)) < rng.choice([0.0, 0.03, 0.5, 0.97, 1.0], (tokens, 1))
    targets = rng.integers(0, vocab_size, tokens)
    dense[np.arange(tokens), targets] = True
    sets = SupportSets.from_bitmaps(np.packbits(dense, axis=1, bitorder="little"), vocab_size)
    bare = rng.random(tokens) < 0.2  # nobody recorded one: all could be sampled
    dense[bare] = True
    sets = SupportSets.from_parts(tokens, [(int(i), sets[i : i + 1]) for i in np.flatnonzero(~bare)])
    hidden, matrix = rng.standard_normal((tokens, 4)), 3 * rng.standard_normal((vocab_size, 4))
    floats = (torch.tensor(x, requires_grad=True) for x in (hidden, matrix))
    return *floats, torch.from_numpy(targets), torch.from_numpy(0.5 + rng.random(tokens)), dense, sets


@settings(max_examples=60)
@given(st.sampled_from([1, 2, 8, 33, 300]), st.integers(0, 9), st.integers(0, 999), st.integers(1, 4), st.booleans())
def test_renormalised_over_the_support_as_a_dense_softmax_is(vocab_size, tokens, seed, chunk, entropy_gradient):
    hidden, matrix, targets, temperatures, dense, sets = case(vocab_size, tokens, seed)
    found = token_logprobs(
        matrix,
        hidden,
        targets,
        temperatures,
        chunk_elements=chunk * vocab_size,
        entropy_gradient=entropy_gradient,
        supports=sets,
    )
    # Of double logits rounded to single ones, as they are computed there: probabilities of what is left, divided by their sum.
    probs = ((hidden @ matrix.T).float() / temperatures[:, None]).double().softmax(-1) * torch.from_numpy(dense)
    probs = probs / probs.sum(-1, keepdim=True)
    logs = torch.where(probs > 0, probs, 1.0).log()
    expected = logs.gather(1, targets[:, None])[:, 0], -(probs * logs).sum(-1)
    weights = torch.linspace(-1, 2, tokens)

    def gradients(scores):
        loss = (scores[0] * weights).sum() + ((scores[1] * weights).sum() if entropy_gradient else 0)
        return torch.autograd.grad(loss, [hidden, matrix], retain_graph=True)

    for ours, dense_one in zip(found, expected, strict=True):
        assert torch.allclose(ours.double(), dense_one.double(), atol=1e-4)
    if tokens:
        for ours, dense_one in zip(gradients(found), gradients(expected), strict=True):
            assert torch.allclose(ours, dense_one, atol=1e-4 * (1 + float(dense_one.abs().max())))


@pytest.mark.parametrize(("first", "columns"), [(0, 300), (0, 150), (150, 150), (3, 7), (297, 3), (299, 0)])
def test_a_rank_masks_its_own_part_of_the_vocabulary(first, columns):
    *_, dense, sets = case(300, 40, 5)
    mask = SupportMask(sets, torch.device("cpu"), first, columns).build_excluded()
    assert np.array_equal(mask.numpy(), ~dense[:, first : first + columns])


def test_what_is_left_out_has_no_gradient():
    hidden, matrix, targets, temperatures, dense, sets = case(33, 9, 1)
    for token in np.flatnonzero(dense.sum(1) > 1):
        found, _ = token_logprobs(matrix, hidden, targets, temperatures, supports=sets)
        (of_ids,) = torch.autograd.grad(found[token], matrix)
        assert (of_ids[torch.from_numpy(~dense[token])] == 0).all()
        assert (of_ids[torch.from_numpy(dense[token])] != 0).all()


def test_without_supports_nothing_is_masked():
    assert select_supports(None, np.arange(3)) is None
    assert select_supports(SupportSets.unrecorded(5), np.arange(3)) is None
    *_, sets = case(33, 9, 1)
    assert select_supports(sets, np.arange(4)) == sets[:4]
