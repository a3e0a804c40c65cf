"""Find the stages of a witness that diverge from the files by more than rounding, and
their explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from .reference import MODEL_STAGES, ReferenceModel, StageTrial

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


class Explanation(msgspec.Struct, frozen=True):
    """A possible explanation of a divergence.

    Attributes:
        left: The remaining share of the difference if `cause` holds.
    """

    cause: str
    evidence: str
    fix: str
    left: float


class Divergence(msgspec.Struct, frozen=True):
    """A stage that computes differently from the files.

    Attributes:
        layers: The layers concerned; -1 for a stage outside the layers.
        error: Error of the worst token of the first of them: relative, or in nats.
        tolerance: The error that rounding explains.
        explanations: Possible explanations, the likeliest first.
    """

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
        return f"{self.stage} of layer{'s' if len(self.layers) > 1 else ''} {some}"


@dataclass
class DivergentStage:
    """A stage of a layer that diverges; see `StageTrial` for its inputs.

    Attributes:
        output: The output of the witness.
        expected: The output of the files.
    """

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
    """Token ids, if they are not the witness's."""

    @property
    def max_error(self) -> float:
        return float(self.token_errors.max())

    def make_trial(self) -> StageTrial:
        trial = _make_trial(
            self.reference,
            self.outputs,
            self.layer,
            self.stage,
            self.input,
            self.expert_ids,
            self.gates,
        )
        if self.token_ids is not None:
            trial.token_ids = self.token_ids
        return trial

    def compute_remaining_error(self, change: Callable[[StageTrial], object]) -> float:
        """Return the error that remains after `change`; infinite if the stage cannot be
        changed this way."""
        trial = self.make_trial()
        try:
            change(trial)
            result = trial.compute_output()
        except (RuntimeError, AttributeError, LookupError, TypeError, ValueError):
            # This model has no such thing.
            return float("inf")
        return float(measure_errors(result, self.output, self.stage).max())


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


def find_divergent_stages(
    reference: ReferenceModel, outputs: StageOutputs
) -> Iterator[DivergentStage]:
    """Yield the divergent stages in the order in which they are computed."""
    seen = outputs.tensors
    before = None
    case = None
    case = _compare_stage(reference, outputs, -1, "embedding", outputs.token_ids, "embedding.out")
    if case is not None:
        yield case
    stream = seen.get("embedding.out")
    for layer in range(reference.layers):
        gates: Tensor | None = None
        for stage in ("input_norm", "attention", "post_norm", "router", "choice", "mlp"):
            name = f"{layer}.{stage}"
            if stage.endswith("norm"):
                case = _compare_residual(reference, outputs, layer, stage, stream, before)
                if case:
                    yield case
            if stage == "choice":
                case = _compare_choice(reference, outputs, layer)
            else:
                inputs = seen.get(f"{layer}.mlp.in" if stage == "router" else f"{name}.in")
                given = gates if stage == "mlp" else None
                case = (
                    None
                    if inputs is None
                    else _compare_stage(
                        reference, outputs, layer, stage, inputs, f"{name}.out", given
                    )
                )
            if stage == "router" and case is not None:
                # Effects of its scores are not a further fault.
                gates = seen.get(f"{layer}.gates.out")
            if case is not None:
                yield case
            if stage.endswith("norm"):
                stream = seen.get(f"{name}.in")
            elif stage in ("attention", "mlp"):
                before = seen.get(f"{name}.out")
    case = _compare_residual(reference, outputs, -1, "final_norm", stream, before)
    if case:
        yield case
    if "final_norm.in" in seen:
        case = _compare_stage(
            reference, outputs, -1, "final_norm", seen["final_norm.in"], "final_norm.out"
        )
        if case is not None:
            yield case
        case = _compare_stage(reference, outputs, -1, "head", seen["final_norm.out"], "")
        if case is not None:
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
        tolerance += ROUNDING_FACTOR * float(
            measure_errors(expected, result(outputs.dtype), stage).max()
        )
    case = DivergentStage(
        reference,
        outputs,
        layer,
        stage,
        input,
        y,
        expected,
        tolerance,
        ids,
        gates,
        measure_errors(expected, y, stage),
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
    """Check that the input of a norm is the residual stream before it plus the output of the
    stage before it."""
    name = f"{layer}.{stage}.in" if layer >= 0 else f"{stage}.in"
    y = outputs.tensors.get(name)
    if y is None or stream is None:
        return None
    expected = stream if added is None else stream + added
    dtype = getattr(torch, outputs.dtype)
    tolerance = MIN_TOLERANCE + ROUNDING_FACTOR * torch.finfo(dtype).eps * (dtype != torch.float32)
    found = measure_errors(expected, y, "residual")
    case = DivergentStage(
        reference, outputs, layer, "residual", stream, y, expected, tolerance, token_errors=found
    )
    return case if case.max_error > tolerance else None


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
    return DivergentStage(
        reference, outputs, layer, "choice", x, ids, best, tolerance, ids, token_errors=missing
    )


def merge_cases(
    cases: Sequence[DivergentStage], explain: Callable[[DivergentStage], list[Explanation]]
) -> list[Divergence]:
    """Merge the cases of each stage into one, ordered by the first case of each, which is the one
    that is explained."""
    by_stage: dict[str, list[DivergentStage]] = {}
    for case in cases:
        by_stage.setdefault(case.stage, []).append(case)
    return [
        Divergence(
            witness=first.outputs.name,
            stage=stage,
            layers=[c.layer for c in some]
            if stage not in MODEL_STAGES and first.layer >= 0
            else [-1],
            error=first.max_error,
            tolerance=first.tolerance,
            tokens=float((first.token_errors > first.tolerance).float().mean()),
            unit=ERROR_UNITS.get(stage, "relative"),
            explanations=explain(first),
        )
        for stage, some in by_stage.items()
        for first in some[:1]
    ]
