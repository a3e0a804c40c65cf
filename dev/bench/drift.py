"""The benchmark `bench drift`: how far served drift is above replayed drift, by token age, and how the trust region
answers a burst.

Real Ray, ZeroMQ, vLLM and Megatron. A run of the quickstart with old samples makes `calm` steps. Each way then resumes
a copy of it, from the same weights and moments, with a learning rate `factor` times as high. In the calm run and in the
way without a target every token is probed, so their served drift is measured and not estimated. Beside it, the
controller runs on a simulated plant (`step_response`).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from dev.bench.jobs import BenchError, Say, table
from dev.bench.step_response import Plant, Response, respond, response
from dev.bench.training import is_made, metrics_of, train_apart
from r3async.config import Config, RolloutKLConfig, load_config
from r3async.learner.drift import TrustRegion
from r3async.learner.metrics import REPLAYED_DRIFT_METRIC, SERVED_DRIFT_METRIC, STALENESS_BINS

TIMEOUT = 1200.0
EVERY = (1, 4)
"""Steps from one measurement of served drift to the next, in simulation; each value is one case."""
PLANTS = [(power, half, delay) for power, half in ((1.0, 0.05), (2.0, 0.05), (0.5, 0.01)) for delay in (1, 4, 8)]


class Plan(msgspec.Struct, frozen=True):
    """The runs and steps of the benchmark.

    Attributes:
        seeds: seeds of the runs; empty for the simulation alone.
        calm: steps before the burst.
        burst: steps from the burst on.
        lr: learning rate before the burst.
        settle: first steps of a phase that no table of ages includes, because there is nothing old yet.
    """

    seeds: list[int]
    calm: int = 40
    burst: int = 40
    lr: float = 3e-4
    factor: float = 10.0
    staleness: int = 4
    target: float = 0.05
    groups: int = 16
    samples: int = 8
    settle: int = 8
    warm_steps: int | None = None

    def ways(self) -> dict[str, list[str]]:
        """Return the settings of each way from the burst on. `soft` is the controller alone: its limit is too high to
        be reached."""
        target = f"algorithm.rollout_kl.target={self.target}"
        return {
            "fixed": ["algorithm.rollout_kl.probe_share=1"],
            "soft": [target, "algorithm.rollout_kl.limit=1e6"],
            "soft and hard": [target],
        }


class AtAge(msgspec.Struct, frozen=True):
    """Means over steps of the drift of tokens of one age.

    Attributes:
        steps: number of steps with tokens of that age.
        above: served drift less replayed drift.
        error: standard error of `above` over steps, which are taken to be independent.
    """

    age: int
    steps: int
    replayed: float
    served: float
    above: float
    error: float
    ratio: float


class Phase(msgspec.Struct, frozen=True):
    """Drift by token age in one phase, over the steps of all seeds together; `all` is over all tokens."""

    name: str
    ages: list[AtAge]
    all: AtAge


class Burst(msgspec.Struct, frozen=True):
    """The steps of one run from the burst on.

    Attributes:
        response: the response of its served drift over the target.
        shortened: number of steps that the limit shortened.
        reward: mean reward of the last ten steps.
        before: mean reward of the last ten steps before the burst.
    """

    way: str
    seed: int
    response: Response
    mean: float
    shortened: int
    coef: float
    reward: float
    before: float


class Simulated(msgspec.Struct, frozen=True):
    """A simulated response; `every` is the number of steps from one measurement of served drift to the next, and 0 if
    the coefficient stays at its floor."""

    plant: Plant
    every: int
    response: Response


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    plan: Plan
    phases: list[Phase]
    bursts: list[Burst]
    simulated: list[Simulated]


def configure(plan: Plan, seed: int, model: Path | None, way: Sequence[str] = (), *, burst: bool) -> Config:
    rate, steps = (plan.lr * plan.factor, plan.calm + plan.burst) if burst else (plan.lr, plan.calm)
    sizes = {
        "steps": steps,
        "seed": seed,
        "name": "run",
        "learner.lr": rate,
        "schedule.max_staleness": plan.staleness,
        "schedule.prompts_per_step": plan.groups,
        "schedule.group_size": plan.samples,
        "checkpoint.every_steps": plan.calm,
        "evaluation.every_steps": 0,
        "routing.trace": "off",
        "algorithm.rollout_kl.probe_every": 1,
        "generator.concurrency": min(512, (plan.staleness + 1) * plan.groups * plan.samples),
    }
    if model is not None:
        sizes["model.path"] = str(model)
    elif plan.warm_steps is not None:
        sizes["model.init.max_warm_steps"] = plan.warm_steps
    return load_config("quickstart", [*(f"{name}={value}" for name, value in sizes.items()), *way])


def run(plan: Plan, say: Say, *, keep: Path | None = None) -> Report:
    """Simulate, and make the runs of each seed.

    With `keep`, runs are made in that directory and stay. Complete runs found there are not made again; interrupted
    ones start again. Raises `BenchError`.
    """
    bursts: list[Burst] = []
    rows: dict[str, list[list[dict[str, Any]]]] = {"calm": [], "burst": []}
    with tempfile.TemporaryDirectory(prefix="r3async-drift-") as scratch:
        place = keep or Path(scratch)
        for seed in plan.seeds:
            calm, ways = _runs(plan, seed, place / f"seed-{seed}", say)
            rows["calm"].append(calm[plan.settle :])
            rows["burst"].append(ways["fixed"][plan.settle :])
            bursts += [burst_of(name, seed, plan.target, calm, after) for name, after in ways.items()]
    phases = [phase_of(name, [row for each in some for row in each]) for name, some in rows.items() if plan.seeds]
    return Report("drift", plan, phases, bursts, simulate(plan.target))


def _runs(plan: Plan, seed: int, place: Path, say: Say) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Return the rows of the calm steps, and each way's rows from the burst on."""
    from r3async.tools.init_model import init_model

    model = place / "model"
    if not model.is_dir():
        init_model(model, configure(plan, seed, None, burst=False), progress=say)
    probing = plan.ways()["fixed"]
    calm = configure(plan, seed, model, probing, burst=False)
    if not is_made(calm, place / "calm"):
        say(f"seed {seed}: {plan.calm} calm steps")
        train_apart(calm, place / "calm", timeout=TIMEOUT, say=say)
    before, after = _checked(metrics_of(calm, place / "calm"), plan.calm), {}
    for name, way in plan.ways().items():
        directory, config = place / name.replace(" ", "-"), configure(plan, seed, model, way, burst=True)
        if not is_made(config, directory):
            say(f"seed {seed}, {name}: {plan.burst} steps with {plan.factor:g} times the learning rate")
            shutil.copytree(place / "calm" / calm.name, directory / config.name, symlinks=True)
            train_apart(config, directory, timeout=TIMEOUT, say=say)
        after[name] = _checked(metrics_of(config, directory), plan.calm + plan.burst)[plan.calm :]
    return before, after


