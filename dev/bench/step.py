"""The benchmark `bench step`: what served drift, a limit and a recording add to a learner's step, in turns on the same
episodes.

A run of the quickstart records what it trains on. Then one process has a learner for each way, and all of them train
every batch, one after the other in an order that rotates. A value is of one block of batches, which is as
long as the longest period of a way, and includes the writing of recordings, as if nothing ran beside it.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from dev.bench.jobs import PrintLine, report_progress, run_job, train_in_process
from dev.bench.report import Measurements
from r3async.config import Config, config_from_dict, config_to_dict, load_config

if TYPE_CHECKING:
    from r3async.data.tokens import Sample, Trajectory
    from r3async.learner.trainer import StepOutcome
from r3async.tools.replay import NullReporter

TIMEOUT_SECONDS = 900.0
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


class StepJob(msgspec.Struct, frozen=True):
    """The input of the learner's job.

    Attributes:
        configs: the configuration of each way.
        run_dir: the run whose recording has the batches.
        warm_up: number of batches that are not measured.
    """

    configs: dict[str, dict[str, Any]]
    run_dir: str
    warm_up: int


class SecondsSpent(msgspec.Struct, frozen=True):
    """CPU and wall seconds of a step and its recording, for each way and batch."""

    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]


def configure_run(seed: int, overrides: Sequence[str], *, quick: bool) -> Config:
    small = ("schedule.prompts_per_step=2", "schedule.group_size=4", "model.init.max_warm_steps=1") * quick
    return load_config("quickstart", [*small, f"seed={seed}", "evaluation.every_steps=0", *overrides], None)


def measure_step(steps: int, seed: int, quick: bool, print_line: PrintLine) -> Measurements:
    """Make the model, the run and its steps again in each way. Raises `BenchError`."""
    from r3async.tools.init_model import init_model

    steps = BLOCK if quick else math.ceil(steps / BLOCK) * BLOCK
    with tempfile.TemporaryDirectory(prefix="r3async-step-") as scratch:
        place = Path(scratch)
        init_model(place / "model", configure_run(seed, [], quick=quick), progress=print_line)
        model = f"model.path={place / 'model'}"
        # A whole block warms up, so that served drift is measured in the same steps of every later block.
        recorded = ["name=run", f"steps={steps + BLOCK}", "observe.record=full", model]
        rows = train_in_process(
            configure_run(seed, recorded, quick=quick), place / "run", timeout=TIMEOUT_SECONDS, print_line=print_line
        )
        configs = {
            name: config_to_dict(configure_run(seed, [*more, model], quick=quick)) for name, more in WAYS.items()
        }
        job = StepJob(configs, str(place / "run" / "run"), BLOCK)
        spent = run_job(
            f"{__name__}:train_each_way",
            job,
            SecondsSpent,
            place / "learner",
            timeout=TIMEOUT_SECONDS,
            print_line=print_line,
        )
    measured = summarize_blocks(spent)
    measured.facts["trained tokens a batch"] = f"{fmean(row['batch/trained_tokens'] for row in rows):.0f}"
    return measured


def summarize_blocks(spent: SecondsSpent) -> Measurements:
    """Return the figures of each way, one value for each block of batches; ratios are over the first way."""
    measured, first = Measurements(), next(iter(spent.cpu))
    for name, seconds in spent.cpu.items():
        for at in range(0, len(seconds), BLOCK):
            cpu, plain, wall, plain_wall = (
                sum(each[at : at + BLOCK]) for each in (seconds, spent.cpu[first], spent.wall[name], spent.wall[first])
            )
            count = min(BLOCK, len(seconds) - at)
            figures = {"CPU ms": 1e3 * cpu / count, "added ms": 1e3 * (cpu - plain) / count}
            measured.add_figures(name, figures | {"CPU / plain": cpu / plain, "wall / plain": wall / plain_wall})
    return measured


# -- in the job's process ----------------------------------------------------------------------------------------------


class _NoTrace:
    """A `RouteTracer` that traces nothing."""

    def should_trace(self, samples: Sequence[Sample], /) -> bool:
        return False

    def write_trace(self, step: int, samples: Sequence[Sample], result: Any, /) -> None:
        pass


def train_each_way(job: StepJob, directory: Path) -> SecondsSpent:
    """Train every batch in each way, in turns."""
    from r3async.actors.ranks import LocalRank
    from r3async.learner import build_learner
    from r3async.learner.batch import build_cost_model
    from r3async.learner.trainer import Trainer
    from r3async.record.recording import RecordedStep, find_recorded_steps, read_recorded_step, write_recorded_step

    configs = {name: config_from_dict(plain) for name, plain in job.configs.items()}
    model = Path(next(iter(configs.values())).model.path)
    cost = build_cost_model(msgspec.json.decode((model / "config.json").read_bytes()))
    backends = {name: build_learner(config, model) for name, config in configs.items()}

    def add_seconds(number: int, done: StepOutcome) -> None:
        episodes: list[Trajectory] = [t for group in done.groups for t in group]
        sizes = [len(group) for group in done.groups]
        write_recorded_step(directory, RecordedStep(number, number - 1, 0, done.digests, done.metrics, sizes), episodes)

    trainers = {
        name: Trainer(config, cost, LocalRank(config, backends[name]), _NoTrace(), NullReporter(), lambda t: t)
        for name, config in configs.items()
    }
    spent = SecondsSpent({name: [] for name in configs}, {name: [] for name in configs})
    names = list(configs)
    for at, path in enumerate(find_recorded_steps(Path(job.run_dir))):
        _, groups = read_recorded_step(path)
        report_progress(directory, f"batch {at + 1}")
        turn = at % len(names)
        for name in [*names[turn:], *names[:turn]]:
            gc.collect()
            trainer, cpu, wall = trainers[name], time.process_time(), time.perf_counter()
            done = trainer.train_step(at + 1, at, trainer.prepare_step(groups))
            if configs[name].observe.record != "off":
                add_seconds(at + 1, done)
            if at >= job.warm_up:
                spent.cpu[name].append(time.process_time() - cpu)
                spent.wall[name].append(time.perf_counter() - wall)
    for backend in backends.values():
        backend.close()
    return spent
