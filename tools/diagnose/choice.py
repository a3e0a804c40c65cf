"""Causes of a different choice of experts: other ids rather than inexact numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from r3async.data.routes import LOST_ROUTES_FIX

from .judge import DivergentStage, Explanation
from .reference import get_router

MAX_UNEXPLAINED_SHARE = 0.2
"""Share of tokens that a cause may leave unexplained."""


def explain_choice(case: DivergentStage) -> list[Explanation]:
    """Return the explanations of the chosen experts, the best first."""
    tries = (
        _try_first_experts(case),
        *_try_scores(case),
        *_try_other_layers(case),
        _try_permutation(case),
    )
    found = [each for each in tries if each is not None and each.left <= MAX_UNEXPLAINED_SHARE]
    return sorted(found, key=lambda each: each.left)


def compute_mismatch_share(ids: Tensor, others: Tensor) -> float:
    """Return the share of rows `[T, K]` whose sets of experts differ."""
    if ids.shape != others.shape:
        return 1.0
    return float((ids.sort(1).values != others.sort(1).values).any(1).float().mean())


def _try_first_experts(case: DivergentStage) -> Explanation | None:
    if (
        compute_mismatch_share(
            case.output, torch.arange(case.output.shape[1]).expand_as(case.output)
        )
        == 0
    ):
        evidence = f"every token has the experts 0 to {case.output.shape[1] - 1}"
        return Explanation("routes not recorded", evidence, LOST_ROUTES_FIX, 0.0)
    return None


def _try_scores(case: DivergentStage) -> Iterator[Explanation]:
    """Try the router's scores without what config.json adds to them."""
    router: Any = get_router(case.reference.copy_module(case.layer, "router").mlp)
    with torch.no_grad():
        logits = router(case.input)[0].float()
    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits if bias is None else logits.sigmoid() + bias
    top_k = case.output.shape[1]
    plain = compute_mismatch_share(case.output, scores.topk(top_k, dim=1).indices)
    yield Explanation(
        "groups of experts",
        "experts are chosen from all groups, and not from the best",
        "compare n_group and topk_group of both",
        plain,
    )
    if bias is not None:
        without = compute_mismatch_share(case.output, logits.topk(top_k, dim=1).indices)
        evidence = "experts are chosen without the bias of each, e_score_correction_bias"
        yield Explanation(
            "choice bias",
            evidence,
            "the bias did not arrive: it is a buffer, and float32 in any model",
            without,
        )
    worst = compute_mismatch_share(case.output, (-scores).topk(top_k, dim=1).indices)
    yield Explanation(
        "order of scores",
        "the experts with the lowest scores are chosen",
        "check the sign of the scores",
        worst,
    )


def _try_other_layers(case: DivergentStage) -> Iterator[Explanation]:
    for layer in case.reference.moe_layers:
        x = case.outputs.tensors.get(f"{layer}.mlp.in")
        if layer == case.layer or x is None:
            continue
        _, best = case.reference.choose_experts(layer, x, torch.float32)
        evidence = f"the experts are those that layer {layer} chooses"
        yield Explanation(
            "layer order",
            evidence,
            "the columns of a route are mapped to other layers",
            compute_mismatch_share(case.output, best),
        )


def _try_permutation(case: DivergentStage) -> Explanation | None:
    """Test whether each expert stands for another one: the one that most often
    appears in its place."""
    if case.output.shape != case.expected.shape:
        return None
    experts = int(max(case.output.max(), case.expected.max())) + 1
    should, did = (
        torch.zeros(len(ids), experts).scatter_(1, ids, 1.0) for ids in (case.expected, case.output)
    )
    together = (should.T @ did) / should.sum(0).clamp(min=1)[:, None]
    instead = torch.where(should.sum(0) > 0, together.argmax(1), torch.arange(experts))
    moved = [(e, int(to)) for e, to in enumerate(instead) if e != to]
    if not moved:
        return None
    named = ", ".join(f"{e} by {to}" for e, to in moved[:8])
    fix = "names of experts or rows of the router are mapped wrongly where the checkpoint is loaded"
    return Explanation(
        "expert permutation",
        f"experts are replaced: {named}",
        fix,
        compute_mismatch_share(case.output, instead[case.expected]),
    )
