"""A plan file and the runs that it describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.config import Config, ConfigError, flatten_section, load_command_config
from r3async.config.load import nest_overrides


class SweepPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a plan file. Settings are nested or have dotted keys.

    Attributes:
        metrics: What is compared.
        preset: Name of a preset, or a TOML file.
        initial_models: Values of `model.init.seed`, one for each seed; empty for the preset's own.
        baseline: The variant with which the others are compared; by default the first.
        settings: Settings of every run.
        variants: Further settings of each variant.
        grid: Values of settings: each is combined with each, and with each variant.
    """

    seeds: list[int]
    metrics: list[str]
    title: str = ""
    preset: str = "quickstart"
    initial_models: list[int] = []
    baseline: str = ""
    settings: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {}
    grid: dict[str, list[Any]] = {}


class SweepPoint(NamedTuple):
    """Settings that are run with every seed, and the name of the point they are compared with."""

    name: str
    base: str
    settings: dict[str, Any]


class PlannedRun(NamedTuple):
    """A run of a plan, with the overrides of the plan's preset that `r3async train` takes."""

    name: str
    point: str
    seed: int
    overrides: list[str]


def read_sweep_plan(path: Path) -> SweepPlan:
    """Read a plan file and validate each of its runs. Raises `ConfigError`."""
    try:
        plan = msgspec.toml.decode(path.read_bytes(), type=SweepPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if plan.initial_models and len(plan.initial_models) != len(plan.seeds):
        raise ConfigError(f"{path}: `initial_models` and `seeds` must be equally many")
    if plan.baseline and plan.baseline not in plan.variants:
        raise ConfigError(f"{path}: `baseline` = {plan.baseline!r} is none of the variants")
    for run in list_runs(plan):
        make_config(plan, run)
    return plan


def make_config(plan: SweepPlan, run: PlannedRun) -> Config:
    """Make the run's configuration. Raises `ConfigError` that names the run."""
    try:
        return load_command_config(plan.preset, run.overrides)
    except ConfigError as error:
        raise ConfigError(f"run {run.name}: {error}") from error


def list_points(plan: SweepPlan) -> list[SweepPoint]:
    """Combine each variant with each combination of the grid."""
    variants = plan.variants or {"": {}}
    combinations = [
        dict(zip(plan.grid, values, strict=True)) for values in product(*plan.grid.values())
    ]
    base_variant = plan.baseline or next(iter(variants))
    points = []
    for variant, settings in variants.items():
        for combination in combinations:
            # Variants are compared at the same place of the grid; without any, its places are.
            base = combination if len(variants) > 1 else combinations[0]
            points.append(
                SweepPoint(
                    _name_point(variant, combination),
                    _name_point(base_variant, base),
                    flatten_section(nest_overrides(settings)) | combination,
                )
            )
    return points


def list_runs(plan: SweepPlan) -> list[PlannedRun]:
    """List all runs, every point of a seed before the next seed."""
    shared = flatten_section(nest_overrides(plan.settings))
    runs = []
    for number, seed in enumerate(plan.seeds):
        for point in list_points(plan):
            name = f"{_make_directory_name(point.name)}-s{seed}"
            settings = shared | point.settings
            if plan.initial_models:
                name += f"-m{number}"
                settings["model.init.seed"] = plan.initial_models[number]
            settings["seed"] = seed
            overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
            runs.append(
                PlannedRun(name, point.name, seed, [f"name={json.dumps(name)}", *overrides])
            )
    return runs


def _name_point(variant: str, combination: Mapping[str, Any]) -> str:
    values = [f"{key.rpartition('.')[2]}={json.dumps(value)}" for key, value in combination.items()]
    return ", ".join([variant, *values] if variant else values) or "run"


def _make_directory_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")
