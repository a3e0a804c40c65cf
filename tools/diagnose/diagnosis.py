"""What is found of an engine and a learner, together; and how it is said."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from r3async.tools.diagnose.around import other_dtype, other_weights, routes, sampling
from r3async.tools.diagnose.causes import explain
from r3async.tools.diagnose.judge import Parting, Witness, judged, together
from r3async.tools.diagnose.reference import Reference


class Diagnosis(msgspec.Struct, frozen=True):
    """`partings`: in the order in which things are computed, the engine's first. `mean_difference`, `max_difference`: of the
    log-probs of engine and learner, in nats, for `tokens` tokens; each with its own routing."""

    model: str
    backend: str
    tokens: int
    mean_difference: float
    max_difference: float
    stages: int
    partings: list[Parting]
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not self.partings


def examine(reference: Reference, witness: Witness) -> list[Parting]:
    """Where a witness parts from the files."""
    stages = together(list(judged(reference, witness)), explain)
    found = [*other_dtype(witness), *stages, *other_weights(witness, stages), *routes(reference, witness)]
    return found + list(sampling(reference, witness))


def compare(reference: Reference, engine: Witness, learner: Witness, before: Sequence[Parting] = ()) -> list[Parting]:
    """Where either parts from the files; `before`: in what they are given."""
    return [*before, *examine(reference, engine), *examine(reference, learner)]


def describe(done: Diagnosis) -> str:
    """For people."""
    difference = f"mean |difference| of {done.tokens} log-probs {done.mean_difference:.3g} nats"
    difference += f", the largest {done.max_difference:.3g}"
    lines = [f"{done.model}, vLLM and {done.backend}: {difference} ({done.stages} stages, {done.seconds:.1f} s)"]
    if done.sound:
        return "\n".join([*lines, "sound: every stage of both is the files', but for rounding"])
    for number, each in enumerate(done.partings):
        off = "" if each.stage in ("dtype", "weights", "tokens", "mask") else _off(each)
        lines.append(f"{'PARTED' if not number else 'and'}: {each.witness}, {each.where}{off}")
        for rank, why in enumerate(each.explanations[:3]):
            lines.append(f"  {'cause' if not rank else 'or'}: {why.cause}: {why.evidence}")
            if not rank:
                lines.append(f"  fix: {why.fix}")
    return "\n".join(lines)


def _off(each: Parting) -> str:
    units = {"nats": " nats", "of a score": " of a score", "share": " of the tokens"}
    unit = units.get(each.unit, "")
    return f": off by {each.error:.3g}{unit}, {each.tolerance:.2g} is rounding; {100 * each.tokens:.0f} % of the tokens"
