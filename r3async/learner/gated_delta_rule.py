"""The gated delta rule over packed samples, each of which begins with an empty state.

A head has a state `S [Dk, Dv]`. Token `t` decays it, corrects what it holds for the token's key,
and reads it:

S = exp(g_t) S;   S = S + k_t beta_t (v_t - k_t S);   o_t = q_t S

Chunks of tokens are computed at once (Yang et al., Gated Delta Networks, arXiv:2412.06464). With
`c` the sum of `g` from the start of the chunk, and `S` the state before it,

(I + A) n = beta (v - exp(c) k S)         A_ij = beta_i exp(c_i - c_j) k_i k_j   for j < i
o = exp(c) q S + P n                      P_ij = exp(c_i - c_j) q_i k_j          for j <= i
S' = exp(c_last) S + sum_j exp(c_last - c_j) k_j n_j

Only the last line, and the part of `n` that depends on `S`, goes from chunk to chunk: all samples
take that step together. A sample of one chunk has no state at all.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from r3async.learner.recurrent_layout import RecurrentLayout

NORM_EPS = 1e-6
"""Added to the square of the length of queries and keys, as by transformers and
flash-linear-attention."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    layout: RecurrentLayout,
) -> Tensor:
    """Compute the rule: `query`, `key` `[N, groups, Dk]`, `value [N, heads, Dv]` ->
    `[N, heads, Dv]`.

    Queries and keys are divided by their lengths, queries also by `sqrt(Dk)`; each serves
    `heads / groups` successive heads. Computes in float32, or in the dtype of `query` if that is
    wider.

    Args:
        log_decay: `[N, heads]`, not above 0.
        beta: `[N, heads]`: the share of a correction that is made.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, gates = map(
        layout.cut_chunks,
        (
            _DivideByLength.apply(query.to(dtype), query.shape[-1] ** -0.5),
            _DivideByLength.apply(key.to(dtype), 1.0),
            value.to(dtype),
            torch.stack([log_decay.to(dtype), beta.to(dtype)], dim=-1),
        ),
    )
    out = [
        _compute_chunks(q[i], k[i], v[i], gates[i], steps)
        for i, (_, steps) in enumerate(layout.groups)
    ]
    return layout.join_chunks(out).to(query.dtype)


def _compute_chunks(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, steps: tuple[int, ...]
) -> Tensor:
    """Compute the rule on chunks of one length: `query [n, groups, C, Dk]`,
    `value [n, heads, C, Dv]`, `gates [n, heads, C, 2]` -> `[n, heads, C, Dv]`; `steps`:
    see `RecurrentLayout`."""
    beta = gates[..., 1]
    # In float32, differences of large sums would lose what small decays follow a large one.
    sums = gates[..., 0].double().cumsum(-1)
    solved, reads = _ChunkMatrices.apply(query, key, sums, beta)
    new = solved @ value
    if len(steps) == 1:
        return reads @ new
    first = steps[0]
    groups = (key.shape[1], -1)
    since_start = sums.exp().to(key.dtype).unflatten(1, groups)[..., None]
    to_end = (sums[..., -1:] - sums).exp().to(key.dtype).unflatten(1, groups)[..., None]
    key = key[:, :, None]
    known = solved[first:] @ (key * since_start)[first:].flatten(1, 2)
    kept = since_start[..., -1:, :].flatten(1, 2)
    new, states = _PassStates.apply(new, known, (key * to_end).flatten(1, 2), kept, steps)
    out = reads @ new
    asked = (query[first:, :, None] * since_start[first:]).flatten(1, 2)
    return torch.cat([out[:first], out[first:] + asked @ states])


class _DivideByLength(torch.autograd.Function):
    """`scale * x / |x|` over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        factor = x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
        out = x * (scale * factor)
        ctx.save_for_backward(out, factor)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out, factor = ctx.saved_tensors
        along = (grads[0] * out).sum(-1, keepdim=True) / ctx.scale**2
        return (grads[0] - out * along).mul_(ctx.scale * factor), None


