"""Repeat the steps of a recorded run from its recorded data, and compare them with it bit by bit:
`python -m r3async.tools replay`.

No engine and no environment are used; Ray only where the learner has several ranks. The run's own
state is never trained.
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
from r3async.config.load import apply_overrides
from r3async.data.tokens import Trajectory
from r3async.learner import LearnerError
from r3async.record.recording import (
    RecordedStep,
    RecordingError,
    find_recorded_steps,
    read_recorded_settings,
    read_recorded_step,
)
from r3async.untrusted import decode_python_json
from r3async.world.files import make_directory, write_atomically
from r3async.world.real import REAL_WORLD

from .targets import name_target

SHOWN_METRICS = ("loss/policy", "rollout_kl/k3", "grad_norm")
"""Metrics of a step that are shown beside the run's."""


MAX_METRICS_SHOWN = 12
"""Maximum number of metrics that are listed where a step differs."""
STEP_SETTINGS = ("learner", "algorithm", "routing", "schedule", "episode", "seed")
"""Settings that determine a step."""


class ReplayDifference(msgspec.Struct, frozen=True):
    """The first difference between a replay and its run, in `stage` of `minibatch`
    (from 1) of `step`.

    The stages are `learner.digests.DIGEST_STAGES`.

    Attributes:
        metrics: `[name, run's, replay's]` of the metrics that differ in that step.
    """

    step: int
    minibatch: int
    stage: str
    metrics: list[tuple[str, float | None, float | None]]


class ReplayResult(msgspec.Struct, frozen=True):
    """The result of replaying steps `first` to `last` of `run`.

    Every minibatch is compared in every stage, until one differs.

    Attributes:
        changed: Settings that differ from the run's; if there are any, nothing is compared.
    """

    run: str
    first: int
    last: int
    difference: ReplayDifference | None
    changed: list[str]
    seconds: float


def replay_run(
    run: Path,
    *,
    changed_settings: Sequence[str] = (),
    start_step: int = 0,
    steps: int | None = None,
    model: Path | None = None,
    out: Path | None = None,
    progress: Callable[
        [RecordedStep, Mapping[str, float | None]], object
    ] = lambda recorded, metrics: None,
) -> ReplayResult:
    """Repeat the recorded steps, from the start model or from the run's checkpoint of
    step `start_step`.

    Args:
        changed_settings: Settings, as `key=value`, that differ from the run's: a counterfactual
            on the same data.
        steps: Maximum number of steps.
        model: The current location of the start model.
        out: Directory for the metrics and the model of the replay.

    Raises `RecordingError`, `ConfigError`, `CheckpointError` or `LearnerError`.
    """
    began = time.monotonic()
    files = find_recorded_steps(run, start_step)[:steps]
    if not files:
        raise RecordingError(f"{run} has no recorded step after step {start_step}")
    recorded, _ = read_recorded_step(files[0])
    session = _ReplaySession(run, recorded.lineage, changed_settings, start_step, model)
    rows = []
    difference = None
    last = start_step
    try:
        for file in files:
            recorded, groups = read_recorded_step(file)
            session.enter_lineage(recorded.lineage, recorded.step)
            metrics, digests = session.repeat_step(recorded, groups)
            last = recorded.step
            rows.append({"step": last, **metrics})
            progress(recorded, metrics)
            difference = None if changed_settings else compare_step(recorded, digests, metrics)
            if difference is not None:
                break
        if out is not None:
            with name_target(out):
                make_directory(out)
                lines = (json.dumps(row).encode() + b"\n" for row in rows)
                write_atomically(out / "metrics.jsonl", lines, fsync=False)
                session.save_model(out / "model")
    finally:
        session.close()
    return ReplayResult(
        run.name, start_step + 1, last, difference, list(changed_settings), time.monotonic() - began
    )


def describe_replay(done: ReplayResult) -> str:
    """Describe the result as readable text."""
    what = f"steps {done.first} to {done.last} of {done.run}, in {done.seconds:.1f} s"
    if done.changed:
        return f"{what}, with {', '.join(done.changed)}: nothing is compared"
    if done.difference is None:
        return f"{what}: every digest and metric is the run's"
    d = done.difference
    lines = [
        f"{what}: step {d.step} is not the run's, first in minibatch {d.minibatch}, stage {d.stage}"
    ]
    lines += [
        f"  {name}: {theirs} in the run, {ours} here"
        for name, theirs, ours in d.metrics[:MAX_METRICS_SHOWN]
    ]
    return "\n".join(lines)


