"""The workload of a small random run: what is trained, on which processes, and how. Plain data,
drawn from a seed."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, Literal

import msgspec

from dev.simulation.observed_state import RunGuarantees
from r3async.config import Config, config_from_dict
from r3async.config.supervise import TimeLimits
from r3async.schedule.run_ahead import compute_staleness_bound, count_slots

MAX_RESTARTS = 200
"""Maximum restarts of a generator, or of the run: more than faults can cause. That a run gives up
after its last restart is tested elsewhere."""
MIN_RUN_SECONDS = 600.0
"""Minimum virtual seconds that a drawn run takes: it trains for this long."""
FIRST_STEP_STALLS = 15.0
"""Maximum time from the last fault until the next step, in `stall_seconds`. It must suffice to
detect a stall, end what stalled, restart the run, repeat a start that fails, and play the
longest episodes."""
NEXT_STEP_STALLS = 7.5
"""Maximum time between two steps after that, in `stall_seconds`."""
CALL_STALLS = 0.9
"""Maximum time of a call of the environment, after which its process is ended, in
`stall_seconds`."""
GATED_SEEDS = 4
"""One of so many runs replays the engine's gates."""
MAX_TRAJECTORY_BYTES = 64 * 1024
"""Maximum size of one trajectory in bytes."""
VERSION_BYTES = 400
"""Approximate bytes read and written on a host that fetches a version of the weights."""
CHUNK_BYTES = 48
"""Bytes of weights in one message: a version has several such chunks."""
SLACK_SECONDS = 30.0
"""Seconds added to the limit of an installation, for messages, threads, and new connections."""


