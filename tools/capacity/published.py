"""Predict published curves from the settings published with them.

Each case is calibrated on its synchronous point alone: the seconds per decoded token are chosen so that the
prediction for that point equals the measurement. The other points are predicted. `assumed` lists what was not
published and is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .cluster import Distribution, EngineSpeed, LearnerSpeed, Model, predict

FIRST_GUESS, SECANTS, CLOSE = 0.01, 6, 0.001


class Measured(msgspec.Struct, frozen=True):
    """A published measurement.

    Attributes:
        label: What varies between the points.
        seconds: Seconds per step, as published.
        model: The model of the point, except for the engine's seconds per token.
    """

    label: str
    seconds: float
    model: Model
    steps: int = 16
    settle: int = 5


class Case(msgspec.Struct, frozen=True):
    """A published curve.

    Attributes:
        points: The measurements; the prediction is calibrated on the first.
    """

    name: str
    source: str
    inputs: str
    assumed: str
    points: list[Measured]


class Row(msgspec.Struct, frozen=True):
    """A predicted point beside its measurement.

    Attributes:
        error: Error of the prediction, as a share of the measurement.
        calibrated: The prediction was calibrated on this point, so it says nothing about the model.
    """

    case: str
    label: str
    measured: float
    predicted: float
    error: float
    calibrated: bool


def marin() -> Case:
    """Return Marin's case, a 67B mixture of experts: 32 GPUs train and 8 generate.

    Weights are copied while nobody trains or generates.
    """
    published = {0: 8524, 1: 5583, 2: 5093, 3: 4913, 4: 4301}
    model = Model(
        generators=8,
        places=32,
        prompts_per_step=128,
        group_size=4,
        max_staleness=0,
        engine=EngineSpeed(0.0),
        learner=LearnerSpeed(7.9, pause=20.95, waits=True),
        turns=Distribution(1),
        answer=Distribution(900, 0.8, 4096),
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


def verl(cards: int, shared: float, trained: float, points: dict[str, tuple[float, float, int]]) -> Case:
    """Return the case of a 7B dense model on this many GPUs: shared by both sides in turn, then half for each.

    Args:
        shared: Seconds per step with shared GPUs.
        trained: Seconds of those that are training.
        points: By label, the seconds per step with split GPUs, the seconds of its training, and the bound.
    """
    groups, samples, half = 512, 16, cards // 2
    model = Model(
        generators=cards,
        places=groups * samples // cards,
        prompts_per_step=groups,
        group_size=samples,
        max_staleness=0,
        engine=EngineSpeed(0.0),
        learner=LearnerSpeed(trained),
        turns=Distribution(1),
        answer=Distribution(1500, 0.8, 28_672),
    )
    split = msgspec.structs.replace(
        model,
        generators=half,
        places=2 * groups * samples // half,
        prompts_per_step=groups // 4,
        steps_per_publication=4,
    )
    return Case(
        f"verl, 7B on {cards} H20, shared against {half} + {half}",
        "docs/advance/fully_async.md of verl: step, gen, old_log_prob and update_actor of each row",
        "512 prompts of 16 answers, 28K tokens at most; training seconds of each row as published; a version every 4 batches",
        "lengths log-normal, median 1,500, sigma 0.8; staleness_threshold 0.5 is taken as a bound of one version; groups are "
        "trained in lease order; 3 s to synchronise; decoding does not slow down with the batch",
        [
            Measured("shared, synchronous", shared, model, 3, 1),
            *(
                Measured(
                    f"{half} + {half}, {label}",
                    seconds,
                    msgspec.structs.replace(
                        split, learner=LearnerSpeed(update / 4, pause=3.0, waits=True), max_staleness=bound
                    ),
                    40,
                    8,
                )
                for label, (seconds, update, bound) in points.items()
            ),
        ],
    )


def verl_on(cards: int) -> Case:
    """Return verl's published case on this many GPUs.

    Training is old_log_prob, update_actor and the part of the shared row that is neither these nor gen.
    """
    stale = "staleness 0.5, partial rollouts"
    if cards == 32:
        return verl(32, 790.10, 790.10 - 357.41, {stale: (294.77, 313.81, 1)})
    if cards == 64:
        return verl(64, 365.28, 365.28 - 150.72, {stale: (189.26, 156.98, 1)})
    return verl(128, 356.30, 356.30 - 177.85, {"staleness 0": (231.34, 98.77, 0), stale: (150.63, 113.16, 1)})


def areal() -> Case:
    """Return AReaL's case, a 1.5B dense model on 128 GPUs: shared by both sides in turn, then 96 generate and 32 train.

    The published figures are hours for the bounds 0 and 4, and trained tokens per second for all bounds: 41.0 h of
    250 steps at 128.7k are 76.0M tokens per step.
    """
    throughput = {0: 128.7e3, 1: 269.3e3, 4: 356.6e3, 8: 371.7e3}
    most = 396.8e3
    groups, samples, engines, ranks, cards = 512, 16, 96, 32, 128
    step = 41.0 * 3600 / 250
    tokens = step * throughput[0]
    shared = Model(
        generators=cards,
        places=groups * samples // cards,
        prompts_per_step=groups,
        group_size=samples,
        max_staleness=0,
        engine=EngineSpeed(0.0),
        learner=LearnerSpeed(tokens / most * ranks / cards),
        turns=Distribution(1),
        answer=Distribution(6900, 0.84, 27_648),
    )

    def split(bound: int) -> Model:
        return msgspec.structs.replace(
            shared,
            generators=engines,
            places=256,
            max_staleness=bound,
            window=(bound + 1) * groups,
            learner=LearnerSpeed(tokens / most, pause=3.0),
        )

    return Case(
        "AReaL, 1.5B on 128 H800, shared against 96 + 32",
        "arXiv 2505.24298, table 1 (41.0 h, and 14.8 h with a bound of 4, of 250 steps) and figure 5c (trained tokens a second "
        "by bound); blog/AReaL_v0_2.md and v0_3.md of AReaL",
        "512 prompts of 16 answers, 27,648 tokens at most, which fewer than 5 % reach; three quarters of the GPUs generate; "
        "what is complete is trained first; a learner that never waits trains 396.8k tokens a second (no bound)",
        "lengths log-normal, median 6,900, sigma 0.84: with 5 % cut, the published tokens a step; training goes four times as "
        "fast on all GPUs; 256 answers at once on an engine; 3 s to interrupt; decoding does not slow down with the batch",
        [
            Measured("shared, synchronous", step, shared, 3, 1),
            *(
                Measured(f"96 + 32, staleness {bound}", tokens / rate, split(bound), 12, 5)
                for bound, rate in throughput.items()
                if bound
            ),
        ],
    )


CASES: dict[str, Callable[[], Case]] = {
    "marin": marin,
    "verl-128": lambda: verl_on(128),
    "verl-64": lambda: verl_on(64),
    "verl-32": lambda: verl_on(32),
    "areal": areal,
}


def reproduce(case: Case, say: Callable[[str], object] = lambda _: None) -> list[Row]:
    """Predict all points. Several batches of one version count as one step, as the source counts."""
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
    """Find the seconds per decoded token with which the point takes as long as was measured.

    The secant method converges quickly because the time of a step is nearly linear in it.
    """
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
    """Return the table of docs/scaling.md."""
    said = ["| case | point | measured s / step | predicted | error |", "|---|---|---|---|---|"]
    said += [
        f"| {r.case} | {r.label} | {r.measured:.1f} | {r.predicted:.1f} | {'calibrated' if r.calibrated else f'{r.error:+.0%}'} |"
        for r in rows
    ]
    return "\n".join(said)
