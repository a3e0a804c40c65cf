"""Why a stage parts: the table of causes. Each is an experiment that changes the stage of the files, and explains what a witness
gave, or not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from r3async.tools.diagnose import attention, mixture, simple
from r3async.tools.diagnose.choice import explain_choice
from r3async.tools.diagnose.experiments import FIX_CONFIG, FIX_MAPPING, FIX_QUANTISED, FIX_STALE, Cause
from r3async.tools.diagnose.judge import Case, Explanation

NORMS = ("input_norm", "post_norm", "final_norm")
MATRICES = ("embedding", "attention", "router", "mlp", "head")
EXPLAINED = 0.3
"""An experiment that leaves more of the difference explains nothing."""

CAUSES = (
    Cause("norm epsilon", NORMS, simple.epsilon, FIX_CONFIG),
    Cause("form of the norm", NORMS, simple.norm_form, FIX_CONFIG),
    Cause("weight of the norm", NORMS, simple.other_norm, FIX_MAPPING),
    Cause("layer order", (*NORMS[:2], "attention", "router", "mlp"), simple.other_layer, FIX_MAPPING),
    Cause("rope base", ("attention",), attention.rope_base, FIX_CONFIG),
    Cause("rope scaling", ("attention",), attention.rope_scale, FIX_CONFIG),
    Cause("rope pairs", ("attention",), attention.rope_pairs, FIX_CONFIG),
    Cause("norm of queries and keys", ("attention",), attention.query_norm, FIX_CONFIG),
    Cause("attention scale", ("attention",), attention.attention_scale, FIX_CONFIG),
    Cause("attention mask", ("attention",), attention.window, FIX_CONFIG),
    Cause("order of heads", ("attention",), attention.head_order, FIX_MAPPING),
    Cause("projections", ("attention",), attention.projections, FIX_MAPPING),
    Cause(
        "quantised cache",
        ("attention",),
        attention.cache,
        'remove generator.engine_args.kv_cache_dtype, or accept the difference: "auto" keeps keys and values as computed',
    ),
    Cause("order of tokens", ("embedding",), simple.embedding_shift, "token ids are shifted between the two"),
    Cause("scale of the embedding", ("embedding",), simple.embedding_scale, FIX_CONFIG),
    Cause(
        "temperature",
        ("head",),
        simple.temperature,
        "scores are asked for at another temperature than they are compared at",
    ),
    Cause("tied output matrix", ("head",), simple.head_tied, "compare tie_word_embeddings of both"),
    Cause("order of tokens", ("head",), simple.head_shift, "log-probs are read one token off"),
    *mixture.CAUSES,
    Cause(
        "dtype", (*NORMS, *MATRICES), simple.computed, "generator.dtype and learner.dtype say otherwise: set them alike"
    ),
    Cause("quantised weights", MATRICES, simple.rounded, FIX_QUANTISED),
    Cause("weight of the norm", NORMS, simple.norm_weight, FIX_STALE, fitted=True),
)


@torch.no_grad()
def explain(case: Case) -> list[Explanation]:
    """What explains a case, the best first; of equals the one that comes first in the table."""
    if case.stage == "choice":
        return explain_choice(case) or list(_unknown(case))
    found = [(1, each) for each in _stale(case)]
    for cause in CAUSES:
        if case.stage not in cause.stages:
            continue
        if any(not rank and not each.left for rank, each in found):
            break  # explained, to the rounding
        best: Explanation | None = None
        for change, evidence in cause.experiments(case):
            left = case.left(change)
            share = 0.0 if left <= case.tolerance else left / case.error
            if share < (best.left if best else EXPLAINED):
                best = Explanation(cause.name, evidence, cause.fix, share)
            if not share:
                break
        if best:
            found.append((2 if cause.fitted else 0, best))
    found.sort(key=lambda each: (each[1].left, each[0]))
    return [each for _, each in found] or list(_unknown(case))


_STAGE_OF = (
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


def place_of(tensor: str) -> tuple[int, str]:
    """Layer and stage of a tensor of a checkpoint."""
    layer = re.search(r"layers\.(\d+)\.", tensor)
    stage = next((stage for pattern, stage in _STAGE_OF if re.search(pattern, tensor)), "weights")
    return (int(layer[1]) if layer else -1), stage


def _stale(case: Case) -> Iterator[Explanation]:
    names = [name for name in case.witness.stale if place_of(name) == (case.layer, case.stage)]
    if case.stage == "head" and case.reference.tied:
        names += [name for name in case.witness.stale if place_of(name)[1] == "embedding"]
    if names:
        evidence = f"of {', '.join(names[:3])} the {case.witness.name} does not hold what it was given"
        yield Explanation("stale tensor", evidence, FIX_STALE, 0.0)


def _unknown(case: Case) -> Iterator[Explanation]:
    """What can be said where nothing explains it."""
    bad = case.errors > case.tolerance
    first = int(bad.nonzero()[0])
    evidence = f"{int(bad.sum())} of {len(bad)} tokens differ, the first at {first}"
    if case.stage == "mlp" and case.ids is not None and (blamed := _blamed(case)):
        experts = f"expert{'s' * (len(blamed) > 1)} {', '.join(map(str, blamed[:8]))}"
        yield Explanation("other weights", f"{evidence}; those of {experts}, and no others", FIX_STALE, 1.0)
    else:
        yield Explanation("other weights or another kernel", evidence, FIX_STALE, 1.0)


def _blamed(case: Case) -> list[int]:
    """Experts all of whose tokens differ, if those are all that do."""
    assert case.ids is not None
    bad = case.errors > case.tolerance
    blamed = [e for e in case.ids.unique().tolist() if bool(bad[(case.ids == e).any(1)].all())]
    covered = torch.isin(case.ids, torch.tensor(blamed)).any(1)
    return blamed if blamed and bool((covered == bad).all()) else []