def compare_step(
    recorded: RecordedStep,
    digests: Sequence[Mapping[str, int]],
    metrics: Mapping[str, float | None],
) -> ReplayDifference | None:
    """Return the first stage in which a step differs from the recorded one."""
    from r3async.learner.digests import DIGEST_STAGES

    # A trajectory that was replaced on arrival is recorded as it was trained.
    metrics = {name: value for name, value in metrics.items() if name != "batch/quarantined"}
    odd = [(name, recorded.metrics.get(name), value) for name, value in metrics.items()]
    odd = [each for each in odd if each[1] != each[2]]
    for number, expected in enumerate(recorded.minibatches, 1):
        found = digests[number - 1] if number <= len(digests) else {}
        for stage in DIGEST_STAGES:
            if expected.get(stage) != found.get(stage):
                return ReplayDifference(recorded.step, number, stage, odd)
    return ReplayDifference(recorded.step, len(digests), "metrics", odd) if odd else None


class _ReplaySession:
    """A learner that makes steps with the settings of one lineage after the other."""

    def __init__(
        self,
        run: Path,
        lineage: int,
        changed_settings: Sequence[str],
        start_step: int,
        model: Path | None,
    ):
        from r3async.checkpoint.directory import CheckpointDirectory

        self._run = run
        self._changed = changed_settings
        self._lineage = lineage
        # For the logs of several ranks.
        self._scratch = tempfile.TemporaryDirectory(prefix="r3async-replay-")
        self.config = self._read_settings(lineage)
        self._model = _find_start_model(run, self.config, model)
        checkpoints = CheckpointDirectory.from_config(self.config, run)
        if start_step and start_step not in checkpoints.list_steps():
            there = ", ".join(map(str, checkpoints.list_steps())) or "none"
            raise RecordingError(
                f"--from {start_step}: {run} has no checkpoint of that step; there are {there}"
            )
        self._learner, self._trainer = self._load_learner()
        if start_step:
            self._learner.restore_checkpoint(checkpoints.open_step(start_step).path)

    def _read_settings(self, lineage: int) -> Config:
        config = read_recorded_settings(self._run, lineage)
        return apply_overrides(config, self._changed, "train") if self._changed else config

    def _load_learner(self) -> tuple[Any, Any]:
        from r3async.actors.driver import load_standalone_learner
        from r3async.learner.micro_batch_plan import build_cost_model
        from r3async.learner.trainer import Trainer

        config = self.config
        learner = load_standalone_learner(config, self._model, Path(self._scratch.name), REAL_WORLD)
        cost = build_cost_model(decode_python_json((self._model / "config.json").read_bytes()))
        return learner, Trainer(
            config, cost, learner, NullTracer(), NullReporter(), _refuse_placeholder
        )

    def enter_lineage(self, lineage: int, step: int) -> None:
        """Apply the settings of a lineage from `step` on. Raises `RecordingError` if they would
        change the steps."""
        if lineage == self._lineage:
            return
        config = self._read_settings(lineage)
        self._lineage = lineage
        names = (
            STEP_SETTINGS if config.learner.lr_schedule == "constant" else (*STEP_SETTINGS, "steps")
        )
        other = [name for name in names if getattr(config, name) != getattr(self.config, name)]
        if other:
            raise RecordingError(
                f"before step {step} the run was resumed with other settings ({', '.join(other)}): "
                f"replay what follows by itself, with --from {step - 1}"
            )

    def repeat_step(
        self, recorded: RecordedStep, groups: list[list[Trajectory]]
    ) -> tuple[dict[str, float | None], list[dict[str, int]]]:
        """Train a recorded step. Returns its metrics as they would be written, and its digests."""
        done = self._trainer.update_weights(
            recorded.step, recorded.version, self._trainer.prepare_step(groups)
        )
        return {
            name: value if math.isfinite(value) else None for name, value in done.metrics.items()
        }, done.digests

    def save_model(self, directory: Path) -> None:
        self._learner.save_model(directory)

    def close(self) -> None:
        self._learner.close()
        REAL_WORLD.actors.leave_cluster()
        self._scratch.cleanup()


def _find_start_model(run: Path, config: Config, model_path: Path | None) -> Path:
    path = model_path or (Path(config.model.path) if config.model.path else run / "init")
    if not (path / "config.json").is_file():
        raise RecordingError(
            f"the start model of {run} is not in {path} any more: name its directory with --model"
        )
    return path.absolute()


class NullTracer:
    """A `RouteTracer` that writes nothing."""

    def should_trace(self, samples: Any) -> bool:
        return False

    def write_trace(self, step: int, samples: Any, result: Any) -> None:
        pass


class NullReporter:
    """A reporter that drops events, because the run has already reported them."""

    def warning(self, event: str, **facts: Any) -> None:
        pass

    error = warning


def _refuse_placeholder(trajectory: Trajectory) -> Trajectory:
    raise LearnerError(
        f"{trajectory.trajectory_id} was trained by the run, and cannot be trained now"
    )
