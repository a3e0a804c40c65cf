"""The benchmark `bench replay-map`: what routing replay is worth to training, against how far engine and learner are
apart.

A point of the map is a tiny model trained for some steps with `routing.replay` off, learner (R2) and rollout (R3), with
several seeds. Equal seeds have equal start models and tasks, so differences between modes are paired. One thing at a
time varies from the base point. Every run is an `InProcessRun`: the learner's real step on what an engine in the same
process sampled.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from dev.bench.jobs import Say, table
from r3async.config import Config, ConfigError, config_from_dict

MODES = ("off", "learner", "rollout")
WINDOW = 10
"""Number of steps whose mean is one point of a curve."""
MODELS = 3
"""Number of start models; seeds take turns with them."""
SAMPLES = 8
"""Number of episodes of a group."""
COLLAPSED = 0.5
"""Share of a run's best window of reward below which a run has collapsed at its end."""


class Setting(msgspec.Struct, frozen=True):
    """The settings of one point; the defaults are the base point.

    `noise`, `learner_noise`, `precision` and `margin` are those of `Disturbance`, `age` is the age of every trained
    token in versions, and the rest are settings of a run and of its start model.
    """

    noise: float = 0.1
    learner_noise: float = 0.0
    precision: str = "float32"
    margin: float = 0.0
    gate_std: float = 0.1
    experts: int = 8
    top_k: int = 2
    age: int = 1
    minibatches: int = 1
    epochs: int = 1
    lr: float = 5e-4
    steps: int = 100
    groups: int = 4
    policy_loss: str = "truncated_pg"
    anchor: str = "rollout"
    warm_reward: float = 0.5
    probe_share: float = 0.1


class Point(msgspec.Struct, frozen=True):
    """A point of the map; `name` says how it differs from the base point."""

    name: str
    setting: Setting
    modes: tuple[str, ...] = MODES


FIRST = Setting(steps=1, groups=32, probe_share=1.0)
"""One step on many episodes: the difference of engine and learner while their weights are equal. R3 reports own routing
too."""
UNCORRECTED = Setting(policy_loss="ppo", anchor="recomputed", minibatches=4)
"""PPO on log-probs that the learner recomputes, the setting of R3's paper (arXiv 2510.11370): the loss ignores the
engine's policy."""


def _of(base: Setting, label: str, modes: tuple[str, ...], *changes: dict[str, Any]) -> list[Point]:
    names = [" ".join(f"{k}={v}" for k, v in change.items()) for change in changes]
    settings = [msgspec.structs.replace(base, **change) for change in changes]
    return [Point(f"{label}: {name}", s, modes) for name, s in zip(names, settings, strict=True)]


