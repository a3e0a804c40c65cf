"""What a cluster costs before anybody has run it: durations from the model's size and the hardware's rates.

An engine reads its weights once a decoded token, whatever its batch, and computes with the active ones for each request. A
learner computes six operations a parameter and token, eight where it computes activations again. Shares of the peak rates are
those that such systems usually reach (`Hardware`). Measured durations (`calibrate`) replace all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, median, stdev
from typing import Any

import msgspec
import numpy as np

from r3async.config import Config
from r3async.record.reading import read_json_objects
from r3async.record.timeline import Span, read_timeline

from ..memory import find_model_shape
from ..plan import count_wire_bytes
from .cluster import Distribution, EngineSpeed, LearnerSpeed, Model, Sharing

BYTES = 2
"""Of a parameter in bf16."""


class Hardware(msgspec.Struct, frozen=True):
    """Of one GPU: operations and bytes a second at peak, bytes a second on its network, and the shares of these that training
    (`trains`), prefill (`computes`) and decoding (`reads`) reach."""

    name: str
    operations: float
    memory: float
    network: float
    trains: float = 0.3
    computes: float = 0.5
    reads: float = 0.6


H100 = Hardware("H100", 989e12, 3.35e12, 50e9)
HARDWARE = {
    "h100": H100,
    "h200": Hardware("H200", 989e12, 4.8e12, 50e9),
    "a100": Hardware("A100", 312e12, 2.0e12, 25e9),
    "h20": Hardware("H20", 148e12, 4.0e12, 50e9),
    "cpu": Hardware("two CPU cores", 150e9, 20e9, 1e9),
}
STEP_SECONDS = 0.5
"""Of a training step that no token makes longer: optimizer, collectives, packing."""
TOKEN_SECONDS = 0.004
"""Of an engine's step that no weight makes longer."""


def estimate(config: Config, *, generators: int, ranks: int, hardware: Hardware = H100) -> Model:
    """The model of `config` on so many generators and learner ranks, a GPU each. Answers are log-normal with a median of a
    quarter of `episode.max_new_tokens`; environments answer at once."""
    shape, _ = find_model_shape(config)
    schedule, episode = config.schedule, config.episode
    version = BYTES * shape.num_parameters
    operations = 8 if config.learner.recompute == "full" else 6
    multiply = 2 * shape.active_parameters / hardware.operations
    return Model(
        generators=generators,
        places=config.generator.concurrency,
        groups_per_step=schedule.groups_per_step,
        samples_per_group=schedule.samples_per_group,
        max_staleness=schedule.max_staleness,
        steps_per_publication=schedule.steps_per_publication,
        window=schedule.window,
        tokens_per_step=schedule.tokens_per_step,
        engine=EngineSpeed(
            step_seconds=TOKEN_SECONDS + version / (hardware.memory * hardware.reads),
            request_seconds=multiply / hardware.computes,
            prefill_seconds=multiply / hardware.computes,
        ),
        learner=LearnerSpeed(
            fixed=STEP_SECONDS,
            token_seconds=operations * shape.active_parameters / (hardware.operations * hardware.trains * ranks),
            snapshot=version / ranks / hardware.network,
            write=version / hardware.network,
            transfer=version / hardware.network,
            pause=version / hardware.memory,
        ),
        turns=Distribution(float(episode.max_turns)),
        answer=Distribution(episode.max_new_tokens / 4, 0.8, float(episode.max_new_tokens)),
        prompt=Distribution(min(episode.max_prompt_tokens, 512) / 4),
        bytes_per_token=count_wire_bytes(shape.routing_shape if config.routing.replay == "rollout" else None),
    )


# What a cluster costs, from a run that was made: its timeline and metrics become the durations of `cluster.Model`.


MOST_VALUES = 4096
"""Of a measured distribution: so many are kept, evenly spread over what was measured in order of size."""
LIKE = 1.36
"""Kolmogorov's bound at 5 %, times the root of how many were measured: a sample of the distribution is nearer to it."""
APART = 0.1
"""Of a call's time: with less of it beside training, the call counts as alone, with all but this as beside it."""
FEW = 50
"""Fewer values say nothing of a distribution's shape, or of how much longer something takes."""
FEW_STEPS = 12
MOST_LOST = 0.8


