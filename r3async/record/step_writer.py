"""Writers of the records of a step.

These are its row of `metrics.jsonl`, written when the step ends, and example episodes.
`data/metrics.py` describes each metric.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.config import Config
from r3async.record.reading import EPISODES_FILE
from r3async.schedule.update_monitor import ALL_EPISODES_FAILED, explain_no_update
from r3async.world import EventReporter, World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

MAX_RECENT_ROWS = 256


def _to_number(value: Any) -> Any:
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a metric is a number, got {type(value).__name__}")
    return item()


_encoder = msgspec.json.Encoder(enc_hook=_to_number)


class MetricsFile:
    """A writer of rows to `metrics.jsonl`, one per run.

    When `write` returns, the row is in the file, or kept in memory until the disk takes it.
    """

    def __init__(self, run_dir: Path, *, world: World = REAL_WORLD):
        self._file = AppendFile(Path(run_dir) / "metrics.jsonl", world=world)

    def write(self, row: Mapping[str, Any]) -> list[str]:
        """Append the row of one step. Non-finite values are written as null, and their names
        returned: they need attention.

        Raises `TypeError` for a value that is not a number, text or None.
        """
        plain = {
            k: v if isinstance(v, (int, float, str, type(None))) else _to_number(v)
            for k, v in row.items()
        }
        odd = [
            name
            for name, value in plain.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        self._file.append(_encoder.encode({**plain, **dict.fromkeys(odd)}))
        return odd

    def close(self) -> None:
        self._file.close()


class DeviceCounts(NamedTuple):
    """The numbers of devices that generate and that train; both may be the same devices.

    Devices are GPUs, or on CPU the workers of the engines and the ranks of the learner.
    """

    engines: int = 1
    learner: int = 1

    @staticmethod
    def from_config(config: Config, generators: int = 0) -> DeviceCounts:
        """Count the devices of `generators` generators (0: as configured), even if one of them is
        just restarting."""
        workers = int(config.generator.engine_args.get("tensor_parallel_size", 1))
        return DeviceCounts(
            (generators or config.generator.count) * workers, config.learner.parallel.world_size
        )


ONE_DEVICE_EACH = DeviceCounts()


class StepWriter:
    """The writer of step rows. What writing and delivering a version took becomes known during the
    next step, and is in that step's row.

    `report_event(event, **fields)` is called for metrics that are not finite. Rates are per wall
    time between two rows.
    """

    def __init__(
        self,
        run_dir: Path,
        report_event: EventReporter,
        devices: DeviceCounts = ONE_DEVICE_EACH,
        *,
        world: World = REAL_WORLD,
        clock: Callable[[], float] | None = None,
    ):
        self._writer = MetricsFile(run_dir, world=world)
        self.devices = devices
        self._episodes = AppendFile(run_dir / EPISODES_FILE, world=world)
        self._report = report_event
        self._clock = clock or world.clock.monotonic
        self._time = world.clock.time
        self._delivery: dict[str, float] = {}
        self._written_at = self._clock()
        self._tokens = 0
        self._cpu: Mapping[str, float] = {}
        self._stages: Mapping[str, float] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT_ROWS)

    def rows_after(self, step: int) -> list[dict[str, Any]]:
        """Return the rows after `step`, as far as they are among the last `MAX_RECENT_ROWS`."""
        return [row for row in self._recent if row["step"] > step]

    def restart_clock(self) -> None:
        """Count the rates of the next row from now on."""
        self._written_at = self._clock()

    def restore(self, generated_tokens: int, older_rows: Sequence[dict[str, Any]]) -> None:
        """Restore from a checkpoint how many tokens were generated when its last row was written.

        A checkpoint of an older release may have rows, of steps whose weights had not been
        delivered. They are written now, without rates.
        """
        self._tokens = generated_tokens
        for row in older_rows:
            self._write_row({"time": self._time(), **row})

    def add_delivery(self, metrics: Mapping[str, float]) -> None:
        """Add metrics of the writing or the delivery of a version. They are in the row of the step
        that ends next; without another step they are in none."""
        self._delivery |= metrics

    def write_step(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, Any],
        previews: Sequence[dict[str, Any]] = (),
        *,
        generated_tokens: int,
        cpu_seconds: Mapping[str, float] | None = None,
        stage_seconds: Mapping[str, float] | None = None,
    ) -> None:
        """Write the row of a step that ended, and its episode previews.

        Args:
            version: Version of the weights that the step made, or has a part in.
            generated_tokens: Tokens generated since the run began.
            cpu_seconds: Total processor time of all processes but the learner, by role,
                since counting began.
            stage_seconds: Total time of these processes by stage, by metric name.
        """
        with stage("metrics"):
            self._write_previews(step, previews)
            now = self._clock()
            seconds = max(now - self._written_at, 1e-9)
            generated = max(0, generated_tokens - self._tokens)
            row = {
                "step": step,
                "version": version,
                "time": self._time(),
                **metrics,
                **self._compute_rates(generated, metrics["batch/trained_tokens"], seconds),
                **self._compute_cpu_seconds(metrics, cpu_seconds or {}, generated),
                **self._compute_stage_seconds(stage_seconds or {}),
                **self._delivery,
            }
            self._delivery = {}
            self._written_at = now
            self._tokens = generated_tokens
            self._write_row(row)

    def _write_row(self, row: dict[str, Any]) -> None:
        odd = self._writer.write(row)
        # Such a step has no episode to average over.
        if odd and explain_no_update(row) != ALL_EPISODES_FAILED:
            self._report("metric_not_finite", step=row["step"], metrics=odd)
        self._recent.append(row)

    def _write_previews(self, step: int, previews: Sequence[dict[str, Any]]) -> None:
        for preview in previews:
            rewards = preview["rewards"]
            answered = zip(_split_turns(preview["messages"], len(rewards)), rewards, strict=False)
            turns = [
                {"user": asked, "assistant": answer, "reward": reward}
                for (asked, answer), reward in answered
            ]
            told = {
                "step": step,
                "trajectory": preview["trajectory"],
                "reward": preview["reward"],
                "turns": turns,
            }
            label = preview.get("environment")
            named = {"environment": label} if label else {}
            self._episodes.append(msgspec.json.encode(told | named))

    def _compute_rates(self, generated: int, trained: float, seconds: float) -> dict[str, float]:
        """Return the rates of tokens since the previous row."""
        return {
            "throughput/generated_tokens_per_second": generated / seconds,
            "throughput/trained_tokens_per_second": trained / seconds,
            "throughput/generated_tokens_per_second_per_device": generated
            / seconds
            / self.devices.engines,
            "throughput/trained_tokens_per_second_per_device": trained
            / seconds
            / self.devices.learner,
        }

    def _compute_stage_seconds(self, stages: Mapping[str, float]) -> dict[str, float]:
        """Return the time by stage since the previous row."""
        before = self._stages
        self._stages = dict(stages)
        return {name: seconds - before.get(name, 0.0) for name, seconds in stages.items()}

    def _compute_cpu_seconds(
        self, metrics: Mapping[str, Any], cpu: Mapping[str, float], generated: int
    ) -> dict[str, float]:
        """Return the processor time since the previous row, by role, and per generated and trained
        token."""
        spent = {role: seconds - self._cpu.get(role, 0.0) for role, seconds in cpu.items()}
        self._cpu = dict(cpu)
        learner = metrics.get("cpu/learner_seconds", 0.0)
        return {
            **{f"cpu/{role}_seconds": seconds for role, seconds in spent.items()},
            "cpu/generated_token_us": 1e6 * sum(spent.values()) / max(generated, 1),
            "cpu/trained_token_us": 1e6 * learner / max(metrics["batch/trained_tokens"], 1),
        }


def _split_turns(messages: Sequence[Mapping[str, str]], answers: int) -> list[tuple[str, str]]:
    """Split a conversation into turns, each a prompt and an answer. Several messages before an
    answer form one prompt.

    `answers` is the number of the policy's answers: the last assistant messages. Earlier assistant
    messages are part of the first prompt.
    """
    turns: list[tuple[str, str]] = []
    asked: list[str] = []
    others = sum(message["role"] == "assistant" for message in messages) - answers
    for message in messages:
        if message["role"] == "assistant" and others <= 0:
            turns.append(("\n\n".join(asked), message["content"]))
            asked = []
        else:
            others -= message["role"] == "assistant"
            asked.append(message["content"])
    return turns
