"""The table of causes of a divergent stage.

Each cause is an experiment that changes the stage of the files, and either explains what a
witness gave or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from . import attention, mixture, simple
from .choice import explain_choice
from .experiments import FIX_CONFIG, FIX_MAPPING, FIX_QUANTISED, FIX_STALE, Cause
from .judge import DivergentStage, Explanation

NORM_STAGES = ("input_norm", "post_norm", "final_norm")
MATRIX_STAGES = ("embedding", "attention", "router", "mlp", "head")
MAX_REMAINING_SHARE = 0.3
"""Share of the difference that an experiment may leave and still count as an explanation."""

CAUSES = (
    Cause("norm epsilon", NORM_STAGES, simple.try_norm_epsilon, FIX_CONFIG),
    Cause("form of the norm", NORM_STAGES, simple.try_norm_form, FIX_CONFIG),
    Cause("weight of the norm", NORM_STAGES, simple.try_other_norm, FIX_MAPPING),
    Cause(
        "layer order",
        (*NORM_STAGES[:2], "attention", "router", "mlp"),
        simple.try_other_layer,
        FIX_MAPPING,
    ),
    Cause("rope base", ("attention",), attention.try_rope_base, FIX_CONFIG),
    Cause("rope scaling", ("attention",), attention.try_rope_scale, FIX_CONFIG),
    Cause("rope pairs", ("attention",), attention.try_rope_pairs, FIX_CONFIG),
    Cause("norm of queries and keys", ("attention",), attention.try_query_norm, FIX_CONFIG),
    Cause("attention scale", ("attention",), attention.try_attention_scale, FIX_CONFIG),
    Cause("attention mask", ("attention",), attention.try_window, FIX_CONFIG),
    Cause("order of heads", ("attention",), attention.try_head_order, FIX_MAPPING),
    Cause("projections", ("attention",), attention.try_projections, FIX_MAPPING),
    Cause(
        "quantised cache",
        ("attention",),
        attention.try_quantized_cache,
        (
            'remove generator.engine_args.kv_cache_dtype, or accept the difference: "auto" keeps '
            "keys and values as computed"
        ),
    ),
    Cause(
        "order of tokens",
        ("embedding",),
        simple.try_embedding_shift,
        "token ids are shifted between the two",
    ),
    Cause("scale of the embedding", ("embedding",), simple.try_embedding_scale, FIX_CONFIG),
    Cause(
        "temperature",
        ("head",),
        simple.try_temperature,
        "scores are asked for at another temperature than they are compared at",
    ),
    Cause(
        "tied output matrix", ("head",), simple.try_tied_head, "compare tie_word_embeddings of both"
    ),
    Cause("order of tokens", ("head",), simple.try_head_shift, "log-probs are read one token off"),
    *mixture.MIXTURE_CAUSES,
    Cause(
        "dtype",
        (*NORM_STAGES, *MATRIX_STAGES),
        simple.try_compute_dtype,
        "generator.dtype and learner.dtype say otherwise: set them alike",
    ),
    Cause("quantised weights", MATRIX_STAGES, simple.try_rounded_weights, FIX_QUANTISED),
    Cause("weight of the norm", NORM_STAGES, simple.try_norm_weight, FIX_STALE, is_fitted=True),
)


@torch.no_grad()
def explain_case(case: DivergentStage) -> list[Explanation]:
    """Return the explanations of a case, the best first; of equal ones, the first in the
    table comes first."""
    if case.stage == "choice":
        return explain_choice(case) or list(_explain_unknown(case))
    found = [(1, each) for each in _explain_stale(case)]
    for cause in CAUSES:
        if case.stage not in cause.stages:
            continue
        if any(not rank and not each.left for rank, each in found):
            break  # explained, to the rounding
        best: Explanation | None = None
        for change, evidence in cause.make_experiments(case):
            left = case.compute_remaining_error(change)
            share = 0.0 if left <= case.tolerance else left / case.max_error
            if share < (best.left if best else MAX_REMAINING_SHARE):
                best = Explanation(cause.name, evidence, cause.fix, share)
            if not share:
                break
        if best:
            found.append((2 if cause.is_fitted else 0, best))
    found.sort(key=lambda each: (each[1].left, each[0]))
    return [each for _, each in found] or list(_explain_unknown(case))


_STAGE_PATTERNS = (
    (r"(self_attn|self_attention)\.", "attention"),
    (r"input_layernorm", "input_norm"),
    (r"post_attention_layernorm", "post_norm"),
    (r"(mlp|block_sparse_moe)\.gate\.(?!.*bias)", "router"),
    (r"e_score_correction_bias", "choice"),
    (r"(mlp|block_sparse_moe)\.", "mlp"),
    (r"embed_tokens", "embedding"),
    (r"lm_head", "head"),
    (r"model\.norm\.", "final_norm"),
)


def locate_tensor(tensor: str) -> tuple[int, str]:
    """Return the layer and stage of a checkpoint tensor; the layer is -1 outside the layers."""
    layer = re.search(r"layers\.(\d+)\.", tensor)
    stage = next(
        (stage for pattern, stage in _STAGE_PATTERNS if re.search(pattern, tensor)), "weights"
    )
    return (int(layer[1]) if layer else -1), stage


def _explain_stale(case: DivergentStage) -> Iterator[Explanation]:
    names = [
        name
        for name in case.outputs.stale_tensors
        if locate_tensor(name) == (case.layer, case.stage)
    ]
    if case.stage == "head" and case.reference.is_tied:
        names += [
            name for name in case.outputs.stale_tensors if locate_tensor(name)[1] == "embedding"
        ]
    if names:
        evidence = (
            f"of {', '.join(names[:3])} the {case.outputs.name} does not hold what it was given"
        )
        yield Explanation("stale tensor", evidence, FIX_STALE, 0.0)


def _explain_unknown(case: DivergentStage) -> Iterator[Explanation]:
    """Describe a case that nothing explains."""
    bad = case.token_errors > case.tolerance
    first = int(bad.nonzero()[0])
    evidence = f"{int(bad.sum())} of {len(bad)} tokens differ, the first at {first}"
    if case.stage == "mlp" and case.expert_ids is not None and (blamed := _find_bad_experts(case)):
        experts = f"expert{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed[:8]))}"
        yield Explanation(
            "other weights", f"{evidence}; those of {experts}, and no others", FIX_STALE, 1.0
        )
    else:
        yield Explanation("other weights or another kernel", evidence, FIX_STALE, 1.0)


def _find_bad_experts(case: DivergentStage) -> list[int]:
    """Return the experts all of whose tokens differ, if their tokens are all that differ;
    else an empty list."""
    assert case.expert_ids is not None
    bad = case.token_errors > case.tolerance
    blamed = [
        e
        for e in case.expert_ids.unique().tolist()
        if bool(bad[(case.expert_ids == e).any(1)].all())
    ]
    covered = torch.isin(case.expert_ids, torch.tensor(blamed)).any(1)
    return blamed if blamed and bool((covered == bad).all()) else []