def _each(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


AXES: Mapping[str, Sequence[Point]] = {
    "apart": [
        *_of(FIRST, "step 1", ("rollout",), *_each("noise", 0.0, 0.01, 0.03, 0.1, 0.3, 1.0)),
        *_of(FIRST, "step 1", ("rollout",), {"noise": 0.0, "precision": "bfloat16"}),
        *_of(FIRST, "step 1", ("rollout",), {"noise": 0.0, "precision": "fp8_kv"}),
    ],
    "gate": _of(FIRST, "step 1", ("rollout",), *_each("gate_std", 0.02, 0.5, 1.0)),
    "experts": _of(FIRST, "step 1", ("rollout",), {"experts": 32}, {"experts": 32, "top_k": 8}),
    "noise": _of(Setting(), "trained", MODES, *_each("noise", 0.1, 0.3, 1.0)),
    "precision": _of(Setting(), "trained", MODES, {"noise": 0.0, "precision": "fp8_kv"}),
    "age": _of(Setting(), "trained", MODES, *_each("age", 4, 8)),
    "updates": _of(Setting(), "trained", MODES, {"minibatches": 4}, {"minibatches": 4, "epochs": 2}),
    "lr": _of(Setting(), "trained", MODES, {"noise": 0.3, "lr": 1e-3}),
    "horizon": _of(Setting(), "trained", MODES, {"noise": 0.3, "steps": 400}),
    "uncorrected": _of(UNCORRECTED, "uncorrected", MODES, *_each("noise", 0.3, 1.0), {"noise": 1.0, "lr": 1e-3}),
    "margin": _of(Setting(age=8), "trained", ("rollout",), *_each("margin", 0.1, 0.5)),
}
"""Points by the name of their axis; settings that a point does not name are those of `Setting()`."""


class Run(msgspec.Struct, frozen=True):
    """One run, a line of the data file. Each value of a curve is the mean of `WINDOW` steps.

    `replayed` and `served` are the k3 of the rollout policy to the learner, with the routes that the loss sees and with
    the learner's own (`rollout_kl/k3`, `rollout_kl/served_k3`).
    """

    point: str
    setting: Setting
    replay: str
    seed: int
    reward: list[float]
    replayed: list[float]
    served: list[float]
    agreement: list[float]
    seconds: float

    @property
    def end(self) -> float:
        """The mean reward of the last quarter."""
        return fmean(self.reward[-max(1, len(self.reward) // 4) :])

    @property
    def collapsed(self) -> bool:
        return self.reward[-1] < COLLAPSED * max(self.reward)


KEPT = {
    "reward": "reward/mean",
    "replayed": "rollout_kl/k3",
    "served": "rollout_kl/served_k3",
    "agreement": "routing/agreement",
}


class Difference(msgspec.Struct, frozen=True):
    """Differences of paired runs, R3's value less the other's.

    Attributes:
        half_width: half the width of the mean's 95 % interval.
        detectable: the true difference that this many pairs would find with a probability of 0.8 (two-sided test at 5
            %).
    """

    pairs: int
    mean: float
    half_width: float
    detectable: float


class Row(msgspec.Struct, frozen=True):
    """One point in one mode, with means over seeds: `reward` of the last quarter of a run, KL and agreement of whole
    runs. `gain` is the gain of R3's reward over this mode's."""

    point: str
    replay: str
    seeds: int
    reward: float
    replayed: float
    served: float
    agreement: float
    collapsed: int
    gain: Difference | None


class Report(msgspec.Struct, frozen=True):
    runs: list[Run]
    rows: list[Row]
    seconds: float


def config_of(setting: Setting, replay: str, seed: int) -> Config:
    """Return a configuration as `r3async train` takes it, for the quickstart's game with one turn."""
    return config_from_dict(
        {
            "seed": seed,
            "steps": setting.steps,
            "model": {
                "init": {
                    "seed": seed % MODELS,
                    "hidden_size": 64,
                    "layers": 2,
                    "experts": setting.experts,
                    "top_k": setting.top_k,
                    "expert_hidden_size": 32,
                    "gate_std": setting.gate_std,
                    "rope_theta": 5.0,
                    "warm_reward": setting.warm_reward,
                }
            },
            "env": {"name": "reverse-text", "args": {"letters": 4, "turns": 1}},
            "episode": {"max_turns": 1, "max_new_tokens": 7, "max_prompt_tokens": 32, "max_total_tokens": 64},
            "generator": {"dtype": "float32"},
            "schedule": {
                "max_staleness": setting.age,
                "prompts_per_step": setting.groups,
                "group_size": SAMPLES,
                "minibatches_per_step": setting.minibatches,
                "epochs_per_step": setting.epochs,
            },
            "learner": {
                "backend": "torch",
                "dtype": "float32",
                "lr": setting.lr,
                "warmup_steps": 5,
                "max_tokens_per_micro_batch": 8192,
                "threads": 1,
                "share_prefixes": False,
            },
            # Measure replay alone: no term limits the drift.
            "algorithm": {
                "policy_loss": setting.policy_loss,
                "anchor": setting.anchor,
                "rollout_kl": {"coef": 0.0, "probe_share": setting.probe_share, "probe_every": 1},
            },
            "routing": {"replay": replay, "min_recorded_fraction": 0.0, "trace": "off"},
        }
    )


def chosen(axes: Sequence[str]) -> list[Point]:
    """Return the points of the axes. Raises `ConfigError` for an unknown axis."""
    if unknown := [name for name in axes if name not in AXES]:
        raise ConfigError(f"--axes {unknown[0]!r} must be of {', '.join(AXES)}")
    return [point for name in axes for point in AXES[name]]


def quickly() -> list[Point]:
    """Return one point with too few steps to be meaningful."""
    return [Point("quick", Setting(noise=0.3, steps=3, groups=2, age=2, warm_reward=0.0, probe_share=1.0))]


def run(points: Sequence[Point], seeds: Sequence[int], say: Say, data: Path | None = None) -> Report:
    """Measure what is not yet in the file `data`, and add it there, one line per run. Raises `ConfigError`."""
    began = time.monotonic()
    done = read(data) if data is not None and data.exists() else []
    have = {(r.setting, r.replay, r.seed) for r in done}
    wanted = [
        (point, seed, mode)
        for point in points
        for seed in seeds
        for mode in point.modes
        if (point.setting, mode, seed) not in have
    ]
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        for number, (point, seed, mode) in enumerate(wanted, 1):
            made = one(point, mode, seed, Path(scratch), say)
            done.append(made)
            if data is not None:
                with data.open("ab") as file:
                    file.write(msgspec.json.encode(made) + b"\n")
            say(
                f"[{number}/{len(wanted)}] {point.name}, replay {mode}, seed {seed}: reward {made.reward[0]:.2f} to "
                f"{made.end:.2f}, served KL {fmean(made.served):.2g}, {made.seconds:.0f} s"
            )
    names = {point.setting for point in points}
    runs = [r for r in done if r.setting in names and r.seed in seeds]
    return Report(runs, rows(runs), time.monotonic() - began)


def one(point: Point, replay: str, seed: int, scratch: Path, say: Say) -> Run:
    """Train once, from a model that is made in `scratch` unless it exists."""
    from dev.bench.replay_training import Disturbance, InProcessRun
    from r3async.tools.init_model import init_or_copy_model

    began, s = time.monotonic(), point.setting
    config = config_of(s, replay, seed)
    path = scratch / f"{seed % MODELS}-{s.gate_std:g}-{s.experts}-{s.top_k}-{s.warm_reward:g}"
    if not path.exists():
        init_or_copy_model(path, config, say)
    disturbance = Disturbance(s.noise, s.learner_noise, s.precision, s.margin)
    metrics = []
    for step in InProcessRun(config, path, disturbance).steps():
        # Without replay nothing is probed: the loss sees the served routing.
        metrics.append({KEPT["served"]: step[KEPT["replayed"]]} | step if replay == "off" else step)
    curves = {name: curve(metrics, metric) for name, metric in KEPT.items()}
    return Run(point.name, s, replay, seed, **curves, seconds=round(time.monotonic() - began, 1))


def curve(metrics: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return the means of `WINDOW` steps each, over the steps that have the metric: in a few steps with small
    minibatches no episode is probed. Raises `ValueError` if a window has none."""
    windows = [metrics[i : i + WINDOW] for i in range(0, len(metrics), WINDOW)]
    return [float(f"{fmean([m[name] for m in window if name in m]):.4g}") for window in windows]


def read(data: Path) -> list[Run]:
    """Read the runs of a data file. Raises `ConfigError` if the file holds something else."""
    try:
        return [msgspec.json.decode(line, type=Run) for line in data.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{data} is not a file of this benchmark's runs: {error}") from error


def rows(runs: Iterable[Run]) -> list[Row]:
    """Return one row for each point and mode, in the order of the runs."""
    by: dict[str, dict[str, dict[int, Run]]] = {}
    for r in runs:
        by.setdefault(r.point, {}).setdefault(r.replay, {})[r.seed] = r
    out = []
    for point, modes in by.items():
        for mode in (m for m in MODES if m in modes):
            of, r3 = modes[mode], modes.get("rollout", {})
            pairs = [r3[seed].end - r.end for seed, r in of.items() if seed in r3]
            out.append(
                Row(
                    point,
                    mode,
                    len(of),
                    fmean(r.end for r in of.values()),
                    fmean(fmean(r.replayed) for r in of.values()),
                    fmean(fmean(r.served) for r in of.values()),
                    fmean(fmean(r.agreement) for r in of.values()),
                    sum(r.collapsed for r in of.values()),
                    difference(pairs) if mode != "rollout" and len(pairs) > 1 else None,
                )
            )
    return out


STUDENT = {1: (12.706, 1.376), 2: (4.303, 1.061), 3: (3.182, 0.978), 4: (2.776, 0.941), 5: (2.571, 0.920)}
"""Quantiles 0.975 and 0.8 of Student's t, by degrees of freedom."""
STUDENT |= {6: (2.447, 0.906), 7: (2.365, 0.896), 8: (2.306, 0.889), 9: (2.262, 0.883), 14: (2.145, 0.868)}


def difference(values: Sequence[float]) -> Difference:
    """Summarize at least two paired differences."""
    n = len(values)
    least = max(d for d in STUDENT if d < n)  # of fewer degrees of freedom, where those are not listed: wider
    wide, power = STUDENT[least]
    error = stdev(values) / math.sqrt(n)
    return Difference(n, fmean(values), wide * error, (wide + power) * error)


def render(report: Report) -> str:
    """Format the report as a table for people, with one row per point and mode."""
    return "\n".join(table(HEADS, cells(report.rows)))


HEADS = (
    "point",
    "replay",
    "seeds",
    "agreement",
    "KL, replayed",
    "KL, served",
    "reward, last quarter",
    "collapsed",
    "R3 - this, 95 % interval (detectable)",
)


def cells(found: Sequence[Row]) -> list[list[str]]:
    return [
        [
            r.point,
            r.replay,
            str(r.seeds),
            f"{r.agreement:.3f}",
            f"{r.replayed:.2g}",
            f"{r.served:.2g}",
            f"{r.reward:.3f}",
            str(r.collapsed),
            "" if r.gain is None else f"{r.gain.mean:+.3f} ± {r.gain.half_width:.3f} ({r.gain.detectable:.3f})",
        ]
        for r in found
    ]
