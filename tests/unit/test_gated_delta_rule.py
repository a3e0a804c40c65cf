"""The gated delta rule on packed samples is the recurrence that defines it, sample by sample, and so are its gradients."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.learner.gated_delta_rule import gated_delta_rule
from r3async.learner.packed_attention import plan_attention
from r3async.learner.recurrent_layout import CHUNK_TOKENS, LONGEST_SINGLE_CHUNK, RecurrentLayout
from r3async.learner.results import LearnerError

GROUPS, HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 8, 6
CPU = torch.device("cpu")
EDGES = sorted(
    {1, 2, *(n + d for n in (CHUNK_TOKENS, LONGEST_SINGLE_CHUNK, 2 * LONGEST_SINGLE_CHUNK) for d in (-1, 0, 1))}
)


def draw_inputs(lengths, seed, decays=(-0.01, -1.0), betas=(0.2, 0.9)):
    """Queries, keys, values, log-decays and betas of packed samples; each token has one of the decays and betas."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    sizes = [(GROUPS, KEY_SIZE), (GROUPS, KEY_SIZE), (HEADS, VALUE_SIZE)]
    rows = [torch.randn(total, *size, generator=rng) for size in sizes]
    for choices in (decays, betas):
        chosen = torch.randint(len(choices), (total, HEADS), generator=rng)
        rows.append(torch.tensor(choices)[chosen] * (0.5 + 0.5 * torch.rand(total, HEADS, generator=rng)))
    return [x.double().requires_grad_() for x in rows]


def recurrent_rule(query, key, value, log_decay, beta, lengths):
    """Token by token in float64, all samples beside each other."""
    query, key, value, log_decay, beta = (x.double() for x in (query, key, value, log_decay, beta))
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HEADS // GROUPS, dim=1)
        for x in (query, key)
    )
    starts = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    state = query.new_zeros(len(lengths), HEADS, KEY_SIZE, VALUE_SIZE)
    outputs = []
    for at in range(max(lengths)):
        rows = starts + torch.tensor(lengths).sub(1).clamp(max=at)
        k, v = key[rows][..., None], value[rows][..., None, :]
        state = state * log_decay[rows].exp()[..., None, None]
        state = state + k * beta[rows][..., None, None] * (v - k.mT @ state)
        outputs.append((query[rows][..., None, :] @ state)[..., 0, :] * KEY_SIZE**-0.5)
    return torch.cat([torch.stack([o[i] for o in outputs[:n]]) for i, n in enumerate(lengths)])


def assert_is_the_recurrence(inputs, lengths, tolerance, exactness):
    """To within `tolerance` of the largest number in float32, and `exactness` in float64."""
    exact = recurrent_rule(*inputs, lengths)
    weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    theirs = exact, *torch.autograd.grad(exact, inputs, weight.double())
    for dtype, bound in ((torch.float32, tolerance), (torch.float64, exactness)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = gated_delta_rule(*leaves, RecurrentLayout(np.cumsum([0, *lengths]), CPU))
        ours = out, *torch.autograd.grad(out, leaves, weight.to(dtype))
        for name, mine, true in zip(("out", "query", "key", "value", "log_decay", "beta"), ours, theirs, strict=True):
            assert torch.isfinite(mine).all(), name
            assert (mine - true).abs().max() <= bound * max(1.0, true.abs().max()), (name, dtype)


some_lengths = st.lists(st.sampled_from(EDGES) | st.integers(1, 100), min_size=1, max_size=4)


@settings(max_examples=15)
@given(lengths=some_lengths, seed=st.integers(0, 99))
def test_the_rule_is_the_recurrence_of_each_sample(lengths, seed):
    assert_is_the_recurrence(draw_inputs(lengths, seed), lengths, 2e-6, 1e-12)


@pytest.mark.long
@settings(max_examples=15)
@given(
    lengths=some_lengths,
    decays=st.lists(st.sampled_from([0.0, -1e-4, -1.0, -40.0, -1e4, -1e8]), min_size=1, max_size=4),
    betas=st.lists(st.sampled_from([0.0, 1e-7, 0.5, 1.0, 2.0]), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_decays_and_corrections_of_any_size_are_finite_and_right(lengths, decays, betas, seed):
    """Small decays after large ones are not lost in the sums, which reach 1e10 here."""
    assert_is_the_recurrence(draw_inputs(lengths, seed, decays, betas), lengths, 1e-5, 1e-6)


@settings(max_examples=15)
@given(
    lengths=some_lengths,
    before=some_lengths,
    after=some_lengths,
    seed=st.integers(0, 99),
)
def test_a_sample_has_the_same_bits_among_any_others(lengths, before, after, seed):
    inputs, *others = ([x.detach().float() for x in draw_inputs(some, seed)] for some in (lengths, before, after))
    for x in (*others[0], *others[1]):
        x[0] = torch.nan  # of another sample, nothing is seen
    packed = [torch.cat([a, x, b]).requires_grad_() for a, x, b in zip(others[0], inputs, others[1], strict=True)]
    inputs = [x.requires_grad_() for x in inputs]
    mine = slice(sum(before), sum(before) + sum(lengths))
    out = gated_delta_rule(*packed, RecurrentLayout(np.cumsum([0, *before, *lengths, *after]), CPU))
    alone = gated_delta_rule(*inputs, RecurrentLayout(np.cumsum([0, *lengths]), CPU))
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(seed))
    for ours, theirs in zip(
        (out[mine], *(g[mine] for g in torch.autograd.grad(out[mine], packed, weight))),
        (alone, *torch.autograd.grad(alone, inputs, weight)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_it_computes_in_float32_and_returns_the_dtype_of_the_query():
    lengths = [70, 33]
    inputs = [x.detach().bfloat16() for x in draw_inputs(lengths, 0)]
    layout = RecurrentLayout(np.cumsum([0, *lengths]), CPU)
    out = gated_delta_rule(*inputs, layout)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, gated_delta_rule(*(x.float() for x in inputs), layout).bfloat16())


def test_samples_that_share_a_prefix_are_refused():
    plan = plan_attention(np.array([0, 18, 26]), CPU, np.array([[0, 0], [0, 10]]))
    with pytest.raises(LearnerError, match="share_prefixes"):
        _ = plan.recurrent_layout
