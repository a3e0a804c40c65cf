"""Which stages of a witness part from the files by more than rounding explains; and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from r3async.tools.diagnose.reference import OUTSIDE, Reference, Trial

ROUNDINGS = 4.0
"""So many times the difference that the witness's dtype alone makes is rounding too: kernels add up in another order."""
FLOOR = 1e-4
"""Relative, of one token: what float32 explains, with its own order of summation. In nats for log-probs."""
FLIPPED = 0.1
"""Share of tokens whose experts may be others below float32: near ties."""


@dataclass(frozen=True)
class Witness:
    """What one program computed of `token_ids` int64 `[T]`: `seen` by stage (`stages.Stages`), `logprobs` float32 `[T - 1]` of
    the tokens after the first, at temperature 1. `dtype` that it computes in; `expected` what its settings say. `stale`: tensors
    that it does not hold as it was given them."""

    name: str
    token_ids: Tensor
    seen: dict[str, Tensor]
    logprobs: Tensor
    dtype: str
    expected: str
    stale: Sequence[str] = ()
    sampled: Sampled | None = None


@dataclass(frozen=True)
class Sampled:
    """The last tokens of a witness's text, which it sampled itself at `temperature`, and `reported` float32 `[n]` their
    log-probs. `cached`: positions that it took from a prefix cache of older weights. `routes` int64 `[T - 1, MoE layers, K]` that
    came with them."""

    reported: Tensor
    temperature: float
    cached: int = 0
    routes: Tensor | None = None


class Explanation(msgspec.Struct, frozen=True):
    """`left`: what remains of the difference if `cause` holds, relative to what there was."""

    cause: str
    evidence: str
    fix: str
    left: float


class Parting(msgspec.Struct, frozen=True):
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
    def where(self) -> str:
        if not self.layers or self.layers[0] < 0:
            return self.stage
        some = ", ".join(map(str, self.layers[:6])) + (", …" if len(self.layers) > 6 else "")
        return f"{self.stage} of layer{'s' * (len(self.layers) > 1)} {some}"


@dataclass
class Case:
    """A stage of a layer that parts: `y` is what the witness gave, `expected` the files; see `Trial` for what went in."""

    reference: Reference
    witness: Witness
    layer: int
    stage: str
    x: Tensor
    y: Tensor
    expected: Tensor
    tolerance: float
    ids: Tensor | None = None
    gates: Tensor | None = None
    errors: Tensor = field(default_factory=lambda: torch.zeros(0))
    token_ids: Tensor | None = None
    """Where they are not the witness's."""

    @property
    def error(self) -> float:
        return float(self.errors.max())

    def trial(self) -> Trial:
        trial = _trial(self.reference, self.witness, self.layer, self.stage, self.x, self.ids, self.gates)
        if self.token_ids is not None:
            trial.token_ids = self.token_ids
        return trial

    def left(self, change: Callable[[Trial], object]) -> float:
        """The error that is left if the stage is changed so; infinite if it cannot be."""
        trial = self.trial()
        try:
            change(trial)
            result = trial.result()
        except (RuntimeError, AttributeError, LookupError, TypeError, ValueError):  # this model has no such thing
            return float("inf")
        return float(errors(result, self.y, self.stage).max())


def errors(expected: Tensor, found: Tensor, stage: str) -> Tensor:
    """float32 `[T]`: of each token. Relative to its expected length, or to a tenth of the usual one if that is more; of log-probs
    the difference in nats. What is not a number differs infinitely."""
    if expected.shape != found.shape:
        return torch.full((len(found),), torch.inf)
    if stage in LOGPROBS:
        out = (found - expected).abs()
    else:
        lengths = expected.norm(dim=-1)
        out = (found - expected).norm(dim=-1) / lengths.clamp(min=max(float(lengths.mean()) / 10, 1e-30))
    return torch.where(out.isfinite(), out, torch.inf)


UNITS = {"head": "nats", "choice": "of a score"}
LOGPROBS = ("head", "sampling")


def _trial(
    reference: Reference,
    witness: Witness,
    layer: int,
    stage: str,
    x: Tensor,
    ids: Tensor | None,
    gates: Tensor | None,
) -> Trial:
    trial = reference.trial(layer, stage, x, witness.token_ids, ids)
    if gates is not None:
        trial.gates = lambda _: gates
    return trial


