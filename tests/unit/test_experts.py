"""Experts in stacks give what a loop over experts gives, forward and backward."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import config_from_dict, config_to_dict
from r3async.learner.megatron.experts import order_by_expert
from r3async.learner.replay import RowExchange
from r3async.learner.stacked_experts import ExpertDispatch, RowGroups, WeightedSwiGLU, grouped_linear
from tests.helpers import models as hm
from tests.helpers.checkpoint import batches
from tests.helpers.checkpoint import settings as learner_settings
from tests.helpers.steps import train_minibatch


def loop(x, w1, w2, gates, chosen):
    """One expert after the other, as written in the papers."""
    out = torch.zeros_like(x)
    for expert in range(chosen.shape[1]):
        (tokens,) = chosen[:, expert].nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], w1[expert]).chunk(2, dim=-1)
        active = (F.silu(gate) * up * gates[tokens, expert, None]).to(x.dtype)
        out = out.index_add(0, tokens, F.linear(active, w2[expert]))
    return out


def stacks(x, w1, w2, gates, chosen):
    sent = ExpertDispatch(chosen, int(chosen[0].sum()))
    groups = RowGroups.from_counts(sent.expert_counts)
    wide = grouped_linear(sent.dispatch_rows(x), w1, groups)
    return sent.combine_outputs(grouped_linear(WeightedSwiGLU.apply(wide, sent.gather_gates(gates)), w2, groups))


def made(seed, tokens, experts, top_k, hidden, width, dtype):
    rng = torch.Generator().manual_seed(seed)
    x, w1, w2 = (
        torch.randn(*size, generator=rng).to(dtype)
        for size in ((tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    )
    gates = torch.rand(tokens, experts, generator=rng)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, gates.topk(top_k).indices, True)
    return [t.requires_grad_() for t in (x, w1, w2, gates)], chosen, torch.randn(x.shape, generator=rng).to(dtype)


def passed(function, inputs, chosen, grad):
    out = function(*inputs, chosen)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    k=st.integers(1, 4),
    sizes=st.sampled_from([(8, 8), (16, 24), (8, 5), (12, 3)]),
)
def test_stacks_equal_the_loop(seed, tokens, experts, k, sizes):
    inputs, chosen, grad = made(seed, tokens, experts, min(k, experts), *sizes, torch.float32)
    for ours, exact in zip(passed(stacks, inputs, chosen, grad), passed(loop, inputs, chosen, grad), strict=True):
        assert (ours - exact).norm() <= 1e-6 * max(1e-3, exact.norm())


@pytest.mark.parametrize("sizes", [(16, 24), (12, 5)])
def test_stacks_in_bf16_are_as_near_as_the_loop(sizes):
    inputs, chosen, grad = made(3, 64, 8, 2, *sizes, torch.bfloat16)
    exact = passed(loop, [t.detach().float().requires_grad_() for t in inputs], chosen, grad.float())
    pairs = zip(passed(stacks, inputs, chosen, grad), passed(loop, inputs, chosen, grad), exact, strict=True)
    for ours, theirs, right in pairs:
        assert ours.dtype == theirs.dtype
        assert (ours.float() - right).norm() <= 1.2 * (theirs.float() - right).norm() + 1e-3 * right.norm()


@given(
    st.integers(1, 4).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 3), min_size=experts, max_size=experts), min_size=1, max_size=4
        )
    )
)
def test_received_rows_are_put_in_the_order_of_experts_and_back(counts):
    """They come in the order of ranks; the rows of an expert stay in it."""
    received = torch.tensor(counts)
    came = [(expert, rank, i) for rank, row in enumerate(counts) for expert, n in enumerate(row) for i in range(n)]
    to_experts, to_ranks = order_by_expert(RowExchange([], received.sum(dim=1).tolist(), received))
    rows = torch.arange(len(came), dtype=torch.float32).requires_grad_()
    put = to_experts(rows)
    assert [came[int(i)] for i in put] == sorted(came)
    assert torch.equal(to_ranks(put), rows)
    (gradient,) = torch.autograd.grad(put, rows, put.detach() + 1)
    assert torch.equal(gradient, rows + 1)


def test_no_tokens_are_no_rows():
    inputs, chosen, grad = made(0, 1, 4, 2, 8, 8, torch.float32)
    inputs[0], chosen, grad = inputs[0][:0].detach().requires_grad_(), chosen[:0], grad[:0]
    sent = ExpertDispatch(chosen, 2)
    out = sent.combine_outputs(
        grouped_linear(sent.dispatch_rows(inputs[0]), inputs[1], RowGroups.from_counts(sent.expert_counts))[:, :8]
    )
    out.sum().backward()
    assert out.shape == (0, 8)
    assert not inputs[1].grad.any()


@contextmanager
def unwritten_memory():
    """Make memory that was not written NaN, and torch's grouped product as it is on B200 (pytorch#172439, #193633)."""
    product, was = F.grouped_mm, torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory

    def multiply(x, y, *, offs):
        out = product(x, y, offs=offs)
        if x.ndim == y.ndim == 2:  # the gradient of the matrices
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    F.grouped_mm = multiply
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        F.grouped_mm = product
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(was)


def test_experts_without_a_token_have_no_gradient_where_torch_writes_none():
    inputs, chosen, grad = made(2, 3, 9, 2, 8, 8, torch.float32)
    assert not chosen.any(dim=0).all(), "some expert has no token"
    exact = passed(loop, inputs, chosen, grad)
    with unwritten_memory():
        found = passed(stacks, inputs, chosen, grad)
    for ours, right in zip(found, exact, strict=True):
        assert (ours - right).norm() <= 1e-6 * max(1e-3, right.norm())


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "recompute": "full"}, {"lora": {"rank": 4}}])
def test_a_step_reads_no_memory_that_was_not_written(learners, tmp_path, backend, changes):
    model = hm.make_hf_model(tmp_path / "model", num_experts=64, hidden_size=64, moe_intermediate_size=32)
    described, found = config_to_dict(learner_settings(backend)), []
    config = config_from_dict(described | {"learner": described["learner"] | changes})
    (step,) = batches(1)
    for memory in (nullcontext, unwritten_memory):
        learner = learners(config, model)
        with memory():
            metrics = [train_minibatch(learner, step[:2]).metrics for _ in range(2)]
        found.append((learner.export_weights(), [each["grad_norm"] for each in metrics]))
        assert [each["optimizer/skipped"] for each in metrics] == [0, 0]
    (right, norms), (ours, others) = found
    assert norms == others
    assert all(torch.equal(ours[name], right[name]) for name in right)