def _checked(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise BenchError(f"a run made {len(rows)} of {steps} steps")
    return rows


def burst_of(
    way: str, seed: int, target: float, calm: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> Burst:
    """Summarize `rows`, the steps from the burst on."""
    drift = [row[SERVED_DRIFT_METRIC] for row in rows if row.get("rollout_kl/served_tokens")]
    if len(drift) < len(rows):
        raise BenchError(f"{way}: served drift was measured in {len(drift)} of {len(rows)} steps")
    return Burst(
        way,
        seed,
        response([each / target for each in drift]),
        fmean(drift),
        sum(row["optimizer/step_share"] < 1 for row in rows),
        max(row["rollout_kl/coef"] for row in rows),
        fmean(row["reward/mean"] for row in rows[-10:]),
        fmean(row["reward/mean"] for row in calm[-10:]),
    )


def phase_of(name: str, rows: Sequence[Mapping[str, Any]]) -> Phase:
    """Return both drifts of the tokens of each age, over `rows`."""
    found = [_at(age, rows, f"_staleness_{age}") for age in range(STALENESS_BINS)]
    everything = _at(-1, rows, "")
    assert everything is not None
    return Phase(name, [each for each in found if each is not None], everything)


def _at(age: int, rows: Sequence[Mapping[str, Any]], part: str) -> AtAge | None:
    names = REPLAYED_DRIFT_METRIC + part, SERVED_DRIFT_METRIC + part
    pairs = [(row[names[0]], row[names[1]]) for row in rows if all(row.get(name) is not None for name in names)]
    if not pairs:
        return None
    replayed, served = (fmean(each) for each in zip(*pairs, strict=True))
    above = [b - a for a, b in pairs]
    error = stdev(above) / math.sqrt(len(above)) if len(above) > 1 else 0.0
    return AtAge(age, len(pairs), replayed, served, fmean(above), error, served / replayed if replayed else math.inf)


def simulate(target: float) -> list[Simulated]:
    """Simulate every plant with the controller, and with the coefficient at its floor."""
    made = []
    for power, half, delay in PLANTS:
        plant = Plant(power, half, delay)
        fixed = respond(TrustRegion(RolloutKLConfig()), plant, target)
        made.append(Simulated(plant, 0, fixed))
        for every in EVERY:
            region = TrustRegion(RolloutKLConfig(target=target))
            made.append(Simulated(plant, every, respond(region, plant, target, every=every)))
    return made


def render(report: Report) -> str:
    """Format the report as tables for people."""
    return "\n\n".join("\n".join([title, *lines]) for title, lines in tables(report).items())


def tables(report: Report) -> dict[str, list[str]]:
    """Return the lines of each table, by its title."""
    made = {f"drift by age, {phase.name} steps": table(AGE_HEADS, age_rows(phase)) for phase in report.phases}
    if report.bursts:
        title = f"learning rate x {report.plan.factor:g}, target {report.plan.target:g}"
        made[title] = table(("way", "seed", *HEADS, "mean", "shortened", "coef", "reward"), burst_rows(report))
    made["simulated: steps from a burst to 8 times the target on"] = table(
        ("plant", "delay", "measured", *HEADS), simulated_rows(report.simulated)
    )
    return made


AGE_HEADS = ("age", "steps", "replayed", "served", "difference", "ratio")
HEADS = ("above 1.5", "tamed", "worst 25")


def age_rows(phase: Phase) -> list[tuple[object, ...]]:
    return [
        (
            "all" if each.age < 0 else f"{each.age}{'+' * (each.age == STALENESS_BINS - 1)}",
            each.steps,
            f"{each.replayed:.2e}",
            f"{each.served:.2e}",
            f"{each.above:.1e} ± {each.error:.1e}",
            f"{each.ratio:.2f}",
        )
        for each in [*phase.ages, phase.all]
    ]


def burst_rows(report: Report) -> list[tuple[object, ...]]:
    return [
        (
            burst.way,
            burst.seed,
            *_told(burst.response),
            f"{burst.mean / report.plan.target:.2f}",
            burst.shortened,
            f"{burst.coef:.2g}",
            f"{burst.before:.2f} → {burst.reward:.2f}",
        )
        for burst in report.bursts
    ]


def simulated_rows(simulated: Sequence[Simulated]) -> list[tuple[object, ...]]:
    return [
        (
            f"power {s.plant.power:g}, half {s.plant.half:g}",
            s.plant.delay,
            "fixed" if not s.every else "each step" if s.every == 1 else f"one of {s.every}",
            *_told(s.response),
        )
        for s in simulated
    ]


def _told(found: Response) -> tuple[object, ...]:
    return found.above, "never" if found.tamed is None else found.tamed, f"{found.worst:.2f}"
