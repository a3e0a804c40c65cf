"""The benchmark `bench e2e`: whole runs against a peer, from one model, and the quickstart alone.

Cases: `a`, one turn of eight letters (the preset `reverse-text`); `b`, several turns (`guess`);
`c`, three turns with slow tools (`slow_tools.py`); `own`, the quickstart without a peer: where its
processor time goes. In `a`, `b` and `c` our run and the peer's take turns, seed by seed, from one
model, with the same reward, tasks per step, episodes per task and optimizer. Our run has the
schedule of its preset; the peer (TRL, `peer_trl.py`) is synchronous. A ratio is ours over theirs,
one for each seed.

Wall time is meaningful only on a quiet machine: `cores of others` is the number of cores that other
processes kept busy meanwhile.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from dev.bench.jobs import BenchError, PrintLine, start_process, train_in_process
from dev.bench.report import Measurements
from dev.bench.tree_cpu import TreeCpu
from r3async.config import Config, ConfigError, config_from_dict, config_to_dict, load_config
from r3async.envs.factory import BUILTIN_ENVIRONMENTS
from r3async.record.reading import read_json_objects
from r3async.record.timeline import read_timeline

TIMEOUT_SECONDS = 1800.0
COMPARISON_CASES = ("a", "b", "c", "own")
PEER_EXPERTS = "grouped_mm"
"""The peer's implementation of experts in transformers: 0.444 CPU seconds a step on CPU, against
0.452 with `eager`."""
TRIAL_STEPS = 12
TRIAL_SETTLE = 4
REWARD_LEVELS = (0.6, 0.7, 0.8)
SMOOTHED_STEPS = 8
"""Number of steps whose mean reward has to reach a level."""
LOOP_ROLES = ("conductor", "learner", "generator")
COMPARED_FIGURES = (
    "seconds a step",
    "CPU s a step",
    "episodes a second",
    *(f"seconds to {level}" for level in REWARD_LEVELS),
)
"""Figures of which ours is divided by the peer's."""

RunFigures = dict[str, float]
"""The figures of one run, by name."""


class ComparisonPlan(msgspec.Struct, frozen=True):
    """The cases, runs and sizes of the benchmark.

    Attributes:
        peer_python: the Python of the peer's environment.
        peer_threads: torch threads of the peer; 0 for the faster of one and as many as there are
            cores, found by a trial.
        steps: steps of each run.
        settle: first steps of each run, which are left out of means.
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
    groups: int = 0
    samples: int = 0


# -- configurations --------------------------------------------------------------------------------

SLOW_TOOLS = {
    "env": {
        "name": "dev.bench.slow_tools:SlowTools",
        "args": {
            "letters": 4,
            "turns": 3,
            "observation": 40,
            "median": 0.4,
            "sigma": 1.0,
            "longest": 8.0,
        },
    },
    "episode": {
        "max_turns": 3,
        "max_new_tokens": 8,
        "max_prompt_tokens": 208,
        "max_total_tokens": 216,
    },
    "schedule": {"max_staleness": 4, "prompts_per_step": 16, "group_size": 8, "window": 1},
    # Every episode that the slots allow is played at once: the run is limited by its bound, not by
    # its engine's batch.
    "generator": {"concurrency": 5 * 16 * 8},
}


def configure_run(case: str, plan: ComparisonPlan, seed: int, model: Path | None) -> Config:
    """Return the configuration of our run of a case."""
    base = config_to_dict(load_config("reverse-text" if case == "a" else "quickstart"))
    if case == "b":
        base["env"] |= {"name": "guess", "args": {"highest": 16}}
        base["model"]["init"] |= {"warm_reward": 0.5}
        base["episode"] |= {
            "max_turns": 5,
            "max_new_tokens": 4,
            "max_prompt_tokens": 96,
            "max_total_tokens": 100,
        }
        base["algorithm"] |= {"credit": "trajectory"}
        # At 5e-4 the reward falls with weights one version old, and rises with the newest ones.
        base["learner"] |= {"lr": 2e-4}
    elif case == "c":
        base["model"]["init"] |= {"warm_reward": 0.3}
        for section, settings in SLOW_TOOLS.items():
            base[section] |= settings
    base["steps"] = plan.steps
    base["seed"] = seed
    base["name"] = "run"
    base["model"]["path"] = str(model or "")
    base["routing"]["trace"] = "off"
    sizes = {"prompts_per_step": plan.groups, "group_size": plan.samples}
    base["schedule"] |= {name: size for name, size in sizes.items() if size}
    return config_from_dict(base)


def shrink_plan(plan: ComparisonPlan) -> ComparisonPlan:
    """Return a plan that exercises the code path; its figures mean nothing."""
    return msgspec.structs.replace(
        plan, seeds=plan.seeds[:1], steps=4, settle=1, groups=2, samples=4, peer_threads=1
    )


def peer_job(config: Config, threads: int, steps: int) -> dict[str, Any]:
    """Return the peer's job with the settings of our run."""
    name = config.env.name
    learner = config.learner
    return {
        "model": config.model.path,
        "env": BUILTIN_ENVIRONMENTS.get(name, name),
        "env_args": config.env.args,
        "steps": steps,
        "groups": config.schedule.prompts_per_step,
        "samples": config.schedule.group_size,
        "lr": learner.lr,
        "warmup_steps": learner.warmup_steps,
        "betas": list(learner.betas),
        "eps": learner.eps,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "max_new_tokens": config.episode.max_new_tokens,
        "max_turns": config.episode.max_turns,
        "seed": config.seed,
        "threads": threads,
        "experts_implementation": PEER_EXPERTS,
    }