class SimulatedWorkload(msgspec.Struct, frozen=True):
    """The workload of a simulated run.

    Driver, learner and conductor are on the first host; generators are on the other hosts, if there
    are any. Limits of the configuration follow from `stall_seconds` and `silence_seconds`.

    Attributes:
        flat: Argument of the environment (`LetterTask`).
        tasks: Argument of the environment (`LetterTask`). With a limited number, past rewards
            decide which are posed.
        token_seconds: Seconds per token of an engine.
        seconds: Maximum seconds of a usual call of the environment.
        least_train_seconds: Minimum seconds of a training step.
        train_seconds: Maximum seconds of a training step.
        slowness: Factor by which process starts, threads and messages are slower than
            with a small model.
        fetch_seconds: Seconds to write the file of a version on a host.
        install_seconds: Maximum seconds in which an engine installs a version.
        fanout: Number of hosts to which a host sends weights at once.
        evaluate_every: Setting of `[evaluation]`.
        evaluate_first: Setting of `[evaluation]`.
        evaluated_tasks: Setting of `[evaluation]`.
        evaluation_seconds: Maximum seconds of an episode of an evaluation.
    """

    seed: int
    steps: int = 8
    hosts: int = 1
    generators: int = 1
    concurrency: int = 4
    prompts_per_step: int = 1
    group_size: int = 2
    max_staleness: int = 1
    window: int = 1
    split: Literal["idle", "capacity"] = "idle"
    steps_per_publication: int = 1
    tokens_per_step: int = 0
    replaced_groups: int = 0
    epochs_per_step: int = 1
    flat: int = 0
    tasks: int = 0
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
    least_train_seconds: float = 0.0
    train_seconds: float = 2.0
    slowness: float = 1.0
    stall_seconds: float = 60.0
    silence_seconds: float = 20.0
    probe: bool = False
    fetch_seconds: float = 0.0
    install_seconds: float = 0.0
    fanout: int = 2
    evaluate_every: int = 0
    evaluate_first: bool = False
    evaluated_tasks: int = 3
    evaluation_seconds: float = 1.0

    @property
    def process_names(self) -> list[str]:
        """The names of the processes that faults may hit."""
        return [
            "learner",
            "conductor",
            "driver",
            *(f"generator-{i}" for i in range(self.generators)),
        ]

    @property
    def host_names(self) -> list[str]:
        return [f"host-{i}" for i in range(self.hosts)]

    @property
    def replacement_limit(self) -> int:
        """The setting `schedule.replaced_groups`: 0 if the other settings do not allow it."""
        return self.replaced_groups if self.max_staleness and not self.tokens_per_step else 0

    @property
    def expected_seconds(self) -> float:
        """The approximate duration in seconds of a run without faults, excluding loading."""
        waves = -(-self.prompts_per_step * self.group_size // (self.generators * self.concurrency))
        episode = self.turns * (
            self.new_tokens / 2 * self.token_seconds + self.seconds / 2 * (1 + 10 / self.tail)
        )
        train = (self.least_train_seconds + self.train_seconds) / 2
        return self.steps * max(waves * episode / (1 + self.max_staleness), train)

    def build_config(self, model: Path) -> Config:
        """Return the run's configuration. `model` is the directory of the model for scripted
        engine and learner."""
        return config_from_dict(self._config_settings(str(model)))

    @property
    def time_limits(self) -> TimeLimits:
        """The run's time limits, in place of `TIME_LIMITS`. They do not depend on bytes."""
        return TimeLimits(
            start=2 * self.stall_seconds,
            step=2 * self.stall_seconds,
            evaluation=4 * self.stall_seconds,
            base_install=self.stall_seconds + self.install_seconds,
            base_version_write=self.stall_seconds,
            base_checkpoint_write=self.stall_seconds,
            full_bytes_per_second=math.inf,
            delta_bytes_per_second=math.inf,
        )

    def _config_settings(self, model: str) -> dict[str, Any]:
        return {
            "name": "run",
            "seed": self.seed % 2**31,
            "steps": self.steps,
            "model": {"path": model},
            "env": {
                "name": "dev.simulation.environment:LetterTask",
                "args": {
                    "limit": CALL_STALLS * self.stall_seconds,
                    **{
                        n: getattr(self, n)
                        for n in ("turns", "seconds", "tail", "failing", "flat", "tasks")
                    },
                },
            },
            "episode": {
                "max_turns": self.turns,
                "max_new_tokens": self.new_tokens,
                "max_prompt_tokens": 448,
                "max_total_tokens": 512,
                "timeout": 2 * self.stall_seconds,
                "retries": 20,
            },
            "generator": {
                "count": self.generators,
                "concurrency": self.concurrency,
                "engine": "scripted",
                "engine_args": {
                    "token_seconds": self.token_seconds,
                    "install_seconds": self.install_seconds,
                },
                "max_restarts": MAX_RESTARTS,
            },
            "schedule": {
                "max_staleness": self.max_staleness,
                "window": self.window,
                "split": self.split,
                "prompts_per_step": self.prompts_per_step,
                "group_size": self.group_size,
                "steps_per_publication": self.steps_per_publication,
                "tokens_per_step": self.tokens_per_step,
                "replaced_groups": self.replacement_limit,
                "epochs_per_step": self.epochs_per_step,
                "difficulty": {"groups": 1, "settled_share": 0.2, "target": 0.4}
                if self.tasks
                else {},
            },
            "algorithm": {"filter_zero_variance": bool(self.replacement_limit)},
            "routing": {
                "trace": "off",
                "gates": "learner" if self.seed % GATED_SEEDS else "rollout",
            },
            "learner": {
                "backend": "scripted",
                "max_tokens_per_micro_batch": 1024,
            },
            "weights": {
                "backend": "tcp",
                "directory": "/memory/weights",
                "probe": self.probe,
                "probe_every": 2,
            },
            "transport": {
                "host": self.host_names[0] if self.hosts > 1 else "127.0.0.1",
                "credit_bytes": self.credit_bytes,
                "ack_timeout": self.ack_timeout,
                "max_message_bytes": MAX_TRAJECTORY_BYTES,
            },
            "buffer": {
                "durability": self.durability,
                "fsync": self.fsync,
                "memory_bytes": self.memory_bytes,
                "disk_bytes": self.disk_bytes,
            },
            "supervise": {
                "stall_seconds": self.stall_seconds,
                "on_stall": "restart",
                "silence_seconds": self.silence_seconds,
                "restart_backoff": 0.5,
                "max_run_restarts": MAX_RESTARTS,
                "stop_grace_seconds": self.stall_seconds / 4,
                "max_failed_fraction": 1.0,
                "max_skipped_steps": 1000,
            },
            "evaluation": self._evaluation_settings() if self.evaluate_every else {},
            "checkpoint": {
                "every_steps": self.checkpoint_every,
                "every_minutes": 0.0,
                "keep_last": self.checkpoints_kept,
                "asynchronous": self.asynchronous,
            },
        }

    def _evaluation_settings(self) -> dict[str, Any]:
        """Return the settings of the evaluation. Its tasks are other ones than those of training,
        and none raises."""
        return {
            "every_steps": self.evaluate_every,
            "at_start": self.evaluate_first,
            "tasks": self.evaluated_tasks,
            "env": {
                "name": "dev.simulation.environment:LetterTask",
                "args": {
                    "turns": 1,
                    "seconds": self.evaluation_seconds / 2,
                    "tail": 0,
                    "limit": 4 * self.stall_seconds,
                },
            },
        }

    def derive_guarantees(self) -> RunGuarantees:
        """Return the guarantees of this run, for the checker."""
        schedule = self.build_config(Path("model")).schedule
        slots = count_slots(schedule)
        survives: Literal["process", "power"] = "power" if self.fsync else "process"
        return RunGuarantees(
            steps=self.steps,
            prompts_per_step=self.prompts_per_step,
            group_size=self.group_size,
            slots=slots,
            age_bound=compute_staleness_bound(schedule),
            steps_per_publication=self.steps_per_publication,
            window=self.window,
            urgent=(slots if schedule.takes_extra_groups else self.prompts_per_step)
            + self.window
            - 1,
            more_groups=bool(self.tokens_per_step),
            replaced_groups=self.replacement_limit,
            durable=survives if self.durability == "disk" else "nothing",
            credit_bytes=self.credit_bytes,
            disk_bytes=self.disk_bytes,
            silence_seconds=self.silence_seconds,
            first_seconds=FIRST_STEP_STALLS * self.stall_seconds,
            step_seconds=NEXT_STEP_STALLS * self.stall_seconds,
            install_seconds=SLACK_SECONDS
            + self.install_seconds
            + 2 * self.hosts * self.fetch_seconds,
            fetch_seconds=SLACK_SECONDS + 2 * self.hosts * self.fetch_seconds,
            evaluate_every=self.evaluate_every,
            evaluate_first=self.evaluate_first,
            evaluated_tasks=self.evaluated_tasks,
        )

    @property
    def memory_bytes_per_second(self) -> float:
        """The speed of the in-memory file systems of hosts that fetch weights, in
        bytes per second."""
        return VERSION_BYTES / self.fetch_seconds if self.fetch_seconds else math.inf


def draw_workload(seed: int) -> SimulatedWorkload:
    """Draw the workload of a seed, which is the same on every machine. The run takes at least
    `MIN_RUN_SECONDS`."""
    rng = random.Random(f"workload/{seed}")
    slow = rng.choice(
        ["learner", "learner", "generators", "generators", "either", "either", "either"]
    )
    ahead = slow == "learner"
    behind = slow == "generators"
    """Flags of which side is slow. If `ahead`, the learner is, so that as many groups as allowed
    are in flight. If `behind`, the generators are, so that a group is played with newer weights
    than existed when it got its slot."""
    steps = rng.randint(4, 9)
    train = MIN_RUN_SECONDS / steps
    drawn = SimulatedWorkload(
        seed=seed,
        steps=steps,
        hosts=rng.choice([1, 2, 3]),
        generators=rng.choice([1, 2] if behind else [1, 1, 1, 2, 2, 3, 4]),
        concurrency=rng.choice([4, 8] if ahead else [1, 2] if behind else [1, 1, 2, 4]),
        prompts_per_step=rng.choice([1, 1, 2, 2, 3]),
        group_size=rng.choice([2, 2, 3]),
        max_staleness=rng.choice([2, 3] if ahead else [1, 2, 2] if behind else [0, 1, 1, 2]),
        window=rng.choice([1, 1, 2, 3, 4]),
        split=rng.choice(["idle", "capacity"]),
        steps_per_publication=rng.choice([1, 1, 1, 2]),
        tokens_per_step=rng.choice([0, 0, 0, 0, rng.randint(5, 60)]),
        checkpoint_every=rng.choice([2, 3, 4] if behind else [1, 1, 2, 2, 3, 4]),
        checkpoints_kept=rng.randint(1, 3),
        asynchronous=rng.random() < 0.8,
        durability="disk" if behind else rng.choice(["disk", "memory"]),
        fsync=rng.random() < 0.6,
        memory_bytes=rng.choice([1, 2_000, 10**6]),
        disk_bytes=rng.choice([2_000, 2_000, 20_000, 10**7]),
        credit_bytes=rng.choice([2_000, 20_000, 10**6]),
        ack_timeout=rng.choice([5.0, 10.0, 20.0, 30.0]),
        turns=rng.randint(1, 2),
        new_tokens=rng.choice([2, 6, 12]),
        token_seconds=0.2 if ahead else rng.choice([0.2, 0.5, 2.0]),
        tail=rng.choice([10, 20, 50]),
        failing=rng.choice([0, 0, 30]),
        least_train_seconds=train,
        train_seconds=rng.choice([1.02, 1.1]) * train,
        slowness=rng.choice([4.0, 12.0]),
        stall_seconds=rng.choice([120.0, 180.0]),
        silence_seconds=rng.choice([20.0, 40.0, 60.0]),
        probe=rng.random() < 0.3,
        # These settings were added later. They are drawn last, so that the others of a
        # seed stay the same.
        replaced_groups=rng.choice([0, 0, 1, 2, 3]),
        epochs_per_step=rng.choice([1, 1, 2]),
        flat=rng.choice([0, 2, 3]),
        tasks=rng.choice([0, 0, 4, 10]),
    )
    drawn = _draw_weights(drawn)
    drawn = _draw_restarts(drawn)
    drawn = _draw_evaluations(drawn)
    share = 0.1 if ahead else 1.3 if behind else rng.choice([0.2, 0.5, 1.0])
    return msgspec.structs.replace(
        drawn, seconds=_call_seconds(drawn, share * drawn.least_train_seconds)
    )


BRISK_SHARE = 0.15
"""Share of the runs in which several versions are published while one is installed."""


def _draw_weights(drawn: SimulatedWorkload) -> SimulatedWorkload:
    """Draw how weights get to the engines, from a separate random stream.

    With more than two generators, each is mostly on its own host. In some runs (`BRISK_SHARE`),
    several versions are published while one is installed.
    """
    rng = random.Random(f"weights/{drawn.seed}")
    if rng.random() < BRISK_SHARE:
        drawn = msgspec.structs.replace(
            drawn,
            steps=3 * drawn.steps,
            least_train_seconds=drawn.least_train_seconds / 3,
            train_seconds=drawn.train_seconds / 3,
            generators=max(2, drawn.generators),
            hosts=rng.choice([2, 3]),
            fetch_seconds=rng.choice([0.0, 5.0]),
            install_seconds=drawn.stall_seconds / 2,
            fanout=rng.choice([1, 2]),
        )
        return drawn
    return msgspec.structs.replace(
        drawn,
        hosts=1 + drawn.generators if drawn.generators > 2 and rng.random() < 0.7 else drawn.hosts,
        fetch_seconds=rng.choice([0.0, 0.0, 2.0, 10.0]),
        install_seconds=rng.choice([0.0, 0.0, 10.0, 60.0]),
        fanout=rng.choice([1, 1, 2]),
    )


QUICK_SHARE = 0.15
"""Share of the runs in which a process is restarted while a call of its predecessor still waits
or is on its way."""


def _draw_restarts(drawn: SimulatedWorkload) -> SimulatedWorkload:
    """Draw whether processes restart quickly, from a separate random stream. Then generators have
    free places while they play, so that their calls wait."""
    if random.Random(f"calls/{drawn.seed}").random() >= QUICK_SHARE:
        return drawn
    return msgspec.structs.replace(
        drawn, slowness=0.25, concurrency=8, fetch_seconds=0.0, install_seconds=0.0
    )


EVALUATED_SHARE = 0.4
"""Share of the runs with evaluations."""


def _draw_evaluations(drawn: SimulatedWorkload) -> SimulatedWorkload:
    """Draw the evaluations, from a separate random stream. One takes up to two steps, so that
    many faults hit it."""
    rng = random.Random(f"evaluations/{drawn.seed}")
    if rng.random() >= EVALUATED_SHARE:
        return drawn
    return msgspec.structs.replace(
        drawn,
        evaluate_every=rng.choice([1, 2, 2, 3]),
        evaluate_first=rng.random() < 0.3,
        evaluated_tasks=rng.randint(1, 4),
        evaluation_seconds=round(rng.uniform(0.2, 2.0) * drawn.least_train_seconds, 3),
    )


def _call_seconds(drawn: SimulatedWorkload, playing: float) -> float:
    """Return the maximum seconds of a call of the environment, so that a step's groups take about
    `playing` seconds. No call takes so long that the run seems to stall."""
    waves = drawn.prompts_per_step * drawn.group_size / (drawn.generators * drawn.concurrency)
    episode = playing / max(1.0, waves) - drawn.turns * drawn.new_tokens / 2 * drawn.token_seconds
    calls = (drawn.turns + 1) * (1 + 9 / drawn.tail) / 2
    return round(min(max(episode / calls, 0.2), drawn.stall_seconds / 12), 3)
