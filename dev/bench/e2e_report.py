"""The report of `bench e2e`: figures of one run, ratios of ours to a peer's, and of the pipeline to its parts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from dev.bench import bare
from dev.bench.jobs import table
from dev.bench.tree_cpu import TreeCpu
from r3async.config import Config

REWARDS = (0.6, 0.7, 0.8)
SMOOTH = 8
"""Number of steps whose mean reward has to reach a level."""


class Plan(msgspec.Struct, frozen=True):
    """The cases, runs and sizes of the benchmark.

    Attributes:
        peer_python: the Python of the peer's environment.
        peer_threads: torch threads of the peer; 0 for the faster of one and as many as there are cores, found by a
            trial.
        steps: steps of each run.
        settle: first steps of each run, which are left out of means.
        batches: measured batches of the bare parts.
        groups: groups per step in every case; 0 for the preset's.
        samples: samples per group in every case; 0 for the preset's.
    """

    cases: list[str]
    seeds: list[int]
    peer: str = "none"
    peer_python: str = ""
    peer_threads: int = 0
    steps: int = 200
    settle: int = 10
    batches: int = 8
    groups: int = 0
    samples: int = 0


class Side(msgspec.Struct, frozen=True):
    """The figures of one run.

    Attributes:
        cpu_seconds_per_step: CPU seconds of all its processes.
        by_role: CPU seconds per step of each process role.
        reward_last: mean reward of the last quarter of its steps.
        reward_mean: mean reward of all steps.
        seconds_to: seconds from the beginning of the first step, by the reward that was reached; None if it was not.
        others: number of cores that other processes kept busy.
    """

    seconds_per_step: float
    cpu_seconds_per_step: float
    episodes_per_second: float
    tokens_per_step: float
    reward_first: float
    reward_last: float
    reward_mean: float
    seconds_to: dict[str, float | None]
    by_role: dict[str, float]
    others: float
    load: float
    facts: dict[str, float] = {}


class Pair(msgspec.Struct, frozen=True):
    seed: int
    ours: Side
    theirs: Side | None = None


class Case(msgspec.Struct, frozen=True):
    """A case's runs and the ratios of ours to theirs; a ratio without figures is None.

    Attributes:
        settings: the settings that the two sides do not share.
    """

    pairs: list[Pair]
    step_ratio: float | None = None
    cpu_ratio: float | None = None
    episodes_ratio: float | None = None
    seconds_to_06_ratio: float | None = None
    seconds_to_07_ratio: float | None = None
    seconds_to_08_ratio: float | None = None
    settings: dict[str, str] = {}


class Own(msgspec.Struct, frozen=True):
    """The quickstart against its bare parts.

    Idle shares are of the settled steps' time. The lag is the slowest event loop's own lag, in which the loop was
    computing, the median over rows.

    Attributes:
        cpu_per_token_ratio: CPU of everything but the learner per generated token, over that of a bare `AsyncLLM` that
            plays the same tasks.
        learner_cpu_ratio: CPU of the learner's process per trained token, over that of a bare loop on such batches.
        pipeline_cpu_ratio: CPU of both together over that of both bare parts.
        trainer_cpu_ratio: CPU of the trainer's step alone over that of the bare loop.
    """

    cpu_per_token_ratio: float
    learner_cpu_ratio: float
    pipeline_cpu_ratio: float
    trainer_cpu_ratio: float
    learner_idle: float
    engine_idle: float
    lag_p99_ms: float
    bare_engine_us: float
    """CPU microseconds of the bare engine per sampled token."""
    bare_learner_us: float
    """CPU microseconds of the bare learner per trained token."""
    by_seed: list[dict[str, float]]
    runs: list[Side]


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    benchmark: str
    plan: Plan
    a: Case | None = None
    b: Case | None = None
    c: Case | None = None
    own: Own | None = None
    seconds: float = 0.0


def side_of(
    began: float,
    marks: Sequence[tuple[float, float]],
    cpu: TreeCpu,
    config: Config,
    plan: Plan,
    tokens: float,
    load: float,
    facts: Mapping[str, float],
) -> Side:
    """Compute the figures of one run.

    Args:
        began: unix time at which the first step began.
        marks: for each step, the time at which it ended and its mean reward.
    """
    start, end = marks[plan.settle - 1][0], marks[-1][0]
    steps = len(marks) - plan.settle
    roles = cpu.between(start, end)
    episodes = config.schedule.prompts_per_step * config.schedule.group_size
    return Side(
        seconds_per_step=(end - start) / steps,
        cpu_seconds_per_step=sum(roles.values()) / steps,
        episodes_per_second=episodes * steps / (end - start),
        tokens_per_step=tokens,
        reward_first=marks[0][1],
        reward_last=fmean(reward for _, reward in marks[-max(1, len(marks) // 4) :]),
        reward_mean=fmean(reward for _, reward in marks),
        seconds_to={str(level): seconds_to(level, began, marks) for level in REWARDS},
        by_role={role: seconds / steps for role, seconds in roles.items()},
        others=cpu.others(start, end),
        load=load,
        facts=dict(facts),
    )


def seconds_to(level: float, began: float, marks: Sequence[tuple[float, float]]) -> float | None:
    """Return the seconds from `began` until the mean reward of `SMOOTH` steps had reached `level`, or None if it never
    did."""
    for last in range(SMOOTH, len(marks) + 1):
        if fmean(reward for _, reward in marks[last - SMOOTH : last]) >= level:
            return marks[last - 1][0] - began
    return None


def compare_sides(pairs: Sequence[Pair], settings: Mapping[str, str]) -> Case:
    """Return the median ratios over the seeds whose two runs both have the figure."""

    def ratio(figure: Any) -> float | None:
        both = [(figure(p.ours), figure(p.theirs)) for p in pairs if p.theirs is not None]
        found = [ours / theirs for ours, theirs in both if ours is not None and theirs]
        return median(found) if found else None

    return Case(
        list(pairs),
        step_ratio=ratio(lambda side: side.seconds_per_step),
        cpu_ratio=ratio(lambda side: side.cpu_seconds_per_step),
        episodes_ratio=ratio(lambda side: side.episodes_per_second),
        **{f"seconds_to_{int(10 * x):02d}_ratio": ratio(lambda side, x=x: side.seconds_to[str(x)]) for x in REWARDS},
        settings=dict(settings),
    )


def own_ratios(side: Side, engine: bare.Engine, learner: bare.Learner) -> dict[str, float]:
    """Return the figures of one seed, by their names in `Own`. As many tokens are generated as are trained."""
    played, trained = engine.cpu_seconds / engine.tokens, learner.bare_cpu_seconds / learner.tokens
    learning = side.by_role.get("learner", 0.0) / side.tokens_per_step
    whole = side.cpu_seconds_per_step / side.tokens_per_step
    return {
        "cpu_per_token_ratio": (whole - learning) / played,
        "learner_cpu_ratio": learning / trained,
        "pipeline_cpu_ratio": whole / (played + trained),
        "trainer_cpu_ratio": learner.trainer_cpu_seconds / learner.bare_cpu_seconds,
        "bare_engine_us": 1e6 * played,
        "bare_learner_us": 1e6 * trained,
        **{name: side.facts[name] for name in ("learner_idle", "engine_idle", "lag_p99_ms")},
    }


def render(report: Report) -> str:
    """Format the report as tables for people."""
    rows, lines = [], []
    for name in ("a", "b", "c"):
        case: Case | None = getattr(report, name)
        for pair in case.pairs if case is not None else ():
            for who, side in (("ours", pair.ours), ("theirs", pair.theirs)):
                if side is not None:
                    rows.append((f"{name} {who}", pair.seed, *_figures(side)))
    for seed, side in zip(report.plan.seeds, report.own.runs if report.own else (), strict=False):
        rows.append(("own", seed, *_figures(side)))
    heads = ["run", "seed", "s / step", "CPU s / step", "episodes/s", "tokens / step", "reward", "others"]
    lines += table([*heads, *(f"s to {level}" for level in REWARDS)], rows)
    for name in ("a", "b", "c"):
        case = getattr(report, name)
        if case is not None and case.step_ratio is not None:
            lines.append(
                f"{name}: ours over theirs: seconds a step {case.step_ratio:.2f}, CPU a step {case.cpu_ratio:.2f}, "
                f"episodes/s {case.episodes_ratio:.2f}, seconds to 0.7 {case.seconds_to_07_ratio or float('nan'):.2f} "
                f"({'; '.join(f'{who}: {what}' for who, what in case.settings.items())})"
            )
    if report.own is not None:
        own = {k: v for k, v in msgspec.structs.asdict(report.own).items() if isinstance(v, float)}
        lines.append("own: " + ", ".join(f"{name} {value:.3g}" for name, value in own.items()))
    return "\n".join(lines)


def _figures(side: Side) -> tuple[str, ...]:
    return (
        f"{side.seconds_per_step:.3f}",
        f"{side.cpu_seconds_per_step:.3f}",
        f"{side.episodes_per_second:.1f}",
        f"{side.tokens_per_step:.0f}",
        f"{side.reward_first:.2f} → {side.reward_last:.2f}",
        f"{side.others:.1f}",
        *("-" if (s := side.seconds_to[str(level)]) is None else f"{s:.0f}" for level in REWARDS),
    )