def compare_runs(
    plan: ComparisonPlan, print_line: PrintLine, *, keep: Path | None = None
) -> Measurements:
    """Make the models, then all runs, seed by seed, our run and the peer's in turns.

    With `keep`, models and runs are made in that directory and stay; those found there are not made
    again. Raises `BenchError`, and `ConfigError` for an unknown case.
    """
    unknown = [case for case in plan.cases if case not in COMPARISON_CASES]
    if unknown:
        raise ConfigError(f"--cases {unknown[0]!r}: there are {', '.join(COMPARISON_CASES)}")
    if plan.peer != "none" and any(case != "own" for case in plan.cases):
        check_peer(plan)
    measured = Measurements(facts={"steps": str(plan.steps)})
    with tempfile.TemporaryDirectory(prefix="r3async-e2e-") as scratch:
        for case in plan.cases:
            place = (keep or Path(scratch)) / case
            model = _make_model(case, plan, place, print_line)
            _run_case(case, plan, model, place, measured, print_line)
    return measured


def _make_model(case: str, plan: ComparisonPlan, place: Path, print_line: PrintLine) -> Path:
    from r3async.tools.init_model import init_model

    model = place / "model"
    if not model.is_dir():
        settings = config_to_dict(configure_run(case, plan, 0, None))
        if "median" in settings["env"]["args"]:
            settings["env"]["args"] |= {"median": 0.0}  # warming up the model waits for no tool
        init_model(model, config_from_dict(settings), progress=print_line)
    return model


def _run_case(
    case: str,
    plan: ComparisonPlan,
    model: Path,
    place: Path,
    measured: Measurements,
    print_line: PrintLine,
) -> None:
    threads = plan.peer_threads
    has_peer = plan.peer != "none" and case != "own"
    if has_peer:
        threads = threads or fastest_threads(
            configure_run(case, plan, plan.seeds[0], model), plan, place, print_line
        )
        measured.facts["TRL"] = (
            f"GRPOTrainer, transformers' generate, {threads} torch threads, sdpa, {PEER_EXPERTS}"
        )
    for index, seed in enumerate(plan.seeds):
        config = configure_run(case, plan, seed, model)
        sides = dict[str, RunFigures]()
        who = ["r3async", "TRL"] if has_peer else ["r3async"]
        for name in who if index % 2 == 0 else who[::-1]:
            print_line(f"{case}, seed {seed}: {name}")
            directory = place / f"{name}-{seed}"
            if name == "r3async":
                sides[name] = make_our_run(config, directory, plan, print_line)
            else:
                sides[name] = make_peer_run(config, directory, plan, threads)
            print_line(f"{case}, seed {seed}: {name} {sides[name]['seconds a step']:.3f} s a step")
        for name in who:
            measured.add_figures(f"{case}, {name}", sides[name])
        if has_peer:
            measured.add_figures(
                f"{case}, r3async / TRL", compare_sides(sides["r3async"], sides["TRL"])
            )


def compare_sides(ours: RunFigures, theirs: RunFigures) -> RunFigures:
    """Return the ratios of the figures that both runs have."""
    return {
        name: ours[name] / theirs[name]
        for name in COMPARED_FIGURES
        if name in ours and theirs.get(name)
    }


# -- figures of a run ------------------------------------------------------------------------------


def make_our_run(
    config: Config, directory: Path, plan: ComparisonPlan, print_line: PrintLine
) -> RunFigures:
    """Make the run unless it exists, and return its figures."""
    done = directory / "side.json"
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=RunFigures)
    with TreeCpu() as cpu:
        rows = train_in_process(config, directory, timeout=TIMEOUT_SECONDS, print_line=print_line)
    waits = [
        s.start
        for s in read_timeline(directory / config.name)
        if (s.who, s.what) == ("learner", "wait")
    ]
    marks = [(float(row["time"]), float(row["reward/mean"])) for row in rows]
    settled = rows[plan.settle :]
    tokens = fmean(r["batch/trained_tokens"] for r in settled)
    side = figures_of(min(waits), marks, cpu, config, plan, tokens) | {
        "learner idle": sum(r["timing/wait_seconds"] for r in settled)
        / (marks[-1][0] - marks[plan.settle - 1][0]),
        "engine idle": fmean(r["generator/engine_idle_share"] for r in settled),
        "own loop lag p99, ms": median(
            max(r[f"lag/{who}_own_p99_ms"] for who in LOOP_ROLES) for r in settled
        ),
        "oldest token, versions": max(r["staleness/max"] for r in rows),
        "engine paused": settled[-1]["weights/paused_share"],
    }
    done.write_bytes(msgspec.json.encode(side))
    return side