class _ChunkMatrices(torch.autograd.Function):
    """The matrices of each chunk, `[n, heads, C, C]` each: `(I + A)^-1 diag(beta)`, and `P`.

    From `query`, `key` `[n, groups, C, Dk]`, `sums` and `beta` `[n, heads, C]`.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, sums: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        groups = (key.shape[1], -1)
        size = sums.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu_(1)
        decay = (sums[..., :, None] - sums[..., None, :]).to(key.dtype)
        # Before `exp`, which would overflow there.
        decay = decay.masked_fill_(later, -torch.inf).exp_()
        per_group = decay.unflatten(1, groups)
        alike = ((key @ key.mT)[:, :, None] * per_group).flatten(1, 2)
        reads = ((query @ key.mT)[:, :, None] * per_group).flatten(1, 2)
        unit = torch.eye(size, dtype=key.dtype, device=key.device).expand_as(alike)
        inverse = torch.linalg.solve_triangular(
            alike * beta[..., None], unit, upper=False, unitriangular=True
        )
        solved = inverse * beta[..., None, :]
        ctx.save_for_backward(query, key, beta, decay, alike, inverse, solved, reads)
        return solved, reads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, beta, decay, alike, inverse, solved, reads = ctx.saved_tensors
        from_solved, from_reads = grads
        groups = (key.shape[1], -1)
        # Of A, whose diagonal and upper part are not read.
        by_system = (inverse.mT @ (from_solved @ solved.mT)).neg_().tril_(-1)
        by_beta = (from_solved * inverse).sum(-2) + (by_system * alike).sum(-1)
        by_alike = by_system.mul_(beta[..., None])
        by_difference = from_reads * reads + by_alike * alike
        by_sums = (by_difference.sum(-1) - by_difference.sum(-2)).double()
        by_keys = (by_alike * decay).unflatten(1, groups).sum(2)
        by_query_key = (from_reads * decay).unflatten(1, groups).sum(2)
        by_key = by_query_key.mT @ query + (by_keys + by_keys.mT) @ key
        return by_query_key @ key, by_key, by_sums, by_beta


class _PassStates(torch.autograd.Function):
    """The steps from chunk to chunk of one group of chunks.

    With `new [n, heads, C, Dv]` as if all states were zero, `known [n - first, heads, C, Dk]`,
    `keys [n, heads, C, Dk]` decayed to the chunk's end, and `kept [n, heads, 1, 1]`, how much of a
    state its chunk keeps, returns what `new` really is, and the states before all but the first
    chunks, `[n - first, heads, Dk, Dv]`.
    """

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, known: Tensor, keys: Tensor, kept: Tensor, steps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        new = new.clone()
        states = new.new_empty(*known.shape[:2], keys.shape[-1], new.shape[-1])
        for here, before in _list_steps(steps):
            at = _shift_chunks(here, steps[0])
            state = states[at].flatten(0, 1)
            torch.bmm(keys[before].flatten(0, 1).mT, new[before].flatten(0, 1), out=state)
            if before.start:
                states[at].addcmul_(states[_shift_chunks(before, steps[0])], kept[before])
            new[here].flatten(0, 1).baddbmm_(known[at].flatten(0, 1), state, alpha=-1)
        ctx.save_for_backward(new, known, keys, kept, states)
        ctx.steps = steps
        return new, states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        new, known, keys, kept, states = ctx.saved_tensors
        first = ctx.steps[0]
        by_new = grads[0].clone()
        by_states = grads[1].clone()
        by_keys = torch.zeros_like(keys)
        by_kept = torch.zeros_like(kept)
        for here, before in reversed(_list_steps(ctx.steps)):
            at = _shift_chunks(here, first)
            by_state = by_states[at].flatten(0, 1)
            by_state.baddbmm_(known[at].flatten(0, 1).mT, by_new[here].flatten(0, 1), alpha=-1)
            torch.bmm(new[before].flatten(0, 1), by_state.mT, out=by_keys[before].flatten(0, 1))
            by_new[before].flatten(0, 1).baddbmm_(keys[before].flatten(0, 1), by_state)
            if before.start:
                earlier = _shift_chunks(before, first)
                by_states[earlier].addcmul_(by_states[at], kept[before])
                products = by_states[at] * states[earlier]
                by_kept[before] = products.sum((-1, -2), keepdim=True)
        by_known = (by_new[first:] @ states.mT).neg_()
        return by_new, by_known, by_keys, by_kept, None


def _list_steps(steps: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Return the chunks of each step but the first, and their predecessors."""
    pairs = []
    start = 0
    for before, here in itertools.pairwise(steps):
        pairs.append((slice(start + before, start + before + here), slice(start, start + here)))
        start += before
    return pairs


def _shift_chunks(chunks: slice, first: int) -> slice:
    """Return where these chunks are among all but the `first` ones."""
    return slice(chunks.start - first, chunks.stop - first)
