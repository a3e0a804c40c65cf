"""The benchmark `bench overlap`: the whole pipeline with slow tools, on-policy (S = 0) against larger staleness bounds.

Real Ray, ZeroMQ, vLLM and Megatron; only the time that the environment takes is scripted (`overlap_env.SlowTools`).
Every run starts from the same model and makes the same number of steps of the same number of episodes. Figures leave
out the first `settle` steps, in which the pipeline fills.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from dev.bench.jobs import BenchError, Say, table
from dev.bench.training import is_made, metrics_of, train_apart
from r3async.config import Config, config_from_dict, config_to_dict, load_config
from r3async.schedule.admission import compute_staleness_bound
from r3async.tools.capacity.cluster import Model, predict
from r3async.tools.capacity.estimate import calibrate

TIMEOUT = 1200.0
CALIBRATED_ON = 1
"""The `max_staleness` of the run whose durations calibrate a prediction."""
SEEDS = 30
"""Number of predicted runs of each bound, enough that their mean has little noise."""


class Plan(msgspec.Struct, frozen=True):
    """The settings of the measurement. Latencies are in seconds (`overlap_env.SlowTools`)."""

    staleness: list[int]
    steps: int = 24
    settle: int = 8
    prompts_per_step: int = 16
    group_size: int = 8
    window: int = 1
    letters: int = 4
    turns: int = 3
    observation: int = 40
    latency_median: float = 0.4
    latency_sigma: float = 1.0
    latency_max: float = 8.0
    warm_reward: float = 0.3
    seed: int = 0


class Run(msgspec.Struct, frozen=True):
    """The figures of one bound: seconds per step of wall time, ages in versions, and shares of the measured time."""

    max_staleness: int
    seconds_per_step: float
    speedup: float
    """Speedup over the first run of the plan, by seconds per step."""
    learner_idle_fraction: float
    engine_idle_fraction: float
    """Share of time in which the engine had no request."""
    max_age: int
    mean_age: float
    age_bound: int
    update_seconds: float
    pause_seconds: float
    trained_tokens_per_second: float
    reward_first: float
    """Mean reward of the first step, before anything was learned."""
    reward_last: float
    """Mean reward of the last quarter of the steps."""
    reward_gain_per_million_trained_tokens: float


class Predicted(msgspec.Struct, frozen=True):
    """Seconds per step of one bound; `error` is the prediction's, as a share of the measured value."""

    max_staleness: int
    measured: float
    predicted: float
    error: float


class Prediction(msgspec.Struct, frozen=True):
    """The cluster model's prediction for every bound, from the durations of the run with `CALIBRATED_ON` alone; `model`
    is the calibrated model."""

    calibrated_on: int
    model: Model
    points: list[Predicted]


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    plan: Plan
    runs: list[Run]
    speedup: float
    """Speedup of the run with S = 4, or of the last run."""
    prediction: Prediction | None = None
    """Prediction of the cluster model, only with `--predict`."""


def configure(plan: Plan, max_staleness: int, model: Path | None = None) -> Config:
    """Return a run's configuration: the quickstart's, with slow tools."""
    env = {
        "letters": plan.letters,
        "turns": plan.turns,
        "median": plan.latency_median,
        "sigma": plan.latency_sigma,
        "longest": plan.latency_max,
        "observation": plan.observation,
    }
    config = config_to_dict(load_config("quickstart"))
    tokens = plan.turns * (plan.observation + 4 * plan.letters + 8) + 16
    config["steps"], config["seed"], config["name"] = plan.steps, plan.seed, "run"
    config["env"] |= {"name": "dev.bench.overlap_env:SlowTools", "args": env}
    config["model"]["path"] = str(model or "")
    config["model"]["init"] |= {"warm_reward": plan.warm_reward}
    config["episode"] |= {
        "max_turns": plan.turns,
        "max_new_tokens": 2 * plan.letters,
        "max_prompt_tokens": tokens,
        "max_total_tokens": tokens + 2 * plan.letters,
    }
    config["schedule"] |= {
        "max_staleness": max_staleness,
        "prompts_per_step": plan.prompts_per_step,
        "group_size": plan.group_size,
        "window": plan.window,
    }
    # Every episode that the slots allow is played at once, so that a run is limited by its bound and not by its
    # engine's batch.
    config["generator"]["concurrency"] = (max_staleness + 1) * plan.prompts_per_step * plan.group_size
    config["routing"]["trace"] = "off"
    return config_from_dict(config)


def run(plan: Plan, say: Say, *, keep: Path | None = None, predicting: bool = False) -> Report:
    """Make the model, then one run for each bound, one after the other. Raises `BenchError`.

    Args:
        keep: directory in which everything is made and stays. Complete runs found there are not made again; interrupted
            ones start again.
        predicting: also make a `Prediction`.
    """
    if predicting and CALIBRATED_ON not in plan.staleness:
        raise BenchError(f"a prediction is calibrated on S = {CALIBRATED_ON}: --staleness needs it")
    with tempfile.TemporaryDirectory(prefix="r3async-overlap-") as scratch:
        place = keep or Path(scratch)
        runs = _runs(plan, place, say)
        prediction = _predicted(plan, runs, place) if predicting else None
    chosen = next((r for r in runs if r.max_staleness == 4), runs[-1])
    return Report("overlap", plan, runs, chosen.speedup, prediction)