def figures_of(
    began: float,
    marks: Sequence[tuple[float, float]],
    cpu: TreeCpu,
    config: Config,
    plan: ComparisonPlan,
    tokens: float,
) -> RunFigures:
    """Compute the figures of one run.

    Args:
        began: unix time at which the first step began.
        marks: for each step, the time at which it ended and its mean reward.
    """
    start = marks[plan.settle - 1][0]
    end = marks[-1][0]
    steps = len(marks) - plan.settle
    roles = cpu.seconds_between(start, end)
    episodes = config.schedule.prompts_per_step * config.schedule.group_size
    reached = {f"seconds to {level}": seconds_to(level, began, marks) for level in REWARD_LEVELS}
    return {
        "seconds a step": (end - start) / steps,
        "CPU s a step": sum(roles.values()) / steps,
        "episodes a second": episodes * steps / (end - start),
        "tokens a step": tokens,
        "reward, first step": marks[0][1],
        "reward, last quarter": fmean(reward for _, reward in marks[-max(1, len(marks) // 4) :]),
        "reward, all steps": fmean(reward for _, reward in marks),
        **{name: seconds for name, seconds in reached.items() if seconds is not None},
        "cores of others": cpu.cores_of_others(start, end),
        **{f"CPU s a step, {role}": seconds / steps for role, seconds in roles.items()},
    }


def seconds_to(level: float, began: float, marks: Sequence[tuple[float, float]]) -> float | None:
    """Return the seconds from `began` until the mean reward of `SMOOTH` steps had reached `level`,
    or None if it never did."""
    for last in range(SMOOTHED_STEPS, len(marks) + 1):
        if fmean(reward for _, reward in marks[last - SMOOTHED_STEPS : last]) >= level:
            return marks[last - 1][0] - began
    return None


# -- the peer's run --------------------------------------------------------------------------------


def check_peer(plan: ComparisonPlan) -> None:
    """Raise `ConfigError` with install instructions if the peer cannot run."""
    if plan.peer != "trl":
        raise ConfigError(f"--peer {plan.peer!r}: there are none, trl")
    if not plan.peer_python or not Path(plan.peer_python).exists():
        site = sysconfig.get_path("purelib")
        place = f"PEER/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        raise ConfigError(
            "--peer trl needs --peer-python: the Python of an environment that has TRL, on top "
            f"of this one's torch and transformers. To make it: `{sys.executable} -m venv PEER "
            f"&& echo {site} > {place}/base.pth && PEER/bin/pip install trl`; then "
            "--peer-python PEER/bin/python"
        )


def fastest_threads(
    config: Config, plan: ComparisonPlan, place: Path, print_line: PrintLine
) -> int:
    """Return the number of torch threads with which the peer makes a few steps fastest."""
    seconds = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        directory = place / f"trial-{threads}"
        marks = peer_marks(config, directory, plan, threads, TRIAL_STEPS)[TRIAL_SETTLE:]
        seconds[threads] = median(
            after["time"] - before["time"] for before, after in pairwise(marks)
        )
        print_line(f"the peer with {threads} threads: {seconds[threads]:.3f} s a step")
    return min(seconds, key=lambda threads: seconds[threads])


def peer_marks(
    config: Config, directory: Path, plan: ComparisonPlan, threads: int, steps: int
) -> list[dict[str, Any]]:
    """Return the rows of the peer's run; the first is of step 0, the beginning. An existing run
    is not made again."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = directory / "rows.jsonl"
    log = directory / "log.txt"
    if not (directory / "done.json").exists():
        (directory / "job.json").write_bytes(msgspec.json.encode(peer_job(config, threads, steps)))
        root = Path(__file__).resolve().parents[2]
        command = [plan.peer_python, "-P", "-m", "dev.bench.peer_trl", str(directory)]
        with start_process(
            command, log, PYTHONPATH=str(root), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
        ) as process:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
        if process.returncode:
            raise BenchError(
                f"the peer failed with exit code {process.returncode}:\n{log.read_text()[-3000:]}"
            )
    marks = read_json_objects(rows)
    if len(marks) != steps + 1:
        raise BenchError(f"the peer made {len(marks) - 1} of {steps} steps; see {log}")
    return marks


def make_peer_run(
    config: Config, directory: Path, plan: ComparisonPlan, threads: int
) -> RunFigures:
    done = directory / "side.json"
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=RunFigures)
    with TreeCpu("peer") as cpu:
        rows = peer_marks(config, directory, plan, threads, plan.steps)
    marks = [(float(row["time"]), float(row["reward"])) for row in rows[1:]]
    tokens = (rows[-1]["tokens"] - rows[plan.settle]["tokens"]) / (plan.steps - plan.settle)
    side = figures_of(float(rows[0]["time"]), marks, cpu, config, plan, tokens)
    done.write_bytes(msgspec.json.encode(side))
    return side
