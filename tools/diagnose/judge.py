"""Which stages of a witness part from the files by more than rounding explains; and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from .reference import MODEL_STAGES, ReferenceModel, StageTrial

ROUNDING_FACTOR = 4.0
"""So many times the difference that the witness's dtype alone makes is rounding too: kernels add up in another order."""
MIN_TOLERANCE = 1e-4
"""Relative, of one token: what float32 explains, with its own order of summation. In nats for log-probs."""
MAX_FLIPPED_SHARE = 0.1
"""Share of tokens whose experts may be others below float32: near ties."""


@dataclass(frozen=True)
class StageOutputs:
    """What one program computed of `token_ids` int64 `[T]`: `tensors` by stage (`activations.ActivationRecorder`), `logprobs`
    float32 `[T - 1]` of the tokens after the first, at temperature 1. `dtype` that it computes in; `expected_dtype` what its
    settings say. `stale_tensors`: tensors that it does not hold as it was given them."""

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
    """The last tokens of a witness's text, which it sampled itself at `temperature`, and `logprobs` float32 `[n]` their
    log-probs. `stale_cached`: positions that it took from a prefix cache of older weights. `routes` int64
    `[T - 1, MoE layers, K]` that came with them."""

    logprobs: Tensor
    temperature: float
    stale_cached: int = 0
    routes: Tensor | None = None


class Explanation(msgspec.Struct, frozen=True):
    """`left`: what remains of the difference if `cause` holds, relative to what there was."""

    cause: str
    evidence: str
    fix: str
    left: float


class Divergence(msgspec.Struct, frozen=True):
    """A stage that computes otherwise than the files, in `layers` (-1: it is of none). `error` of the worst token of the first of
    them: relative, or in nats; `tolerance` is what rounding explains. The likeliest explanation is the first."""

    witness: str
    stage: str
    layers: list[int]
    error: float
    tolerance: float
    tokens: float
    """Share of the tokens that differ."""
    unit: str = "relative"
    explanations: list[Explanation] = []

    @property
    def location(self) -> str:
        if not self.layers or self.layers[0] < 0:
            return self.stage
        some = ", ".join(map(str, self.layers[:6])) + (", …" if len(self.layers) > 6 else "")
        return f"{self.stage} of layer{'s' * (len(self.layers) > 1)} {some}"


@dataclass
class DivergentStage:
    """A stage of a layer that parts: `output` is what the witness gave, `expected` the files; see `StageTrial` for what
    went in."""

    reference: ReferenceModel
    outputs: StageOutputs
    layer: int
    stage: str
    input: Tensor
    output: Tensor
    expected: Tensor
    tolerance: float
    expert_ids: Tensor | None = None
    gates: Tensor | None = None
    token_errors: Tensor = field(default_factory=lambda: torch.zeros(0))
    token_ids: Tensor | None = None
    """Where they are not the witness's."""

    @property
    def max_error(self) -> float:
        return float(self.token_errors.max())

    def make_trial(self) -> StageTrial:
        trial = _make_trial(
            self.reference, self.outputs, self.layer, self.stage, self.input, self.expert_ids, self.gates
        )
        if self.token_ids is not None:
            trial.token_ids = self.token_ids
        return trial

    def compute_remaining_error(self, change: Callable[[StageTrial], object]) -> float:
        """The error that is left if the stage is changed so; infinite if it cannot be."""
        trial = self.make_trial()
        try:
            change(trial)
            result = trial.compute_output()
        except (RuntimeError, AttributeError, LookupError, TypeError, ValueError):  # this model has no such thing
            return float("inf")
        return float(measure_errors(result, self.output, self.stage).max())


def measure_errors(expected: Tensor, output: Tensor, stage: str) -> Tensor:
    """float32 `[T]`: of each token. Relative to its expected length, or to a tenth of the usual one if that is more; of log-probs
    the difference in nats. What is not a number differs infinitely."""
    if expected.shape != output.shape:
        return torch.full((len(output),), torch.inf)
    if stage in LOGPROB_STAGES:
        out = (output - expected).abs()
    else:
        lengths = expected.norm(dim=-1)
        out = (output - expected).norm(dim=-1) / lengths.clamp(min=max(float(lengths.mean()) / 10, 1e-30))
    return torch.where(out.isfinite(), out, torch.inf)


ERROR_UNITS = {"head": "nats", "choice": "of a score"}
LOGPROB_STAGES = ("head", "sampling")


def _make_trial(
    reference: ReferenceModel,
    outputs: StageOutputs,
    layer: int,
    stage: str,
    input: Tensor,
    expert_ids: Tensor | None,
    gates: Tensor | None,
) -> StageTrial:
    trial = reference.make_trial(layer, stage, input, outputs.token_ids, expert_ids)
    if gates is not None:
        trial.change_gates = lambda _: gates
    return trial


