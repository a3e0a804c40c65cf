"""Estimate the durations of a cluster that nobody has run yet, from the model's size and the hardware's rates.

An engine reads its weights once per decoded token, whatever its batch, and computes with the active ones for each
request. A learner computes six operations per parameter and token, or eight where it recomputes activations. The
shares of the peak rates are those that such systems usually reach (`Hardware`). Measured durations (`calibrate`)
replace all of this.
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
"""Bytes of a parameter in bf16."""


class Hardware(msgspec.Struct, frozen=True):
    """The rates of one GPU and the shares of them that are reached in practice.

    Attributes:
        operations: Peak operations per second.
        memory: Peak bytes per second of its memory.
        network: Bytes per second of its network.
        trains: Share reached in training.
        computes: Share reached in prefill.
        reads: Share reached in decoding.
    """

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
"""Seconds of a training step that do not depend on its tokens: optimizer, collectives, packing."""
TOKEN_SECONDS = 0.004
"""Seconds of an engine step that do not depend on the weights."""


def estimate(config: Config, *, generators: int, ranks: int, hardware: Hardware = H100) -> Model:
    """Return the model of `config` on this many generators and learner ranks, one GPU each.

    Answers are log-normal with a median of a quarter of `episode.max_new_tokens`; environments answer at once.
    """
    shape, _ = find_model_shape(config)
    schedule, episode = config.schedule, config.episode
    version = BYTES * shape.num_parameters
    operations = 8 if config.learner.recompute == "full" else 6
    multiply = 2 * shape.active_parameters / hardware.operations
    return Model(
        generators=generators,
        places=config.generator.concurrency,
        prompts_per_step=schedule.prompts_per_step,
        group_size=schedule.group_size,
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


# Calibration: the timeline and metrics of a finished run become the durations of `cluster.Model`.


MOST_VALUES = 4096
"""Maximum number of values kept of a measured distribution, evenly spread over the sorted values."""
LIKE = 1.36
"""Kolmogorov's bound at 5 %, times the square root of the sample size; a sample of the distribution stays below it."""
APART = 0.1
"""Share of a call's time. Overlapping training by less than it, a call counts as alone; by all but it, as beside."""
FEW = 50
"""Minimum number of values that say something about a distribution's shape, or about a slowdown."""
FEW_STEPS = 12
MOST_LOST = 0.8


class CalibrationError(ValueError):
    """A run whose records are not sufficient for calibration."""


def calibrate(run_dir: Path, config: Config, settle: int = 2) -> Model:
    """Return the model of the run in `run_dir`, from its steps after the first `settle`. Raises `CalibrationError`.

    Engine calls and environments are those of one episode per group (`timeline.jsonl`, `observe.timeline`).
    """
    rows = read_json_objects(run_dir / "metrics.jsonl")
    if len(rows) <= settle:
        raise CalibrationError(f"{run_dir}: {len(rows)} steps; more than {settle} are needed")
    since = rows[settle - 1]["time"] if settle else 0.0
    return fit(config, rows[settle:], [span for span in read_timeline(run_dir) if span.start >= since])


def fit(config: Config, rows: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> Model:
    """Return the model of a run from metrics and spans of the same time. Raises `CalibrationError`."""
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
        prompts_per_step=schedule.prompts_per_step,
        group_size=schedule.group_size,
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
    """Return the distribution of measured values, or zero if there are none.

    It is a log-normal up to the largest value if the sample fits one, because rare values then get their share;
    otherwise it is the sample.
    """
    ordered = sorted(float(value) for value in values)
    if not ordered:
        return Distribution()
    if (fitted := log_normal(ordered)) is not None:
        return fitted
    count = min(len(ordered), MOST_VALUES)
    return Distribution(values=tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)))


def log_normal(ordered: Sequence[float]) -> Distribution | None:
    """Fit a log-normal to these sorted values, cut at the largest. Return None if they do not fit one."""
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
    """Return the seconds of `span` that `others` cover; these must not overlap each other."""
    return sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in others)


def apart(calls: Sequence[Span], training: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Split the calls into those made while the learner did not train and those made while it did."""
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
    """Return the factor by which calls take longer while the learner trains.

    Args:
        speed: The speed of the calls made `alone`.
    """
    if min(len(alone), len(beside)) < FEW:
        return 1.0
    expected = sum(
        (call.tokens or 0) * speed.token(call.running or 1) + (call.prompt or 0) * speed.prefill_seconds
        for call in beside
    )
    return max(1.0, sum(call.end - call.start for call in beside) / expected)


def held_up(training: Sequence[Span], busy: Sequence[Span]) -> float:
    """Return the share of its speed that the learner loses while all engines have requests.

    It is found by least squares of the seconds of the learner's steps over those in which engines were `busy`
    meanwhile.
    """
    engines = len({span.who for span in busy})
    if not engines or len(training) < FEW_STEPS:
        return 0.0
    seconds = np.asarray([span.end - span.start for span in training])
    beside = np.asarray([covered(span, busy) / engines for span in training])
    if beside.std() < 0.05 * seconds.mean():
        return 0.0
    return min(max(float(np.polyfit(beside, seconds, 1)[0]), 0.0), MOST_LOST)


def turns_of(calls: Sequence[Span]) -> list[int]:
    """Return the number of turns of each episode that began.

    The number of episodes with more than `k` turns equals the number of calls of turn `k`.
    """
    reached = Counter(span.turn or 0 for span in calls)
    lengths: list[int] = []
    for turn in sorted(reached):
        lengths += [turn + 1] * max(0, reached[turn] - reached.get(turn + 1, 0))
    return lengths


def engine_speed(calls: Sequence[Span]) -> EngineSpeed:
    """Fit the speed of the engine to the calls' seconds by least squares, with no coefficient below zero.

    The regressors are tokens, tokens times the requests that ran at once, and prompt tokens.
    """
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
    """Fit a step's seconds over its tokens where the steps differ enough, and take medians of the rest.

    Args:
        lost: The share from `held_up`; the time that engines added to the steps is left out.
    """
    busy = [span for span in spans if span.what == "busy"]
    engines = max(1, len({span.who for span in busy}))
    beside = {span.step: covered(span, busy) / engines for span in spans if span.what == "train"}
    steps = np.asarray([row["timing/train_seconds"] - lost * beside.get(row.get("step"), 0.0) for row in rows])
    tokens = np.asarray([row["batch/trained_tokens"] for row in rows])
    slope = 0.0
    if len(rows) >= 8 and tokens.std() > 0.05 * tokens.mean():
        slope = min(max(float(np.polyfit(tokens, steps, 1)[0]), 0.0), float(steps.mean() / tokens.mean()))

    def typical(name: str) -> float:
        return median(float(row.get(name, 0.0)) for row in rows)

    pause = typical("timing/engine_pause_seconds")
    delivered = typical("timing/weight_transfer_seconds") + typical("timing/weight_load_seconds")
    writes = [span.end - span.start for span in spans if span.what == "write"]
    return LearnerSpeed(
        fixed=max(0.0, fmean(steps) - slope * float(tokens.mean())),
        token_seconds=slope,
        snapshot=typical("timing/snapshot_seconds"),
        write=median(writes) if writes else 0.0,
        transfer=max(0.0, delivered - pause),
        pause=pause,
    )
