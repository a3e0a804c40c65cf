"""A small random run: what is trained, by whom, and how. Plain data, drawn from a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import msgspec

from r3async.config import Config, config_from_dict
from r3async.scheduling.admission import age_bound, slots_of
from tools.simulate.known import Rules

RESTARTS = 200
"""Of a generator, or the run: more than faults can cause. That a run gives up when they are used up is tested elsewhere."""
SILENCE_SECONDS = 20.0
STALL_SECONDS = 60.0
START_SECONDS = 120.0
FIRST_SECONDS = 900.0
"""After the last fault, until the next step at most: a stall is found, what stalled is ended, the run restarts, a start fails
and is made again, and the longest episodes are played."""
STEP_SECONDS = 450.0
"""And between two steps after that."""
LARGEST = 64 * 1024
"""Bytes of one trajectory, at most."""


class Workload(msgspec.Struct, frozen=True):
    """Driver, learner and conductor are on the first host, generators on the others if there are any. `seconds`, of a call of the
    environment at most; `token_seconds`, of an engine; `train_seconds`, of a step at most."""

    seed: int
    steps: int = 8
    hosts: int = 1
    generators: int = 1
    concurrency: int = 4
    groups_per_step: int = 1
    samples_per_group: int = 2
    max_staleness: int = 1
    window: int = 1
    split: Literal["idle", "room"] = "idle"
    steps_per_publication: int = 1
    tokens_per_step: int = 0
    checkpoint_every: int = 2
    checkpoints_kept: int = 2
    asynchronous: bool = True
    durability: Literal["memory", "disk"] = "disk"
    fsync: bool = True
    memory_bytes: int = 10**6
    disk_bytes: int = 10**7
    credit_bytes: int = 10**6
    ack_timeout: float = 2.0
    turns: int = 2
    new_tokens: int = 8
    token_seconds: float = 0.05
    seconds: float = 1.0
    tail: int = 20
    failing: int = 0
    train_seconds: float = 2.0
    probe: bool = False

    @property
    def roles(self) -> list[str]:
        """Names of the processes that faults may hit."""
        return ["learner", "conductor", "driver", *(f"generator-{i}" for i in range(self.generators))]

    @property
    def host_names(self) -> list[str]:
        return [f"host-{i}" for i in range(self.hosts)]

    @property
    def expected_seconds(self) -> float:
        """Roughly, of a run without faults, loading not counted."""
        waves = -(-self.groups_per_step * self.samples_per_group // (self.generators * self.concurrency))
        episode = self.turns * (self.new_tokens / 2 * self.token_seconds + self.seconds / 2 * (1 + 10 / self.tail))
        return self.steps * max(waves * episode / (1 + self.max_staleness), self.train_seconds / 2)

    def config(self, model: Path) -> Config:
        """The run's configuration. `model`: directory of a model that the scripted engine and learner read."""
        return config_from_dict(self._settings(str(model)))

    def _settings(self, model: str) -> dict[str, Any]:
        return {
            "name": "run",
            "seed": self.seed % 2**31,
            "steps": self.steps,
            "model": {"path": model},
            "env": {
                "name": "tools.simulate.environment:Errand",
                "args": {"turns": self.turns, "seconds": self.seconds, "tail": self.tail, "failing": self.failing},
            },
            "episode": {
                "max_turns": self.turns,
                "max_new_tokens": self.new_tokens,
                "max_prompt_tokens": 448,
                "max_total_tokens": 512,
                "timeout": 120.0,
                "retries": 20,
            },
            "generator": {
                "count": self.generators,
                "concurrency": self.concurrency,
                "engine": "scripted",
                "engine_args": {"token_seconds": self.token_seconds},
                "max_restarts": RESTARTS,
                "start_timeout": START_SECONDS,
            },
            "schedule": {
                "max_staleness": self.max_staleness,
                "window": self.window,
                "split": self.split,
                "groups_per_step": self.groups_per_step,
                "samples_per_group": self.samples_per_group,
                "steps_per_publication": self.steps_per_publication,
                "tokens_per_step": self.tokens_per_step,
            },
            "routing": {"trace": "off"},
            "learner": {"backend": "scripted", "max_tokens_per_micro_batch": 1024, "start_timeout": START_SECONDS},
            "weights": {
                "backend": "object_store",
                "install_timeout": 30.0,
                "write_timeout": 60.0,
                "directory": "/memory/weights",
                "probe": self.probe,
                "probe_every": 2,
            },
            "transport": {
                "host": self.host_names[0] if self.hosts > 1 else "127.0.0.1",
                "credit_bytes": self.credit_bytes,
                "ack_timeout": self.ack_timeout,
                "max_message_bytes": LARGEST,
            },
            "buffer": {
                "durability": self.durability,
                "fsync": self.fsync,
                "memory_bytes": self.memory_bytes,
                "disk_bytes": self.disk_bytes,
            },
            "supervise": {
                "stall_seconds": STALL_SECONDS,
                "step_seconds": 120.0,
                "on_stall": "restart",
                "silence_seconds": SILENCE_SECONDS,
                "restart_backoff": 0.5,
                "max_run_restarts": RESTARTS,
                "stop_grace_seconds": 15.0,
                "max_failed_fraction": 1.0,
                "max_skipped_steps": 1000,
            },
            "checkpoint": {
                "every_steps": self.checkpoint_every,
                "every_minutes": 0.0,
                "keep_last": self.checkpoints_kept,
                "asynchronous": self.asynchronous,
                "write_timeout": 60.0,
            },
        }

    def rules(self) -> Rules:
        """What this run promises, for the checker."""
        schedule = self.config(Path("model")).schedule
        slots = slots_of(schedule)
        kept: Literal["process", "power"] = "power" if self.fsync else "process"
        return Rules(
            steps=self.steps,
            groups_per_step=self.groups_per_step,
            samples_per_group=self.samples_per_group,
            slots=slots,
            age_bound=age_bound(schedule),
            steps_per_publication=self.steps_per_publication,
            window=self.window,
            urgent=(slots if self.tokens_per_step else self.groups_per_step) + self.window - 1,
            more_groups=bool(self.tokens_per_step),
            durable=kept if self.durability == "disk" else "nothing",
            credit_bytes=self.credit_bytes,
            disk_bytes=self.disk_bytes,
            silence_seconds=SILENCE_SECONDS,
            first_seconds=FIRST_SECONDS,
            step_seconds=STEP_SECONDS,
        )


