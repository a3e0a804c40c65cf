"""The combined diagnosis of an engine and a learner, and its text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .beyond_stages import check_dtype, check_routes, check_sampling, check_weights
from .judge import Divergence, StageOutputs, find_divergent_stages, merge_cases
from .reference import ReferenceModel


class Diagnosis(msgspec.Struct, frozen=True):
    """The result of a diagnosis.

    The differences are those of the log-probs of engine and learner, in nats, over `tokens` tokens,
    each with its own routing.

    Attributes:
        divergences: Divergences in the order of computation, the engine's first.
    """

    model: str
    backend: str
    tokens: int
    mean_difference: float
    max_difference: float
    stages: int
    divergences: list[Divergence]
    seconds: float = 0.0

    @property
    def is_consistent(self) -> bool:
        return not self.divergences


def examine_outputs(reference: ReferenceModel, outputs: StageOutputs) -> list[Divergence]:
    """Find where a witness diverges from the files."""
    stages = merge_cases(list(find_divergent_stages(reference, outputs)), outputs)
    found = [
        *check_dtype(outputs),
        *stages,
        *check_weights(outputs, stages),
        *check_routes(reference, outputs),
    ]
    return found + list(check_sampling(reference, outputs))


def compare_sides(
    reference: ReferenceModel,
    engine: StageOutputs,
    learner: StageOutputs,
    input_divergences: Sequence[Divergence] = (),
) -> list[Divergence]:
    """Find where engine and learner diverge from the files.

    Args:
        input_divergences: Divergences in their inputs, which come first.
    """
    return [
        *input_divergences,
        *examine_outputs(reference, engine),
        *examine_outputs(reference, learner),
    ]


def describe_diagnosis(done: Diagnosis) -> str:
    """Describe a diagnosis as readable text."""
    difference = f"mean |difference| of {done.tokens} log-probs {done.mean_difference:.3g} nats"
    difference += f", the largest {done.max_difference:.3g}"
    lines = [
        (
            f"{done.model}, vLLM and {done.backend}: {difference} ({done.stages} stages, "
            f"{done.seconds:.1f} s)"
        )
    ]
    if done.is_consistent:
        return "\n".join([*lines, "sound: every stage of both is the files', but for rounding"])
    for number, each in enumerate(done.divergences):
        off = _format_error(each) if each.error else ""
        lines.append(f"{'then' if number else 'PARTED'}: {each.witness}, {each.location}{off}")
        lines.append(f"  compared: {each.compared}")
        if each.evidence:
            lines.append(f"  seen: {each.evidence}")
        if each.hint:
            lines.append(f"  hint: {each.hint}")
    return "\n".join(lines)


def _format_error(divergence: Divergence) -> str:
    units = {"nats": " nats", "of a score": " of a score", "share": " of the tokens"}
    unit = units.get(divergence.unit, "")
    tokens = f"{100 * divergence.tokens:.0f} % of the tokens"
    return (
        f": off by {divergence.error:.3g}{unit}, {divergence.tolerance:.2g} is rounding; {tokens}"
    )
