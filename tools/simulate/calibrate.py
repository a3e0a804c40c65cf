"""What a cluster costs, from a run that was made: its timeline and metrics become the durations of `cluster.Model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from r3async.config import Config
from r3async.observe.metrics import read_metrics
from r3async.observe.timeline import Span, read_timeline
from tools.simulate.cluster import Distribution, EngineSpeed, LearnerSpeed, Model

MOST_VALUES = 4096
"""Of a measured distribution: so many are kept, evenly spread over what was measured in order of size."""


class CalibrationError(ValueError):
    """The run does not say enough."""


def calibrate(run_dir: Path, config: Config, settle: int = 2) -> Model:
    """The model of the run in `run_dir`, from its steps after the first `settle`. Raises `CalibrationError`.

    Engine calls and environments are those of one episode a group (`timeline.jsonl`, `observe.timeline`).
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
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
    return Model(
        generators=config.generator.count,
        places=config.generator.concurrency,
        groups_per_step=schedule.groups_per_step,
        samples_per_group=schedule.samples_per_group,
        max_staleness=schedule.max_staleness,
        steps_per_publication=schedule.steps_per_publication,
        window=schedule.window,
        tokens_per_step=schedule.tokens_per_step,
        engine=engine_speed(calls),
        learner=learner_speed(rows, spans),
        turns=measured(turns_of(calls)),
        answer=measured([span.tokens or 0 for span in calls]),
        prompt=measured([span.prompt or 0 for span in calls]),
        tool=measured([span.end - span.start for span in spans if span.what == "environment"]),
    )


def measured(values: Sequence[float]) -> Distribution:
    """The distribution of what was measured; zero if nothing was."""
    if not values:
        return Distribution()
    ordered = sorted(float(value) for value in values)
    count = min(len(ordered), MOST_VALUES)
    return Distribution(values=tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)))


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


def learner_speed(rows: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> LearnerSpeed:
    """A step's seconds over its tokens where these differ enough to tell, and medians of the rest."""
    steps = np.asarray([row["learner/step_seconds"] for row in rows])
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
