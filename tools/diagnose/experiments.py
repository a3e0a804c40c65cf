"""Building blocks of experiments: changes to a stage of the files, tried until one reproduces
what a witness gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .judge import DivergentStage
from .reference import StageTrial

TrialChange = Callable[[StageTrial], object]
Experiments = Iterator[tuple[TrialChange, str]]
"""Changes to try, each with the evidence to report if it explains the difference."""

FIX_STALE = (
    "its weights did not arrive as they were published: restart that engine, see "
    "weights.probe_every, and compare the names that it loads by"
)
FIX_CONFIG = (
    "the two read another config.json, or another default: compare both, and "
    "generator.engine_args.hf_overrides"
)
FIX_MAPPING = "the names or the order of tensors are mapped wrongly where the checkpoint is loaded"
FIX_QUANTISED = (
    "train and generate with the same rounding, or remove the quantisation from "
    "generator.engine_args"
)


class Cause(NamedTuple):
    """A possible cause of a divergence.

    Attributes:
        stages: The stages in which it can occur.
        make_experiments: Yields the experiments for a case of one of these stages; each costs one
            stage of one layer.
        fix: What to do if this is the cause.
    """

    name: str
    stages: tuple[str, ...]
    make_experiments: Callable[[DivergentStage], Experiments]
    fix: str
    is_fitted: bool = False
    """True if the experiment fits the weights to what was observed: it shows that they
    differ, but not why."""


def change_weights(trial: StageTrial, change: Callable[[Tensor], Tensor]) -> None:
    """Change every matrix of a stage."""
    # A stage of its own.
    router = getattr(trial.module, "gate", None) if trial.stage == "mlp" else None
    others = {id(p) for p in router.parameters()} if isinstance(router, nn.Module) else set()
    for parameter in trial.module.parameters():
        if parameter.ndim > 1 and id(parameter) not in others:
            parameter.data = change(parameter.data)


def bind_value(change: Callable[[StageTrial, Any], object], value: Any) -> TrialChange:
    """Return the change with this value bound to it."""
    return lambda trial: change(trial, value)


def find_minimum(
    case: DivergentStage, change: Callable[[StageTrial, float], object], values: Iterable[float]
) -> float:
    """Return the positive value that leaves the smallest error.

    The search takes the best of `values`, then the range between its neighbours, to six digits.
    """

    def left(value: float) -> float:
        return case.compute_remaining_error(bind_value(change, value))

    tried = sorted(values)
    lefts = [left(value) for value in tried]
    best = lefts.index(min(lefts))
    low = tried[max(0, best - 1)]
    high = tried[min(len(tried) - 1, best + 1)]
    ratio = 0.381966
    a = low * (high / low) ** ratio
    b = low * (high / low) ** (1 - ratio)
    of_a = left(a)
    of_b = left(b)
    for _ in range(28):
        if of_a < of_b:
            high = b
            b = a
            of_b = of_a
            a = low * (high / low) ** ratio
            of_a = left(a)
        else:
            low = a
            a = b
            of_a = of_b
            b = low * (high / low) ** (1 - ratio)
            of_b = left(b)
    return tried[best] if min(lefts) <= min(of_a, of_b) else (a if of_a < of_b else b)
