"""Packed attention with sinks and windows is the dense formula, sample by sample, and so is its gradient."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right

from r3async.learner import packed_attention as learner_attention
from r3async.learner.packed_attention import attend_padded, attend_unpadded, packed_attention, plan_attention

HEADS, GROUPS, SIZE = 4, 2, 8


def dense(query, key, value, scale, sinks, window):
    """Of one sample `[T, heads, D]`, by scores of every pair."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    at = torch.arange(len(query))
    ago = at[:, None] - at
    scores = scores.masked_fill((ago < 0) | (ago >= (window or len(query))), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", weights, value)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    sinks=st.booleans(),
    window=st.sampled_from([None, 1, 3, 17, 64]),
    seed=st.integers(0, 99),
)
def test_sinks_and_windows_are_those_of_the_dense_formula(lengths, sinks, window, seed):
    rng = torch.Generator().manual_seed(seed)
    edges, total = np.cumsum([0, *lengths]), sum(lengths)
    sizes = [(total, HEADS, SIZE), (total, GROUPS, SIZE), (total, GROUPS, SIZE), (HEADS,)]
    leaves = [torch.randn(size, generator=rng, dtype=torch.float64, requires_grad=True) for size in sizes]
    query, key, value, sink = leaves
    given_sinks, scale = (sink if sinks else None), 0.3
    plan = plan_attention(edges, torch.device("cpu"))
    ours = packed_attention(query, key, value, plan, scale, sinks=given_sinks, window=window)
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    theirs = torch.cat([dense(query[p], key[p], value[p], scale, given_sinks, window) for p in parts])
    assert (ours - theirs).abs().max() < 1e-12
    weight = torch.randn(theirs.shape, generator=rng, dtype=torch.float64)
    used = leaves if sinks else leaves[:3]
    for mine, exact in zip(
        torch.autograd.grad((ours * weight).sum(), used),
        torch.autograd.grad((theirs * weight).sum(), used),
        strict=True,
    ):
        assert (mine - exact).abs().max() < 1e-11


@pytest.mark.parametrize("window", [None, 5])
def test_a_shared_prefix_sees_sinks_and_windows_too(window):
    """The second sample has the first's ten tokens before its own eight: its queries lack them."""
    rng = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(26, n, SIZE, generator=rng) for name, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))}
    sinks, whole = torch.randn(HEADS, generator=rng), torch.tensor([*range(10), *range(18, 26)])
    plan = plan_attention(np.array([0, 18, 26]), torch.device("cpu"), np.array([[0, 0], [0, 10]]))
    ours = packed_attention(rows["q"], rows["k"], rows["v"], plan, None, sinks=sinks, window=window)
    first = dense(*(rows[x][:18] for x in "qkv"), SIZE**-0.5, sinks, window)
    second = dense(*(rows[x][whole] for x in "qkv"), SIZE**-0.5, sinks, window)[10:]
    assert (ours - torch.cat([first, second])).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_kept_mask_gives_the_bits_of_torchs_own_and_is_built_once(sinks, dtype, monkeypatch):
    """torch makes one for each layer: of two layers over samples with a shared prefix, outputs and gradients."""
    rng = torch.Generator().manual_seed(0)
    sizes = [(2, 50, HEADS, SIZE), (2, 50, GROUPS, SIZE), (2, 50, GROUPS, SIZE), (HEADS,)]
    leaves = [torch.randn(size, generator=rng).to(dtype).requires_grad_() for size in sizes]

    def compute(build):
        plan = plan_attention(np.array([0, 22, 36, 50]), torch.device("cpu"), np.array([[0, 0], [0, 10], [0, 10]]))
        monkeypatch.setattr(learner_attention, "_find_mask", build)
        layers = zip(*leaves[:3], strict=True)
        given_sinks = leaves[3] if sinks else None
        outputs = [packed_attention(q, k, v, plan, None, sinks=given_sinks) for q, k, v in layers]
        grads = torch.autograd.grad(torch.stack(outputs).float().square().sum(), leaves if sinks else leaves[:3])
        return [*outputs, *grads], plan.padded_layout.masks

    ours, masks = compute(learner_attention._find_mask)
    theirs, _ = compute(
        lambda _, q, width, skipped, before, window: causal_lower_right(width - skipped, width + before)
    )
    assert all(torch.equal(mine, exact) for mine, exact in zip(ours, theirs, strict=True))
    assert len(masks) == 1 + sinks


def attend_each_sample(
    query, key, value, query_edges, key_edges, longest_query, longest_key, *, scale, window_size, **_
):
    """torch's `varlen_attn` by its documentation, which has no kernel on a CPU: the last query sees the last key."""
    edges = [torch.stack([e[:-1], e[1:]], dim=1).tolist() for e in (query_edges, key_edges)]
    assert [e.dtype for e in (query_edges, key_edges)] == [torch.int32, torch.int32]
    assert longest_query == max(b - a for a, b in edges[0])
    assert longest_key == max(b - a for a, b in edges[1])
    assert window_size[1] == 0
    window, parts = window_size[0] + 1 if window_size[0] >= 0 else None, []
    for (a, b), (c, d) in zip(*edges, strict=True):
        whole = torch.cat([query.new_zeros(d - c - (b - a), *query.shape[1:]), query[a:b]])
        parts.append(dense(whole, key[c:d], value[c:d], scale or SIZE**-0.5, None, window)[d - c - (b - a) :])
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("prefixes", [None, [[0, 0], [0, 10], [1, 12]]])
def test_both_layouts_give_the_same_attention_and_gradient(monkeypatch, window, prefixes):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_each_sample)
    rng = torch.Generator().manual_seed(0)
    sizes = [(31, n, SIZE) for n in (HEADS, GROUPS, GROUPS)]
    rows = [torch.randn(size, generator=rng, dtype=torch.float64, requires_grad=True) for size in sizes]
    weight = torch.randn(31, HEADS, SIZE, generator=rng, dtype=torch.float64)
    shared = None if prefixes is None else np.array(prefixes, np.int32)
    plan = plan_attention(np.array([0, 18, 26, 31]), torch.device("cpu"), shared)
    padded = attend_padded(*rows, plan.padded_layout, None, window=window)
    unpadded = attend_unpadded(*rows, plan.unpadded_layout, None, window=window)
    assert (padded - unpadded).abs().max() < 1e-12
    for one, other in zip(*(torch.autograd.grad((x * weight).sum(), rows) for x in (padded, unpadded)), strict=True):
        assert (one - other).abs().max() < 1e-11
