"""Runs of a sweep without training: directories with records, and processes that make them."""

import json
import signal
from pathlib import Path
from typing import Any

PLAN = """
title = "Two losses"
preset = "quickstart"
seeds = [0, 1, 2]
baseline = "pg"

[settings]
steps = 20

[variants.pg]

[variants.ppo]
algorithm.policy_loss = "ppo"
"""


def write_plan(folder: Path, text: str = PLAN, name: str = "plan.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def write_swept_run(
    path: Path,
    rewards: list[float],
    *,
    steps: int | None = None,
    lives: int = 1,
    seconds: float = 2.0,
    end: str = "finished",
    metric: str = "reward/mean",
) -> None:
    """Write a run's directory.

    Args:
        rewards: values of `metric` by step; each step takes `seconds` and 100 tokens.
        end: the run's status, or "" for a run that was killed.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(f"steps = {steps or len(rewards)}\n")
    rows = [
        {"step": at + 1, "time": 1000.0 + seconds * (at + 1), metric: reward, "batch/trained_tokens": 100.0}
        for at, reward in enumerate(rewards)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events: list[dict[str, Any]] = [{"event": "conductor_started", "level": "info", "time": 1000.0}] * lives
    if end == "failed":
        events.append({"event": "run_failed", "level": "error", "time": 1001.0, "error": "no memory is left"})
    elif end:
        events.append(
            {"event": "run_finished", "level": "info", "time": 1001.0, "stopped": end == "stopped", "updates": 3}
        )
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


class FakeRun:
    """A process that makes its run after some polls, and stops in order on a signal. `code`: 0, or its exit code on
    failure."""

    def __init__(
        self, path: Path, polls: int = 2, code: int = 0, rewards: list[float] | None = None, deaf: bool = False
    ):
        self.path, self.polls, self.code, self.rewards, self.deaf = path, polls, code, rewards or [0.5, 0.6], deaf
        self.signals: list[int] = []
        self.killed = False

    def poll(self) -> int | None:
        if self.killed:
            return -signal.SIGKILL
        if self.signals and not self.deaf:
            write_swept_run(self.path, self.rewards[:1], steps=len(self.rewards), end="stopped")
            return 0
        self.polls -= 1
        if self.polls > 0 or self.deaf:
            return None
        if not self.code:
            write_swept_run(self.path, self.rewards)
        return self.code

    def send_signal(self, number: int, /) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.killed = True