def judged(reference: Reference, witness: Witness) -> Iterator[Case]:
    """The stages that part, in the order in which they are computed."""
    seen, before, case = witness.seen, None, None
    if (case := _judge(reference, witness, -1, "embedding", witness.token_ids, "embedding.out")) is not None:
        yield case
    stream = seen.get("embedding.out")
    for layer in range(reference.layers):
        gates: Tensor | None = None
        for stage in ("input_norm", "attention", "post_norm", "router", "choice", "mlp"):
            name = f"{layer}.{stage}"
            if stage.endswith("norm") and (case := _residual(reference, witness, layer, stage, stream, before)):
                yield case
            if stage == "choice":
                case = _choice(reference, witness, layer)
            else:
                inputs = seen.get(f"{layer}.mlp.in" if stage == "router" else f"{name}.in")
                given = gates if stage == "mlp" else None
                case = (
                    None if inputs is None else _judge(reference, witness, layer, stage, inputs, f"{name}.out", given)
                )
            if stage == "router" and case is not None:
                gates = seen.get(f"{layer}.gates.out")  # what follows from its scores is no further fault
            if case is not None:
                yield case
            if stage.endswith("norm"):
                stream = seen.get(f"{name}.in")
            elif stage in ("attention", "mlp"):
                before = seen.get(f"{name}.out")
    if case := _residual(reference, witness, -1, "final_norm", stream, before):
        yield case
    if "final_norm.in" in seen:
        case = _judge(reference, witness, -1, "final_norm", seen["final_norm.in"], "final_norm.out")
        if case is not None:
            yield case
        if (case := _judge(reference, witness, -1, "head", seen["final_norm.out"], "")) is not None:
            yield case


def _judge(
    reference: Reference,
    witness: Witness,
    layer: int,
    stage: str,
    x: Tensor,
    name: str,
    gates: Tensor | None = None,
) -> Case | None:
    y = witness.seen.get(name) if name else witness.logprobs
    has_router = layer in reference.moe_layers
    if y is None or (stage == "router" and not has_router):
        return None
    ids = witness.seen.get(f"{layer}.choice.out") if stage == "mlp" and has_router else None

    def result(dtype: str) -> Tensor:
        trial = _trial(reference, witness, layer, stage, x, ids, gates)
        trial.dtype = getattr(torch, dtype)
        return trial.result()

    expected = result("float32")
    tolerance = FLOOR
    if witness.dtype != "float32":
        tolerance += ROUNDINGS * float(errors(expected, result(witness.dtype), stage).max())
    case = Case(reference, witness, layer, stage, x, y, expected, tolerance, ids, gates, errors(expected, y, stage))
    return case if case.error > tolerance else None


def _residual(
    reference: Reference, witness: Witness, layer: int, stage: str, stream: Tensor | None, added: Tensor | None
) -> Case | None:
    """Whether what goes into a norm is the stream before it, with what the stage before it gave."""
    name = f"{layer}.{stage}.in" if layer >= 0 else f"{stage}.in"
    y = witness.seen.get(name)
    if y is None or stream is None:
        return None
    expected = stream if added is None else stream + added
    dtype = getattr(torch, witness.dtype)
    tolerance = FLOOR + ROUNDINGS * torch.finfo(dtype).eps * (dtype != torch.float32)
    found = errors(expected, y, "residual")
    case = Case(reference, witness, layer, "residual", stream, y, expected, tolerance, errors=found)
    return case if case.error > tolerance else None


def _choice(reference: Reference, witness: Witness, layer: int) -> Case | None:
    """Whether the experts that were chosen are the best by what the files choose by, near ties apart."""
    x, ids = witness.seen.get(f"{layer}.mlp.in"), witness.seen.get(f"{layer}.choice.out")
    if x is None or ids is None:
        return None
    scores, best = reference.choices(layer, x, torch.float32)
    exact = witness.dtype == "float32"
    tolerance = FLOOR
    if not exact:
        rounded, _ = reference.choices(layer, x, getattr(torch, witness.dtype))
        both = scores.isfinite() & rounded.isfinite()
        tolerance += ROUNDINGS * float((rounded - scores)[both].abs().max())
    if ids.shape != best.shape:
        missing = torch.full((len(x),), torch.inf)
    else:
        worst = scores.gather(1, best).min(dim=1).values
        missing = worst - scores.gather(1, ids).min(dim=1).values
    flipped = float((missing > tolerance).float().mean())
    if flipped <= (0.0 if exact else FLIPPED):
        return None
    return Case(reference, witness, layer, "choice", x, ids, best, tolerance, ids, errors=missing)


def together(cases: Sequence[Case], explain: Callable[[Case], list[Explanation]]) -> list[Parting]:
    """Cases of the same stage as one, in the order of the first of each, which is the one that is explained."""
    by_stage: dict[str, list[Case]] = {}
    for case in cases:
        by_stage.setdefault(case.stage, []).append(case)
    return [
        Parting(
            witness=first.witness.name,
            stage=stage,
            layers=[c.layer for c in some] if stage not in OUTSIDE and first.layer >= 0 else [-1],
            error=first.error,
            tolerance=first.tolerance,
            tokens=float((first.errors > first.tolerance).float().mean()),
            unit=UNITS.get(stage, "relative"),
            explanations=explain(first),
        )
        for stage, some in by_stage.items()
        for first in some[:1]
    ]