def find_divergent_stages(reference: ReferenceModel, outputs: StageOutputs) -> Iterator[DivergentStage]:
    """The stages that part, in the order in which they are computed."""
    seen, before, case = outputs.tensors, None, None
    if (case := _compare_stage(reference, outputs, -1, "embedding", outputs.token_ids, "embedding.out")) is not None:
        yield case
    stream = seen.get("embedding.out")
    for layer in range(reference.layers):
        gates: Tensor | None = None
        for stage in ("input_norm", "attention", "post_norm", "router", "choice", "mlp"):
            name = f"{layer}.{stage}"
            if stage.endswith("norm") and (case := _compare_residual(reference, outputs, layer, stage, stream, before)):
                yield case
            if stage == "choice":
                case = _compare_choice(reference, outputs, layer)
            else:
                inputs = seen.get(f"{layer}.mlp.in" if stage == "router" else f"{name}.in")
                given = gates if stage == "mlp" else None
                case = (
                    None
                    if inputs is None
                    else _compare_stage(reference, outputs, layer, stage, inputs, f"{name}.out", given)
                )
            if stage == "router" and case is not None:
                gates = seen.get(f"{layer}.gates.out")  # what follows from its scores is no further fault
            if case is not None:
                yield case
            if stage.endswith("norm"):
                stream = seen.get(f"{name}.in")
            elif stage in ("attention", "mlp"):
                before = seen.get(f"{name}.out")
    if case := _compare_residual(reference, outputs, -1, "final_norm", stream, before):
        yield case
    if "final_norm.in" in seen:
        case = _compare_stage(reference, outputs, -1, "final_norm", seen["final_norm.in"], "final_norm.out")
        if case is not None:
            yield case
        if (case := _compare_stage(reference, outputs, -1, "head", seen["final_norm.out"], "")) is not None:
            yield case


def _compare_stage(
    reference: ReferenceModel,
    outputs: StageOutputs,
    layer: int,
    stage: str,
    input: Tensor,
    name: str,
    gates: Tensor | None = None,
) -> DivergentStage | None:
    y = outputs.tensors.get(name) if name else outputs.logprobs
    has_router = layer in reference.moe_layers
    if y is None or (stage == "router" and not has_router):
        return None
    ids = outputs.tensors.get(f"{layer}.choice.out") if stage == "mlp" and has_router else None

    def result(dtype: str) -> Tensor:
        trial = _make_trial(reference, outputs, layer, stage, input, ids, gates)
        trial.dtype = getattr(torch, dtype)
        return trial.compute_output()

    expected = result("float32")
    tolerance = MIN_TOLERANCE
    if outputs.dtype != "float32":
        tolerance += ROUNDING_FACTOR * float(measure_errors(expected, result(outputs.dtype), stage).max())
    case = DivergentStage(
        reference, outputs, layer, stage, input, y, expected, tolerance, ids, gates, measure_errors(expected, y, stage)
    )
    return case if case.max_error > tolerance else None


def _compare_residual(
    reference: ReferenceModel,
    outputs: StageOutputs,
    layer: int,
    stage: str,
    stream: Tensor | None,
    added: Tensor | None,
) -> DivergentStage | None:
    """Whether what goes into a norm is the stream before it, with what the stage before it gave."""
    name = f"{layer}.{stage}.in" if layer >= 0 else f"{stage}.in"
    y = outputs.tensors.get(name)
    if y is None or stream is None:
        return None
    expected = stream if added is None else stream + added
    dtype = getattr(torch, outputs.dtype)
    tolerance = MIN_TOLERANCE + ROUNDING_FACTOR * torch.finfo(dtype).eps * (dtype != torch.float32)
    found = measure_errors(expected, y, "residual")
    case = DivergentStage(reference, outputs, layer, "residual", stream, y, expected, tolerance, token_errors=found)
    return case if case.max_error > tolerance else None


def _compare_choice(reference: ReferenceModel, outputs: StageOutputs, layer: int) -> DivergentStage | None:
    """Whether the experts that were chosen are the best by what the files choose by, near ties apart."""
    x, ids = outputs.tensors.get(f"{layer}.mlp.in"), outputs.tensors.get(f"{layer}.choice.out")
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
    return DivergentStage(reference, outputs, layer, "choice", x, ids, best, tolerance, ids, token_errors=missing)


def merge_cases(
    cases: Sequence[DivergentStage], explain: Callable[[DivergentStage], list[Explanation]]
) -> list[Divergence]:
    """Cases of the same stage as one, in the order of the first of each, which is the one that is explained."""
    by_stage: dict[str, list[DivergentStage]] = {}
    for case in cases:
        by_stage.setdefault(case.stage, []).append(case)
    return [
        Divergence(
            witness=first.outputs.name,
            stage=stage,
            layers=[c.layer for c in some] if stage not in MODEL_STAGES and first.layer >= 0 else [-1],
            error=first.max_error,
            tolerance=first.tolerance,
            tokens=float((first.token_errors > first.tolerance).float().mean()),
            unit=ERROR_UNITS.get(stage, "relative"),
            explanations=explain(first),
        )
        for stage, some in by_stage.items()
        for first in some[:1]
    ]