class CalibrationError(ValueError):
    """The run does not say enough."""


def calibrate(run_dir: Path, config: Config, settle: int = 2) -> Model:
    """The model of the run in `run_dir`, from its steps after the first `settle`. Raises `CalibrationError`.

    Engine calls and environments are those of one episode a group (`timeline.jsonl`, `observe.timeline`).
    """
    rows = read_json_objects(run_dir / "metrics.jsonl")
    if len(rows) <= settle:
        raise CalibrationError(f"{run_dir}: {len(rows)} steps; more than {settle} are needed")
    since = rows[settle - 1]["time"] if settle else 0.0
    return fit(config, rows[settle:], [span for span in read_timeline(run_dir) if span.start >= since])


def fit(config: Config, rows: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> Model:
    """As `calibrate`, from metrics and spans of the same time."""
    calls = [span for span in spans if span.what == "call" and span.tokens]
    if not calls:
        raise CalibrationError("the timeline has no engine call: it needs observe.timeline, and steps that were made")
    schedule = config.schedule
    training = [span for span in spans if span.what == "train"]
    alone, beside = apart(calls, training)
    speed = engine_speed(alone or calls)
    lost = held_up(training, [span for span in spans if span.what == "busy"])
    return Model(
        generators=config.generator.count,
        places=config.generator.concurrency,
        groups_per_step=schedule.groups_per_step,
        samples_per_group=schedule.samples_per_group,
        max_staleness=schedule.max_staleness,
        steps_per_publication=schedule.steps_per_publication,
        window=schedule.window,
        tokens_per_step=schedule.tokens_per_step,
        engine=speed,
        learner=learner_speed(rows, spans, lost),
        sharing=Sharing(slower(speed, alone, beside), 1 / (1 - lost)),
        turns=measured(turns_of(calls)),
        answer=measured([span.tokens or 0 for span in calls]),
        prompt=measured([span.prompt or 0 for span in calls]),
        tool=measured([span.end - span.start for span in spans if span.what == "environment"]),
    )


def measured(values: Sequence[float]) -> Distribution:
    """The distribution of what was measured: log-normal up to the largest value if the sample could be of that one, for rare
    values then have their share; else the sample itself. Zero if nothing was measured."""
    ordered = sorted(float(value) for value in values)
    if not ordered:
        return Distribution()
    if (fitted := log_normal(ordered)) is not None:
        return fitted
    count = min(len(ordered), MOST_VALUES)
    return Distribution(values=tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)))


def log_normal(ordered: Sequence[float]) -> Distribution | None:
    """The log-normal of these values, cut at their largest; None if they are of another kind."""
    if len(ordered) < FEW or ordered[0] <= 0:
        return None
    logs = [math.log(value) for value in ordered]
    mean, sigma = fmean(logs), stdev(logs)
    if not sigma:
        return None
    shape, count = NormalDist(mean, sigma), len(logs)
    distance = max(abs(shape.cdf(x) - (i + 0.5) / count) for i, x in enumerate(logs))
    if distance > LIKE / math.sqrt(count):
        return None
    return Distribution(median=math.exp(mean), sigma=sigma, most=ordered[-1])


def covered(span: Span, others: Sequence[Span]) -> float:
    """Seconds of `span` that `others`, which do not overlap each other, cover."""
    return sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in others)


