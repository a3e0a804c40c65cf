"""`r3async replay`: the steps of a recorded run made again from what it trained on, and compared with it bit by bit.

No engine, no environment; Ray only where the learner has several ranks. The state that is trained is never the run's own.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config
from r3async.config.read import with_overrides
from r3async.data.records import Trajectory
from r3async.learner import LearnerError
from r3async.record.recording import RecordedStep, RecordingError, find_steps, read_settings, read_step
from r3async.untrusted import decode_python_json
from r3async.world.files import make_directory, write_aside
from r3async.world.real import REAL

SHOWN = ("loss/policy", "rollout_kl/k3", "grad_norm")
"""Metrics of a step that are shown beside the run's."""


MOST = 12
"""Metrics that are listed where a step differs."""
SECTIONS = ("learner", "algorithm", "routing", "schedule", "episode", "seed")
"""Settings that a step follows from."""


class Difference(msgspec.Struct, frozen=True):
    """Where a replay first parts from its run: in `stage` of `minibatch`, from 1, of `step`. See `learner.digests.STAGES`.
    `metrics`: `[name, run's, replay's]` of those that differ in that step."""

    step: int
    minibatch: int
    stage: str
    metrics: list[tuple[str, float | None, float | None]]


class Replay(msgspec.Struct, frozen=True):
    """Steps `first` to `last` of `run`, each of its minibatches compared in every stage, until one differed. `changed`: settings
    that were not the run's; then nothing was compared."""

    run: str
    first: int
    last: int
    difference: Difference | None
    changed: list[str]
    seconds: float


def replay(
    run: Path,
    *,
    changed: Sequence[str] = (),
    start: int = 0,
    steps: int | None = None,
    model: Path | None = None,
    out: Path | None = None,
    progress: Callable[[RecordedStep, Mapping[str, float | None]], object] = lambda recorded, metrics: None,
) -> Replay:
    """Make the recorded steps again, from the start model, or from the run's checkpoint of step `start`; at most `steps`.

    `changed`: settings, as `key=value`, that are not the run's: a counterfactual on the same data. `model`: where the start model
    is now. `out`: directory for the metrics and the model of the replay. Raises `RecordingError`, `ConfigError`,
    `CheckpointError` or `LearnerError`.
    """
    began, files = time.monotonic(), find_steps(run, start)[:steps]
    if not files:
        raise RecordingError(f"{run} has no recorded step after step {start}")
    recorded, _ = read_step(files[0])
    session = _Session(run, recorded.lineage, changed, start, model)
    rows, difference, last = [], None, start
    try:
        for file in files:
            recorded, groups = read_step(file)
            session.enter(recorded.lineage, recorded.step)
            metrics, digests = session.step(recorded, groups)
            last = recorded.step
            rows.append({"step": last, **metrics})
            progress(recorded, metrics)
            difference = None if changed else compare(recorded, digests, metrics)
            if difference is not None:
                break
        if out is not None:
            make_directory(out)
            lines = (json.dumps(row).encode() + b"\n" for row in rows)
            write_aside(out / "metrics.jsonl", lines, sync=False)
            session.save(out / "model")
    finally:
        session.close()
    return Replay(run.name, start + 1, last, difference, list(changed), time.monotonic() - began)


def describe(done: Replay) -> str:
    """For people."""
    what = f"steps {done.first} to {done.last} of {done.run}, in {done.seconds:.1f} s"
    if done.changed:
        return f"{what}, with {', '.join(done.changed)}: nothing is compared"
    if done.difference is None:
        return f"{what}: every digest and metric is the run's"
    d = done.difference
    lines = [f"{what}: step {d.step} is not the run's, first in minibatch {d.minibatch}, stage {d.stage}"]
    lines += [f"  {name}: {theirs} in the run, {ours} here" for name, theirs, ours in d.metrics[:MOST]]
    return "\n".join(lines)