def draw_workload(seed: int) -> Workload:
    """The same for the same seed, on every machine."""
    rng = random.Random(f"workload/{seed}")
    ahead = rng.random() < 0.4
    """The learner is what is slow: as much as may be is in flight."""
    return Workload(
        seed=seed,
        steps=rng.randint(4, 9),
        hosts=rng.choice([1, 2, 3]),
        generators=rng.randint(1, 4),
        concurrency=rng.choice([4, 8] if ahead else [1, 2, 4]),
        groups_per_step=rng.choice([1, 1, 2, 2, 3]),
        samples_per_group=rng.choice([2, 2, 3]),
        max_staleness=rng.choice([2, 3] if ahead else [0, 1, 1, 2]),
        window=rng.choice([1, 1, 2, 3, 4]),
        split=rng.choice(["idle", "room"]),
        steps_per_publication=rng.choice([1, 1, 1, 2]),
        tokens_per_step=rng.choice([0, 0, 0, 0, rng.randint(5, 60)]),
        checkpoint_every=rng.choice([1, 2, 2, 3, 4]),
        checkpoints_kept=rng.randint(1, 3),
        asynchronous=rng.random() < 0.8,
        durability=rng.choice(["disk", "disk", "memory"]),
        fsync=rng.random() < 0.6,
        memory_bytes=rng.choice([1, 20_000, 10**6]),
        disk_bytes=rng.choice([2_000, 2_000, 20_000, 10**7]),
        credit_bytes=rng.choice([2_000, 20_000, 10**6]),
        ack_timeout=rng.choice([1.0, 2.0, 5.0]),
        turns=rng.randint(1, 2),
        new_tokens=rng.choice([2, 6, 12]),
        token_seconds=rng.choice([0.02] if ahead else [0.02, 0.05, 0.2]),
        seconds=rng.choice([0.2] if ahead else [0.2, 1.0, 2.0]),
        tail=rng.choice([20, 50]),
        failing=rng.choice([0, 0, 30]),
        train_seconds=rng.choice([5.0] if ahead else [0.1, 1.0, 3.0]),
        probe=rng.random() < 0.3,
    )