def apart(calls: Sequence[Span], training: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """The calls that were made while the learner did not train, and those that were made while it did."""
    alone: list[Span] = []
    beside: list[Span] = []
    for call in calls:
        share = covered(call, training) / max(call.end - call.start, 1e-9)
        if share < APART:
            alone.append(call)
        elif share > 1 - APART:
            beside.append(call)
    return alone, beside


def slower(speed: EngineSpeed, alone: Sequence[Span], beside: Sequence[Span]) -> float:
    """So many times longer calls take while the learner trains; `speed` is that of calls made `alone`."""
    if min(len(alone), len(beside)) < FEW:
        return 1.0
    expected = sum(
        (call.tokens or 0) * speed.token(call.running or 1) + (call.prompt or 0) * speed.prefill_seconds
        for call in beside
    )
    return max(1.0, sum(call.end - call.start for call in beside) / expected)


def held_up(training: Sequence[Span], busy: Sequence[Span]) -> float:
    """Share of the learner's speed that it loses while all engines have requests: least squares of the seconds of its steps
    over those in which engines were `busy` meanwhile."""
    engines = len({span.who for span in busy})
    if not engines or len(training) < FEW_STEPS:
        return 0.0
    seconds = np.asarray([span.end - span.start for span in training])
    beside = np.asarray([covered(span, busy) / engines for span in training])
    if beside.std() < 0.05 * seconds.mean():
        return 0.0
    return min(max(float(np.polyfit(beside, seconds, 1)[0]), 0.0), MOST_LOST)


def turns_of(calls: Sequence[Span]) -> list[int]:
    """The turns of as many episodes as began: as many had more than `k` turns as there are calls of turn `k`."""
    reached = Counter(span.turn or 0 for span in calls)
    lengths: list[int] = []
    for turn in sorted(reached):
        lengths += [turn + 1] * max(0, reached[turn] - reached.get(turn + 1, 0))
    return lengths


def engine_speed(calls: Sequence[Span]) -> EngineSpeed:
    """Least squares of the calls' seconds over their tokens, tokens times requests that ran beside, and prompt tokens; none
    below zero."""
    seconds = np.asarray([span.end - span.start for span in calls])
    tokens = np.asarray([span.tokens or 0 for span in calls], float)
    columns = {
        "step_seconds": tokens,
        "request_seconds": tokens * np.asarray([span.running or 1 for span in calls], float),
        "prefill_seconds": np.asarray([span.prompt or 0 for span in calls], float),
    }
    kept = dict(columns)
    while kept:
        found, *_ = np.linalg.lstsq(np.stack(list(kept.values()), axis=1), seconds, rcond=None)
        negative = [name for name, value in zip(kept, found, strict=True) if value < 0]
        if not negative:
            speed = dict(zip(kept, map(float, found), strict=True))
            return EngineSpeed(**{"step_seconds": 0.0, **speed})
        del kept[negative[0]]
    return EngineSpeed(float(seconds.sum() / max(tokens.sum(), 1)))


def learner_speed(rows: Sequence[Mapping[str, Any]], spans: Sequence[Span], lost: float = 0.0) -> LearnerSpeed:
    """A step's seconds over its tokens where these differ enough to tell, and medians of the rest. `lost`: see `held_up`; what
    engines made steps longer is left out."""
    busy = [span for span in spans if span.what == "busy"]
    engines = max(1, len({span.who for span in busy}))
    beside = {span.step: covered(span, busy) / engines for span in spans if span.what == "train"}
    steps = np.asarray([row["learner/step_seconds"] - lost * beside.get(row.get("step"), 0.0) for row in rows])
    tokens = np.asarray([row["batch/trained_tokens"] for row in rows])
    slope = 0.0
    if len(rows) >= 8 and tokens.std() > 0.05 * tokens.mean():
        slope = min(max(float(np.polyfit(tokens, steps, 1)[0]), 0.0), float(steps.mean() / tokens.mean()))

    def typical(name: str) -> float:
        return median(float(row.get(name, 0.0)) for row in rows)

    pause = typical("weights/pause_seconds")
    delivered = typical("weights/transfer_seconds") + typical("weights/load_seconds")
    writes = [span.end - span.start for span in spans if span.what == "write"]
    return LearnerSpeed(
        fixed=max(0.0, fmean(steps) - slope * float(tokens.mean())),
        token_seconds=slope,
        snapshot=typical("weights/snapshot_seconds"),
        write=median(writes) if writes else 0.0,
        transfer=max(0.0, delivered - pause),
        pause=pause,
    )