def _runs(plan: Plan, place: Path, say: Say) -> list[Run]:
    from r3async.tools.init_model import init_model

    model = place / "model"
    if not model.is_dir():
        quick = msgspec.structs.replace(plan, latency_median=0.0)  # nobody waits while the model is warmed up
        init_model(model, configure(quick, 0), progress=say)
    runs: list[Run] = []
    for max_staleness in plan.staleness:
        directory = place / f"s{max_staleness}"
        config = configure(plan, max_staleness, model)
        if not is_made(config, directory):
            say(f"S = {max_staleness}: {config.steps} steps")
            train_apart(config, directory, timeout=TIMEOUT, say=say)
        done = summarize(metrics_of(config, directory), plan, config, runs[0].seconds_per_step if runs else None)
        runs.append(done)
        say(
            f"S = {max_staleness}: {done.seconds_per_step:.2f} s a step, learner idle {done.learner_idle_fraction:.0%}, "
            f"oldest token {done.max_age} of {done.age_bound}"
        )
    return runs


def _predicted(plan: Plan, runs: Sequence[Run], place: Path) -> Prediction:
    measured = {r.max_staleness: r.seconds_per_step for r in runs}
    config = configure(plan, CALIBRATED_ON, place / "model")
    return predict_all(measured, place / f"s{CALIBRATED_ON}" / config.name, config, plan.settle)


def predict_all(measured: Mapping[int, float], run_dir: Path, config: Config, settle: int) -> Prediction:
    """Predict the seconds per step of every bound. Raises `CalibrationError`.

    Args:
        measured: measured seconds per step by bound.
        run_dir: directory of the run with `CALIBRATED_ON`.
        config: configuration of that run.
        settle: number of its first steps to leave out.
    """
    model = calibrate(run_dir, config, settle)
    points = []
    for bound, seconds in sorted(measured.items()):
        slots = (bound + 1) * model.prompts_per_step * model.group_size
        settings = msgspec.structs.replace(model, max_staleness=bound, places=slots)
        made = fmean(
            predict(settings, steps=config.steps, settle=settle, seed=seed, ends=True).seconds_per_step
            for seed in range(SEEDS)
        )
        points.append(Predicted(bound, seconds, made, made / seconds - 1))
    return Prediction(CALIBRATED_ON, model, points)


def summarize(rows: Sequence[dict[str, Any]], plan: Plan, config: Config, base: float | None) -> Run:
    """Compute the figures of one run. `base`: seconds per step for the speedup; None for the run itself."""
    if len(rows) != plan.steps:
        raise BenchError(f"a run made {len(rows)} of {plan.steps} steps")
    settled = rows[plan.settle :]
    elapsed = settled[-1]["time"] - rows[plan.settle - 1]["time"]
    seconds = elapsed / len(settled)
    wait = sum(r["learner/wait_seconds"] for r in settled)
    work = sum(r["learner/step_seconds"] + r["weights/snapshot_seconds"] for r in settled)
    trained = sum(r["batch/trained_tokens"] for r in rows)
    first = rows[0]["reward/mean"]
    last = fmean(r["reward/mean"] for r in rows[-max(1, len(rows) // 4) :])
    return Run(
        max_staleness=config.schedule.max_staleness,
        seconds_per_step=seconds,
        speedup=(base or seconds) / seconds,
        learner_idle_fraction=wait / max(wait + work, 1e-9),
        engine_idle_fraction=fmean(r["generator/engine_idle_share"] for r in settled),
        max_age=int(max(r["staleness/max"] for r in rows)),
        mean_age=fmean(r["staleness/mean"] for r in settled),
        age_bound=compute_staleness_bound(config.schedule),
        update_seconds=fmean(r["weights/update_seconds"] for r in settled),
        pause_seconds=fmean(r["weights/pause_seconds"] for r in settled),
        trained_tokens_per_second=sum(r["batch/trained_tokens"] for r in settled) / elapsed,
        reward_first=first,
        reward_last=last,
        reward_gain_per_million_trained_tokens=(last - first) / (trained / 1e6),
    )


def render(report: Report) -> str:
    """Format the report as tables for people."""
    heads = ["S", "s / step", "speedup", "learner idle", "engine idle", "max age", "bound", "pause s"]
    rows = [
        (
            r.max_staleness,
            f"{r.seconds_per_step:.2f}",
            f"{r.speedup:.2f}",
            f"{r.learner_idle_fraction:.0%}",
            f"{r.engine_idle_fraction:.0%}",
            r.max_age,
            r.age_bound,
            f"{r.pause_seconds:.3f}",
            f"{r.reward_first:.2f} → {r.reward_last:.2f}",
            f"{r.reward_gain_per_million_trained_tokens:.2f}",
        )
        for r in report.runs
    ]
    lines = ["the whole pipeline with slow tools", *table([*heads, "reward", "gain / M tokens"], rows)]
    if report.prediction is not None:
        lines += ["", f"predicted from the durations of S = {report.prediction.calibrated_on} alone"]
        points = [
            (p.max_staleness, f"{p.measured:.2f}", f"{p.predicted:.2f}", f"{p.error:+.0%}")
            for p in report.prediction.points
        ]
        lines += table(("S", "measured s / step", "predicted", "error"), points)
    return "\n".join(lines)
