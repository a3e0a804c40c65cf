"""The benchmark `bench step`: what served drift, a limit and a recording add to a learner's step, in turns on the same
episodes.

A bare engine plays the quickstart's tasks once (`bare.play`). Then one process has a learner for each way, and all of
them train every batch, one after the other in an order that rotates. A figure is the ratio of two sums over batches.
Its standard error comes from leaving out one block of batches at a time (jackknife); each block is as long as the
longest period of a way.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dev.bench import bare
from dev.bench.jobs import Say, progress, run_job, table
from r3async.config import Config, config_from_dict, config_to_dict, load_config

if TYPE_CHECKING:
    from r3async.data.tokens import Trajectory
    from r3async.learner.trainer import StepOutcome

TIMEOUT = 900.0
BLOCK = 4
"""Number of batches of a block: served drift is measured in one of so many steps."""
WAYS: dict[str, tuple[str, ...]] = {
    "plain": ("algorithm.rollout_kl.probe_share=0",),
    "served": (),
    "served, every step": ("algorithm.rollout_kl.probe_every=1",),
    # So high that no step is shortened: what remains is the cost of looking.
    "limit": ("algorithm.rollout_kl.limit=1e6",),
    "recorded": ("algorithm.rollout_kl.probe_share=0", "observe.record=full"),
}
"""Overrides of the quickstart for each way, by name; all ways are compared with the first."""


class Job(msgspec.Struct, frozen=True):
    """The input of the learner's job.

    Attributes:
        configs: the configuration of each way.
        episodes: path of the file that `bare.play` wrote.
        warm_up: number of batches that are not measured.
    """

    configs: dict[str, dict[str, Any]]
    episodes: str
    warm_up: int


class Spent(msgspec.Struct, frozen=True):
    """CPU and wall seconds of the step, for each way and batch. `write_*`: seconds of writing what a recording keeps of
    the step, which a run does in a thread beside the next step."""

    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]
    write_cpu: dict[str, list[float]]
    write_wall: dict[str, list[float]]


class Ratio(msgspec.Struct, frozen=True):
    """A ratio over the plain step; `error` is its standard error."""

    ratio: float
    error: float


class Way(msgspec.Struct, frozen=True):
    """The figures of one way. All include the writing of recordings, as if nothing ran beside it. `cpu_ms`: CPU
    milliseconds of a step."""

    name: str
    cpu_ms: float
    added_ms: float
    cpu: Ratio
    wall: Ratio


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    steps: int
    tokens: int
    """Number of tokens that the engine sampled in one batch, on average."""
    seed: int
    ways: list[Way]


def configure(seed: int, overrides: Sequence[str], *, quick: bool) -> Config:
    small = ("schedule.prompts_per_step=2", "schedule.group_size=4", "model.init.max_warm_steps=1") * quick
    return load_config("quickstart", [*small, f"seed={seed}", "evaluation.every_steps=0", *overrides], None)


def run(steps: int, seed: int, quick: bool, say: Say) -> Report:
    """Make the model, let the engine play, and train. Raises `BenchError`."""
    from r3async.tools.init_model import init_model

    steps = BLOCK if quick else math.ceil(steps / BLOCK) * BLOCK
    with tempfile.TemporaryDirectory(prefix="r3async-step-") as scratch:
        place = Path(scratch)
        base = configure(seed, [], quick=quick)
        init_model(place / "model", base, progress=say)
        model = f"model.path={place / 'model'}"
        configs = {name: configure(seed, [*more, model], quick=quick) for name, more in WAYS.items()}
        # A whole block warms up, so that served drift is measured in the same steps of every later block.
        batches = bare.Job(config_to_dict(configs["plain"]), steps + BLOCK - bare.WARM_UP)
        played = run_job(f"{bare.__name__}:play", batches, bare.Engine, place / "engine", timeout=TIMEOUT, say=say)
        job = Job(
            {name: config_to_dict(config) for name, config in configs.items()},
            str(place / "engine" / bare.EPISODES),
            BLOCK,
        )
        spent = run_job(f"{__name__}:train", job, Spent, place / "learner", timeout=TIMEOUT, say=say)
    return Report("step", steps, round(played.tokens / max(batches.batches, 1)), seed, summarize(spent))


def summarize(spent: Spent) -> list[Way]:
    """Return the figures of each way, against the first."""

    def whole(step: Mapping[str, list[float]], writing: Mapping[str, list[float]], name: str) -> list[float]:
        return [a + b for a, b in zip(step[name], writing[name], strict=True)]

    cpu = {name: whole(spent.cpu, spent.write_cpu, name) for name in spent.cpu}
    wall = {name: whole(spent.wall, spent.write_wall, name) for name in spent.cpu}
    first = next(iter(cpu))
    count = len(cpu[first])
    return [
        Way(
            name,
            1e3 * sum(cpu[name]) / count,
            1e3 * (sum(cpu[name]) - sum(cpu[first])) / count,
            ratio_of(cpu[name], cpu[first]),
            ratio_of(wall[name], wall[first]),
        )
        for name in cpu
    ]


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return `sum(ours) / sum(theirs)`, and its standard error by a jackknife over blocks of `BLOCK`; 0 with one
    block."""
    blocks = range(0, len(ours), BLOCK)

    def without(at: int | None) -> float:
        kept = [i for i in range(len(ours)) if at is None or not at <= i < at + BLOCK]
        return sum(ours[i] for i in kept) / sum(theirs[i] for i in kept)

    if len(blocks) < 2:
        return Ratio(without(None), 0.0)
    left = [without(at) for at in blocks]
    mean = sum(left) / len(left)
    return Ratio(without(None), math.sqrt((len(left) - 1) / len(left) * sum((x - mean) ** 2 for x in left)))