def compare(
    recorded: RecordedStep, digests: Sequence[Mapping[str, int]], metrics: Mapping[str, float | None]
) -> Difference | None:
    """The first stage in which a step is not the recorded one."""
    from r3async.learner.digests import STAGES

    # What was replaced when it arrived is in the recording as it was trained.
    metrics = {name: value for name, value in metrics.items() if name != "batch/quarantined"}
    odd = [(name, recorded.metrics.get(name), value) for name, value in metrics.items()]
    odd = [each for each in odd if each[1] != each[2]]
    for number, expected in enumerate(recorded.minibatches, 1):
        found = digests[number - 1] if number <= len(digests) else {}
        for stage in STAGES:
            if expected.get(stage) != found.get(stage):
                return Difference(recorded.step, number, stage, odd)
    return Difference(recorded.step, len(digests), "metrics", odd) if odd else None


class _Session:
    """A learner that makes steps with the settings of one lineage after the other."""

    def __init__(self, run: Path, lineage: int, changed: Sequence[str], start: int, model: Path | None):
        from r3async.checkpoint.directory import Checkpoints

        self._run, self._changed, self._lineage = run, changed, lineage
        self._scratch = tempfile.TemporaryDirectory(prefix="r3async-replay-")  # for logs of several ranks
        self.config = self._settings(lineage)
        self._model = _start_model(run, self.config, model)
        checkpoints = Checkpoints.of(self.config, run)
        if start and start not in checkpoints.steps():
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            raise RecordingError(f"--from {start}: {run} has no checkpoint of that step; there are {there}")
        self._learner, self._trainer = self._load()
        if start:
            self._learner.restore(checkpoints.open(start).path)

    def _settings(self, lineage: int) -> Config:
        config = read_settings(self._run, lineage)
        return with_overrides(config, self._changed, "train") if self._changed else config

    def _load(self) -> tuple[Any, Any]:
        from r3async.actors.loading import load_learner_alone
        from r3async.learner.batch.planner import cost_model
        from r3async.learner.trainer import Trainer

        config = self.config
        learner = load_learner_alone(config, self._model, Path(self._scratch.name), REAL)
        cost = cost_model(decode_python_json((self._model / "config.json").read_bytes()))
        return learner, Trainer(config, cost, learner, NoTrace(), Silent(), _no_stand_in)

    def enter(self, lineage: int, step: int) -> None:
        """From `step` on that lineage's settings hold. Raises `RecordingError` if they make other steps."""
        if lineage == self._lineage:
            return
        self._lineage, config = lineage, self._settings(lineage)
        names = SECTIONS if config.learner.lr_schedule == "constant" else (*SECTIONS, "steps")
        other = [name for name in names if getattr(config, name) != getattr(self.config, name)]
        if other:
            raise RecordingError(
                f"before step {step} the run was resumed with other settings ({', '.join(other)}): replay what follows by "
                f"itself, with --from {step - 1}"
            )

    def step(
        self, recorded: RecordedStep, groups: list[list[Trajectory]]
    ) -> tuple[dict[str, float | None], list[dict[str, int]]]:
        """Its metrics as they would be written, and digests."""
        done = self._trainer.step(recorded.step, recorded.version, self._trainer.prepared(groups))
        return {name: value if math.isfinite(value) else None for name, value in done.metrics.items()}, done.digests

    def save(self, directory: Path) -> None:
        self._learner.save(directory)

    def close(self) -> None:
        self._learner.close()
        REAL.actors.disconnect()
        self._scratch.cleanup()


def _start_model(run: Path, config: Config, named: Path | None) -> Path:
    path = named or (Path(config.model.path) if config.model.path else run / "init")
    if not (path / "config.json").is_file():
        raise RecordingError(f"the start model of {run} is not in {path} any more: name its directory with --model")
    return path.absolute()


class NoTrace:
    """A `Tracer` that writes nothing."""

    def wants(self, samples: Any) -> bool:
        return False

    def write(self, step: int, samples: Any, result: Any) -> None:
        pass


class Silent:
    """What the trainer reports, the run has reported."""

    def warning(self, event: str, **facts: Any) -> None:
        pass

    error = warning


def _no_stand_in(trajectory: Trajectory) -> Trajectory:
    raise LearnerError(f"{trajectory.trajectory_id} was trained by the run, and cannot be trained now")
