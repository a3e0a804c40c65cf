"""Find the stages of a witness that diverge from the files by more than rounding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from .reference import MODEL_STAGES, ReferenceModel, StageInput

ROUNDING_FACTOR = 4.0
"""Factor on the difference that the witness's dtype alone causes, below which it is rounding.

Kernels sum in another order.
"""
MIN_TOLERANCE = 1e-4
"""Relative difference of a token that float32 explains with a different order of summation; in
nats for log-probs."""
MAX_FLIPPED_SHARE = 0.1
"""Share of tokens whose experts may differ below float32, because of near ties."""


@dataclass(frozen=True)
class StageOutputs:
    """Everything that one program computed of `token_ids` int64 `[T]`.

    Attributes:
        tensors: Tensors by stage (`activations.ActivationRecorder`).
        logprobs: float32 `[T - 1]`, the log-probs of the tokens after the first, at temperature 1.
        dtype: The dtype that it computes in.
        expected_dtype: The dtype in its settings.
        stale_tensors: Tensors that it does not hold as they were given to it.
    """

    name: str
    token_ids: Tensor
    tensors: dict[str, Tensor]
    logprobs: Tensor
    dtype: str
    expected_dtype: str
    stale_tensors: Sequence[str] = ()
    sampled: SampledTokens | None = None


@dataclass(frozen=True)
class SampledTokens:
    """The last tokens of a witness's text, which it sampled itself at `temperature`.

    Attributes:
        logprobs: float32 `[n]`, the log-probs of these tokens.
        stale_cached: Number of positions that it took from a prefix cache of older weights.
        routes: int64 `[T - 1, MoE layers, K]`, returned with the tokens.
    """

    logprobs: Tensor
    temperature: float
    stale_cached: int = 0
    routes: Tensor | None = None


class Divergence(msgspec.Struct, frozen=True):
    """A stage that computes differently from the files.

    Attributes:
        layers: The layers concerned; -1 for a stage outside the layers.
        compared: What was compared with what.
        error: Error of the worst token of the first layer: relative, or in nats; 0 if the
            comparison is of equality.
        tolerance: The error that rounding explains.
        tokens: Share of the tokens that differ.
        evidence: Facts that narrow it down: tensors, tokens, experts.
        hint: What to look at, or to do.
    """

    witness: str
    stage: str
    layers: list[int]
    compared: str
    error: float = 0.0
    tolerance: float = 0.0
    tokens: float = 1.0
    unit: str = "relative"
    evidence: str = ""
    hint: str = ""

    @property
    def location(self) -> str:
        if not self.layers or self.layers[0] < 0:
            return self.stage
        some = ", ".join(map(str, self.layers[:6])) + (", …" if len(self.layers) > 6 else "")
        return f"{self.stage} of layer{'s' if len(self.layers) > 1 else ''} {some}"


@dataclass(frozen=True)
class DivergentStage:
    """A stage of one layer that diverges.

    Attributes:
        token_errors: Error of each token, float32 `[T]`.
        expert_ids: int64 `[T, K]`, the experts that the witness chose, for a mixture.
    """

    layer: int
    stage: str
    token_errors: Tensor
    tolerance: float
    expert_ids: Tensor | None = None

    @property
    def is_divergent(self) -> bool:
        return bool(self.differing_tokens.any())

    @property
    def differing_tokens(self) -> Tensor:
        return self.token_errors > self.tolerance


def measure_errors(expected: Tensor, output: Tensor, stage: str) -> Tensor:
    """Return the error of each token, as float32 `[T]`.

    It is relative to the token's expected norm, or to a tenth of the mean norm if that is larger.
    For log-probs it is the difference in nats. A value that is not finite has an infinite error.
    """
    if expected.shape != output.shape:
        return torch.full((len(output),), torch.inf)
    if stage in LOGPROB_STAGES:
        out = (output - expected).abs()
    else:
        lengths = expected.norm(dim=-1)
        out = (output - expected).norm(dim=-1) / lengths.clamp(
            min=max(float(lengths.mean()) / 10, 1e-30)
        )
    return torch.where(out.isfinite(), out, torch.inf)


ERROR_UNITS = {"head": "nats", "choice": "of a score"}
LOGPROB_STAGES = ("head", "sampling")


def find_divergent_stages(
    reference: ReferenceModel, outputs: StageOutputs
) -> Iterator[DivergentStage]:
    """Yield the divergent stages in the order in which they are computed."""
    for case in _compare_stages(reference, outputs):
        if case is not None and case.is_divergent:
            yield case


def _compare_stages(
    reference: ReferenceModel, outputs: StageOutputs
) -> Iterator[DivergentStage | None]:
    seen = outputs.tensors
    yield _compare_stage(reference, outputs, -1, "embedding", outputs.token_ids, "embedding.out")
    stream = seen.get("embedding.out")
    before = None
    for layer in range(reference.layers):
        gates: Tensor | None = None
        for stage in ("input_norm", "attention", "post_norm", "router", "choice", "mlp"):
            name = f"{layer}.{stage}"
            if stage == "choice":
                yield _compare_choice(reference, outputs, layer)
                continue
            if stage.endswith("norm"):
                yield _compare_residual(outputs, layer, stage, stream, before)
                stream = seen.get(f"{name}.in")
            inputs = seen.get(f"{layer}.mlp.in" if stage == "router" else f"{name}.in")
            given = gates if stage == "mlp" else None
            case = _compare_stage(reference, outputs, layer, stage, inputs, f"{name}.out", given)
            if stage == "router" and case is not None and case.is_divergent:
                # Effects of its scores are not a further fault.
                gates = seen.get(f"{layer}.gates.out")
            yield case
            if stage in ("attention", "mlp"):
                before = seen.get(f"{name}.out")
    yield _compare_residual(outputs, -1, "final_norm", stream, before)
    final = seen.get("final_norm.in")
    yield _compare_stage(reference, outputs, -1, "final_norm", final, "final_norm.out")
    yield _compare_stage(reference, outputs, -1, "head", seen.get("final_norm.out"), "")


def _compare_stage(
    reference: ReferenceModel,
    outputs: StageOutputs,
    layer: int,
    stage: str,
    input: Tensor | None,
    name: str,
    gates: Tensor | None = None,
) -> DivergentStage | None:
    y = outputs.tensors.get(name) if name else outputs.logprobs
    has_router = layer in reference.moe_layers
    if input is None or y is None or (stage == "router" and not has_router):
        return None
    ids = outputs.tensors.get(f"{layer}.choice.out") if stage == "mlp" and has_router else None
    given = StageInput(layer, stage, input, outputs.token_ids, ids, gates)
    expected = reference.compute_stage(given)
    tolerance = MIN_TOLERANCE
    if outputs.dtype != "float32":
        rounded = reference.compute_stage(given, getattr(torch, outputs.dtype))
        tolerance += ROUNDING_FACTOR * float(measure_errors(expected, rounded, stage).max())
    return DivergentStage(layer, stage, measure_errors(expected, y, stage), tolerance, ids)


def _compare_residual(
    outputs: StageOutputs, layer: int, stage: str, stream: Tensor | None, added: Tensor | None
) -> DivergentStage | None:
    """Check that the input of a norm is the residual stream before it plus the output of the
    stage before it."""
    name = f"{layer}.{stage}.in" if layer >= 0 else f"{stage}.in"
    y = outputs.tensors.get(name)
    if y is None or stream is None:
        return None
    expected = stream if added is None else stream + added
    dtype = getattr(torch, outputs.dtype)
    tolerance = MIN_TOLERANCE + ROUNDING_FACTOR * torch.finfo(dtype).eps * (dtype != torch.float32)
    return DivergentStage(layer, "residual", measure_errors(expected, y, "residual"), tolerance)


def _compare_choice(
    reference: ReferenceModel, outputs: StageOutputs, layer: int
) -> DivergentStage | None:
    """Check that the chosen experts are the best by the scores of the files,
    except for near ties."""
    x = outputs.tensors.get(f"{layer}.mlp.in")
    ids = outputs.tensors.get(f"{layer}.choice.out")
    if x is None or ids is None:
        return None
    scores, best = reference.choose_experts(layer, x, torch.float32)
    exact = outputs.dtype == "float32"
    tolerance = MIN_TOLERANCE
    if not exact:
        rounded, _ = reference.choose_experts(layer, x, getattr(torch, outputs.dtype))
        both = scores.isfinite() & rounded.isfinite()
        tolerance += ROUNDING_FACTOR * float((rounded - scores)[both].abs().max())
    if ids.shape != best.shape:
        missing = torch.full((len(x),), torch.inf)
    else:
        worst = scores.gather(1, best).min(dim=1).values
        missing = worst - scores.gather(1, ids).min(dim=1).values
    flipped = float((missing > tolerance).float().mean())
    if flipped <= (0.0 if exact else MAX_FLIPPED_SHARE):
        return None
    return DivergentStage(layer, "choice", missing, tolerance, ids)


_OWN_INPUT = "the output for its own input, with what the files compute of the same input"
_COMPARISONS = {
    "residual": "the input of a norm, with the residual stream before it plus what was added",
    "choice": "the chosen experts, with the best by the router's scores from the files",
    "head": (
        "the log-probs, with those that the files' output matrix computes of its hidden states"
    ),
}

_CONFIG_HINT = "config.json and generator.engine_args.hf_overrides"
_NAMES_HINT = "the names and the order of tensors where the checkpoint is loaded"
_NORM_HINT = f"epsilon and form of the norm in {_CONFIG_HINT}; {_NAMES_HINT}"
_HINTS = {
    "embedding": "a scale of embeddings in config.json; token ids that are shifted",
    "input_norm": _NORM_HINT,
    "post_norm": _NORM_HINT,
    "final_norm": _NORM_HINT,
    "attention": (
        "generator.engine_args.kv_cache_dtype; rope, window, scale and norms of queries and keys "
        f"in {_CONFIG_HINT}; {_NAMES_HINT}"
    ),
    "router": f"rows of the router that are permuted; {_NAMES_HINT}",
    "choice": "n_group, topk_group and e_score_correction_bias of both; routes of other layers",
    "mlp": (
        "quantisation; the form of the gates, shared experts and activation in "
        f"{_CONFIG_HINT}; {_NAMES_HINT}"
    ),
    "head": "the temperature of log-probs; tie_word_embeddings; logit scale or soft cap",
}
"""What to look at where a stage diverges and no tensor of it is stale."""

STALE_HINT = (
    "weights did not arrive as they were published: restart that engine, see "
    "weights.probe_every, and compare the names that it loads by"
)


def merge_cases(cases: Sequence[DivergentStage], outputs: StageOutputs) -> list[Divergence]:
    """Merge the cases of each stage into one, ordered by the first case of each, which is the one
    that is described."""
    by_stage: dict[str, list[DivergentStage]] = {}
    for case in cases:
        by_stage.setdefault(case.stage, []).append(case)
    return [_describe_stage(some, outputs) for some in by_stage.values()]


def _describe_stage(cases: Sequence[DivergentStage], outputs: StageOutputs) -> Divergence:
    first = cases[0]
    bad = first.differing_tokens
    evidence = f"{int(bad.sum())} of {len(bad)} tokens differ, the first at {int(bad.nonzero()[0])}"
    blamed = _find_bad_experts(first)
    if blamed:
        evidence += f"; those of experts {', '.join(map(str, blamed[:8]))}, and no others"
    hint = _HINTS.get(first.stage, "")
    stale = [
        name for name in outputs.stale_tensors if locate_tensor(name) == (first.layer, first.stage)
    ]
    if stale:
        evidence += f"; not held as they were given: {', '.join(stale[:3])}"
        hint = STALE_HINT
    return Divergence(
        witness=outputs.name,
        stage=first.stage,
        layers=[-1] if first.stage in MODEL_STAGES else [case.layer for case in cases],
        compared=_COMPARISONS.get(first.stage, _OWN_INPUT),
        error=float(first.token_errors.max()),
        tolerance=first.tolerance,
        tokens=float(bad.float().mean()),
        unit=ERROR_UNITS.get(first.stage, "relative"),
        evidence=evidence,
        hint=hint,
    )


def _find_bad_experts(case: DivergentStage) -> list[int]:
    """Return the experts of a mixture all of whose tokens differ, if their tokens are all that
    differ, and others do not; else an empty list."""
    bad = case.differing_tokens
    if case.stage != "mlp" or case.expert_ids is None or bool(bad.all()):
        return []
    blamed = [
        e
        for e in case.expert_ids.unique().tolist()
        if bool(bad[(case.expert_ids == e).any(1)].all())
    ]
    covered = torch.isin(case.expert_ids, torch.tensor(blamed)).any(1)
    return blamed if blamed and bool((covered == bad).all()) else []


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