def render(report: Report) -> str:
    """Format the report as a table for people."""
    rows = [
        (
            way.name,
            f"{way.cpu_ms:.1f}",
            f"{way.added_ms:+.1f}",
            f"{way.cpu.ratio:.3f} ± {way.cpu.error:.3f}",
            f"{way.wall.ratio:.3f} ± {way.wall.error:.3f}",
        )
        for way in report.ways
    ]
    lines = [
        f"a learner's step, {report.steps} batches of {report.tokens} sampled tokens, each way in turns",
        *table(("way", "CPU ms", "added", "CPU / plain", "wall / plain"), rows),
    ]
    return "\n".join(lines)


# -- in the job's process ----------------------------------------------------------------------------------------------


def train(job: Job, directory: Path) -> Spent:
    """Train every batch in each way, in turns."""
    from r3async.actors.ranks import LocalRank
    from r3async.learner import build_learner
    from r3async.learner.batch import build_cost_model
    from r3async.learner.trainer import Trainer
    from r3async.record.recording import RecordedStep, write_recorded_step

    configs = {name: config_from_dict(plain) for name, plain in job.configs.items()}
    some = next(iter(configs.values()))
    model = Path(some.model.path)
    cost = build_cost_model(msgspec.json.decode((model / "config.json").read_bytes()))
    backends = {name: build_learner(config, model) for name, config in configs.items()}

    def nothing(number: int, done: StepOutcome) -> None:
        pass

    def written(number: int, done: StepOutcome) -> None:
        episodes: list[Trajectory] = [t for group in done.groups for t in group]
        sizes = [len(group) for group in done.groups]
        write_recorded_step(directory, RecordedStep(number, number - 1, 0, done.digests, done.metrics, sizes), episodes)

    trainers = {
        name: Trainer(config, cost, LocalRank(config, backends[name]), bare._NoTrace(), None, lambda t: t)
        for name, config in configs.items()
    }
    write: dict[str, Callable[[int, StepOutcome], None]] = {
        name: nothing if config.observe.record == "off" else written for name, config in configs.items()
    }
    spent = Spent({}, {}, {}, {})
    for each in (spent.cpu, spent.wall, spent.write_cpu, spent.write_wall):
        each.update({name: [] for name in configs})
    names = list(configs)
    for at, groups in enumerate(bare.batches_of(some, Path(job.episodes))):
        progress(directory, f"batch {at + 1}")
        turn = at % len(names)
        for name in [*names[turn:], *names[:turn]]:
            gc.collect()
            trainer, cpu, wall = trainers[name], time.process_time(), time.perf_counter()
            done = trainer.train_step(at + 1, at, trainer.prepare_step(groups))
            made = time.process_time(), time.perf_counter()
            write[name](at + 1, done)
            ended = time.process_time(), time.perf_counter()
            if at >= job.warm_up:
                spent.cpu[name].append(made[0] - cpu)
                spent.wall[name].append(made[1] - wall)
                spent.write_cpu[name].append(ended[0] - made[0])
                spent.write_wall[name].append(ended[1] - made[1])
    for backend in backends.values():
        backend.close()
    return spent
