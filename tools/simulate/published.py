"""Curves that others published, predicted from the settings that they published.

Each case is calibrated on its synchronous point alone: the seconds a decoded token takes are found so that the prediction for
that point is what was measured. The others are predicted. What was not published, and is assumed, is said in `assumed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tools.simulate.cluster import Distribution, EngineSpeed, LearnerSpeed, Model, predict

FIRST_GUESS, SECANTS, CLOSE = 0.01, 6, 0.001


class Measured(msgspec.Struct, frozen=True):
    """`label`: what varies. `seconds`: a step, as published. `model`: of it, but for the engine's seconds a token."""

    label: str
    seconds: float
    model: Model
    steps: int = 16
    settle: int = 5


class Case(msgspec.Struct, frozen=True):
    """`points`: the first is the one that is calibrated on."""

    name: str
    source: str
    inputs: str
    assumed: str
    points: list[Measured]


class Row(msgspec.Struct, frozen=True):
    """`error`: of the prediction, as a share of what was measured. `calibrated`: this point says nothing of the model."""

    case: str
    label: str
    measured: float
    predicted: float
    error: float
    calibrated: bool


def marin() -> Case:
    """67B mixture of experts, 32 GPUs train and 8 generate; weights are copied while nobody trains or generates."""
    published = {0: 8524, 1: 5583, 2: 5093, 3: 4913, 4: 4301}
    model = Model(
        generators=8,
        places=32,
        groups_per_step=128,
        samples_per_group=4,
        max_staleness=0,
        engine=EngineSpeed(0.0),
        learner=LearnerSpeed(7.9, pause=20.95, waits=True),
        turns=Distribution(1),
        answer=Distribution(900, 0.8, 4096),
        poll=0.0,
    )
    return Case(
        "Marin, 67B MoE on 40 H100, by staleness",
        "github.com/marin-community/marin/issues/8955 (`main`, seed 17) and 8936",
        "128 prompts of 4 answers a step, 64 workers of 4 answers on 8 engines, 4,096 tokens at most, weight copies of "
        "2,066 to 2,206 s in 100 steps, 7.9 s of training a step (8936)",
        "lengths log-normal, median 900, sigma 0.8; decoding does not slow down with the batch",
        [
            Measured(f"staleness {bound}", seconds / 100, msgspec.structs.replace(model, max_staleness=bound))
            for bound, seconds in published.items()
        ],
    )


def verl() -> Case:
    """A 7B dense model on 128 GPUs: shared by both sides in turn, then 64 for each."""
    model = Model(
        generators=128,
        places=64,
        groups_per_step=512,
        samples_per_group=16,
        max_staleness=0,
        engine=EngineSpeed(0.0),
        learner=LearnerSpeed(53.92 + 113.81 + 10.7),
        turns=Distribution(1),
        answer=Distribution(1500, 0.8, 28_672),
        poll=0.0,
    )
    split = msgspec.structs.replace(
        model, generators=64, places=192, groups_per_step=128, steps_per_publication=4, max_staleness=0
    )
    stream = msgspec.structs.replace(split, learner=LearnerSpeed(98.77 / 4, pause=3.0, waits=True))
    stale = msgspec.structs.replace(
        split, learner=LearnerSpeed(113.16 / 4, pause=3.0, waits=True), max_staleness=1, places=256
    )
    return Case(
        "verl, 7B on 128 H20, shared against 64 + 64",
        "docs/advance/fully_async.md of verl: step, gen, old_log_prob and update_actor of each row",
        "512 prompts of 16 answers, 28K tokens at most; training seconds of each row as published; a version every 4 batches",
        "lengths log-normal, median 1,500, sigma 0.8; staleness_threshold 0.5 is taken as a bound of one version; groups are "
        "trained in lease order; 3 s to synchronise",
        [
            Measured("shared, synchronous", 356.30, model, 5, 1),
            Measured("64 + 64, staleness 0", 231.34, stream, 24, 8),
            Measured("64 + 64, staleness 0.5, partial rollouts", 150.63, stale, 24, 8),
        ],
    )


CASES: dict[str, Callable[[], Case]] = {"marin": marin, "verl": verl}


def reproduce(case: Case, say: Callable[[str], object] = lambda _: None) -> list[Row]:
    """Predict all points. A step of several batches of one version counts as one, as the source counts."""
    token = calibrated_token(case.points[0])
    rows = []
    for number, point in enumerate(case.points):
        predicted = seconds_of(point, token)
        rows.append(
            Row(case.name, point.label, point.seconds, predicted, predicted / point.seconds - 1, calibrated=not number)
        )
        say(f"{case.name}, {point.label}: {predicted:.1f} s predicted, {point.seconds:.1f} measured")
    return rows


def seconds_of(point: Measured, token: float) -> float:
    model = msgspec.structs.replace(point.model, engine=msgspec.structs.replace(point.model.engine, step_seconds=token))
    made = predict(model, steps=point.steps, settle=point.settle)
    return made.seconds_per_step * model.steps_per_publication


def calibrated_token(point: Measured) -> float:
    """Seconds of a decoded token with which the point takes as long as was measured, by secants: a step's time is nearly linear
    in it."""
    token, before = FIRST_GUESS, 2 * FIRST_GUESS
    took, took_before = seconds_of(point, token), seconds_of(point, before)
    for _ in range(SECANTS):
        slope = (took_before - took) / (before - token)
        before, took_before = token, took
        token += (point.seconds - took) / slope
        took = seconds_of(point, token)
        if abs(took / point.seconds - 1) < CLOSE:
            break
    return token


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/scaling.md."""
    said = ["| case | point | measured s / step | predicted | error |", "|---|---|---|---|---|"]
    said += [
        f"| {r.case} | {r.label} | {r.measured:.1f} | {r.predicted:.1f} | {'calibrated' if r.calibrated else f'{r.error:+.0%}'} |"
        for r in rows
    ]
    return "\n".join(said)
