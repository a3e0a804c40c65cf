"""A plan file and the runs that it describes. Pure, except for reading the file and the presets that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.config import (
    Config,
    ConfigError,
    Section,
    did_you_mean,
    flatten_section,
    load_command_config,
    load_config,
    parse_override,
)
from r3async.config.load import nest_overrides
from r3async.config.paths import resolve_relative_paths
from r3async.config.section import SHORTHAND_KEYS, Seed
from r3async.data.metrics import METRICS, find_metric, find_new_name
from r3async.untrusted import MalformedError, decode_toml

RESERVED_SETTINGS = {
    "name": "each run has a name of its own",
    "seed": "list them in `seeds`",
    "resume": "a sweep always resumes",
    "model.init.seed": "list them in `initial_models`",
}
"""Settings that a plan's runs get in another way, and how."""


class SweepPlan(Section):
    """The contents of a plan file. Values of `settings`, `variants` and `grid` are nested or have dotted keys."""

    title: str = ""
    preset: str = "quickstart"
    """Name of a preset, or a TOML file beside the plan or in the current directory."""
    seeds: list[Seed] = msgspec.field(default_factory=lambda: [0, 1, 2, 3, 4])
    initial_models: list[int | str] = msgspec.field(default_factory=list)
    """Initial models: numbers for `model.init.seed`, texts for `model.path`, or empty for the preset's own model."""
    model_per_seed: bool = False
    """Pair the first seed with the first initial model, the second with the second, and so on; not each with each."""
    metrics: list[str] = msgspec.field(default_factory=lambda: ["reward/mean"])
    """Metrics that the report compares."""
    baseline: str = ""
    """The variant with which the others are compared; by default the first."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of every run."""
    variants: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Additional settings of each variant, by its name."""
    grid: dict[str, list[Any]] = msgspec.field(default_factory=dict)
    """Values of each setting: each is combined with each, and with each variant."""

    def check_values(self) -> None:
        for name, numbers in (("seeds", self.seeds), ("initial_models", self.initial_models)):
            if len(set(map(str, numbers))) < len(numbers):
                raise ValueError(f"`{name}` = {numbers} has one twice")
        if not self.seeds or not self.metrics:
            raise ValueError(f"`{'metrics' if self.seeds else 'seeds'}` is empty: name at least one")
        if len({type(each) for each in self.initial_models}) > 1:
            raise ValueError("`initial_models` are numbers (`model.init.seed`), or all of them texts (`model.path`)")
        if self.model_per_seed and len(self.initial_models) != len(self.seeds):
            raise ValueError(
                f"`model_per_seed` needs as many `initial_models` as `seeds`: there are {len(self.initial_models)} and "
                f"{len(self.seeds)}"
            )
        for name in self.variants:
            if "," in name:
                raise ValueError(
                    f"`variants`: {name!r} has a comma, and `--only` takes several names with commas between"
                )
        if self.baseline and self.baseline not in self.variants:
            hint = did_you_mean(self.baseline, self.variants, f"there are: {', '.join(self.variants) or 'none'}")
            raise ValueError(f"`baseline` = {self.baseline!r} is no variant; {hint}")
        for name in self.metrics:
            if now := find_new_name(name):
                raise ValueError(f"`metrics`: no run has {name!r}: it is {now!r} now")
            groups = {known.partition("/")[0] for known in METRICS if "/" in known}
            if name.partition("/")[0] in groups and find_metric(name).description == name:
                raise ValueError(
                    f"`metrics`: no run has {name!r}; {did_you_mean(name, METRICS, 'see docs/metrics.md')}"
                )
        for key, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"`grid.{key}` must be a list of values")


class PlannedPoint(NamedTuple):
    """A point of a sweep: settings that are repeated with every seed.

    Attributes:
        base_point: Name of the point that it is compared with; its own name for that one.
        settings: The settings in which points differ, by dotted key.
    """

    name: str
    base_point: str
    variant: str
    settings: dict[str, Any]


class PlannedRun(NamedTuple):
    """A run of a plan.

    Attributes:
        name: Name of its directory in the sweep's.
        model: Its number among `initial_models`.
        overrides: Overrides of `preset`, as `r3async train` takes them.
    """

    name: str
    point: str
    seed: int
    model: int
    preset: str
    overrides: list[str]

    def make_config(self) -> Config:
        """Make the run's configuration. Raises `ConfigError` that names the run."""
        try:
            path = load_config(self.preset, self.overrides, None).model.path
            if path and any(text.startswith("model.init.seed=") for text in self.overrides):
                raise ConfigError(
                    f"`initial_models` are numbers, for models that are made, and `model.path` = {path!r} is one that is there: "
                    "name directories in `initial_models` instead"
                )
            return load_command_config(self.preset, self.overrides)
        except ConfigError as error:
            raise ConfigError(f"run {self.name}: {error}") from error


def read_sweep_plan(path: Path) -> SweepPlan:
    """Read a plan file. Raises `ConfigError` that names the file, the key and the fix."""
    try:
        data = decode_toml(path.read_bytes())
    except MalformedError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    names = SweepPlan.__struct_fields__
    for key in data:
        if key not in names:
            hint = did_you_mean(key, names, f"valid here: {', '.join(names)}", lambda near: f"`{near}`")
            raise ConfigError(f"{path}: unknown key `{key}`: {hint}. Settings of a run are in [settings]")
    try:
        plan = msgspec.convert(data, SweepPlan)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    preset = path.parent / plan.preset
    if plan.preset.endswith(".toml") and preset.is_file():
        plan = msgspec.structs.replace(plan, preset=str(preset))
    try:
        if path.parent.resolve() != Path.cwd():
            plan = msgspec.structs.replace(
                plan,
                settings=resolve_relative_paths(nest_overrides(plan.settings), path.parent),
                variants={
                    name: resolve_relative_paths(nest_overrides(given), path.parent)
                    for name, given in plan.variants.items()
                },
                grid={
                    key: [_resolve_path(key, value, path.parent) for value in values]
                    for key, values in plan.grid.items()
                },
                initial_models=[_resolve_path("model.path", each, path.parent) for each in plan.initial_models],
            )
        list_points(plan)
        for run in list_runs(plan)[:1]:
            run.make_config()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return plan


def _resolve_path(key: str, value: Any, directory: Path) -> Any:
    """Resolve a setting's value relative to the plan's directory."""
    if key in SHORTHAND_KEYS and not isinstance(value, str):
        return value
    long = {"data": "env.args.path", "reward": "env.args.reward"}.get(key, key)
    return flatten_section(resolve_relative_paths(nest_overrides({key: value}), directory)).get(long, value)


def list_points(plan: SweepPlan) -> list[PlannedPoint]:
    """Combine each variant with each combination of the grid. Raises `ConfigError` for a setting not allowed here."""
    variants = {name: _flatten_settings(f"variants.{name}", given) for name, given in plan.variants.items()} or {"": {}}
    grid = [_pair_values(key, values) for key, values in plan.grid.items()]
    first = plan.baseline or next(iter(variants))
    found = []
    for name, given in variants.items():
        for combination in product(*grid):
            at = dict(combination)
            if both := given.keys() & at.keys():
                raise ConfigError(f"`{min(both)}` is in the grid, and in variants.{name}: leave it out of one")
            against = (first, at) if len(variants) > 1 else (name, dict(values[0] for values in grid))
            found.append(PlannedPoint(_name_point(name, at), _name_point(*against), name, given | at))
    return found


def list_runs(plan: SweepPlan, overrides: Sequence[str] = ()) -> list[PlannedRun]:
    """List all runs, every point of the first seed and model before the next, so that the runs so far are comparable.

    Raises `ConfigError`.

    Args:
        overrides: Overrides on top of the plan's settings.
    """
    points = list_points(plan)
    given = _flatten_settings("settings", plan.settings)
    over = _flatten_settings("", nest_overrides(overrides))
    for key in over:
        if any(key in point.settings for point in points):
            raise ConfigError(f"`{key}` is what the plan's runs differ in: it cannot be set for all of them")
    models: list[int | str | None] = [*plan.initial_models] or [None]
    starts = list(product(enumerate(models), plan.seeds))
    if plan.model_per_seed:
        starts = list(zip(enumerate(models), plan.seeds, strict=True))
    names = _make_directory_names([point.name for point in points])
    runs = []
    for ((number, model), seed), point in product(starts, points):
        start = {} if model is None else {"model.init.seed" if isinstance(model, int) else "model.path": model}
        settings = {**given, **over, **point.settings, **start, "seed": seed}
        name = f"{names[point.name]}-s{seed}" + (f"-m{number}" if len(models) > 1 else "")
        texts = [f"{key}={_format_override(key, value)}" for key, value in settings.items()]
        runs.append(PlannedRun(name, point.name, seed, number, plan.preset, [f"name={json.dumps(name)}", *texts]))
    return runs


def choose_runs(
    plan: SweepPlan, runs: Sequence[PlannedRun], seeds: str = "", models: str = "", only: str = ""
) -> list[PlannedRun]:
    """Choose the runs with one of these seeds, numbers of initial models, and variants.

    Each is a list with commas between; empty for all. Raises `ConfigError`.
    """
    numbers = _parse_choices("--seeds", seeds, map(str, plan.seeds), "seed")
    starts = _parse_choices("--models", models, map(str, range(len(plan.initial_models) or 1)), "initial model")
    names = _parse_choices("--only", only, plan.variants, "variant")
    wanted = {point.name for point in list_points(plan) if not plan.variants or point.variant in names}
    return [run for run in runs if str(run.seed) in numbers and str(run.model) in starts and run.point in wanted]


def _parse_choices(option: str, text: str, choices: Iterable[str], noun: str) -> list[str]:
    """Return the choices that an option names. Raises `ConfigError` for one that the plan lacks."""
    known = list(choices)
    names = [name.strip() for name in text.split(",")] if text else known
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"there are: {', '.join(known) or 'none'}")
            raise ConfigError(f"{option} {text!r}: the plan has no {noun} {name!r}; {hint}")
    return names


def _flatten_settings(where: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings to dotted keys. Raises `ConfigError` for one that a plan's runs get in another way."""
    found = flatten_section(nest_overrides(settings))
    for key, how in RESERVED_SETTINGS.items():
        if key in found:
            raise ConfigError(f"`{where}.{key}`: {how}" if where else f"`{key}` cannot be set for a sweep: {how}")
    return found


def _pair_values(key: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Pair a setting of the grid with each of its values."""
    for value in values:
        _flatten_settings("grid", {key: value})
    return [(key, value) for value in values]


def _name_point(variant: str, grid: Mapping[str, Any]) -> str:
    ends = [key.rpartition(".")[2] for key in grid]
    short = [end if ends.count(end) == 1 else key for end, key in zip(ends, grid, strict=True)]
    values = [
        f"{key}={_format_override(key, value).strip(chr(34))}" for key, value in zip(short, grid.values(), strict=True)
    ]
    return ", ".join([variant, *values] if variant else values) or "run"


def _make_directory_names(names: Sequence[str]) -> dict[str, str]:
    """Return a plain and distinct directory name for each name."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:80] or "point"
        taken = found.values()
        found[name] = next(each for each in _iter_numbered_names(plain) if each not in taken)
    return found


def _iter_numbered_names(name: str) -> Iterator[str]:
    yield name
    for number in range(2, 10**6):
        yield f"{name}-{number}"


def _format_override(key: str, value: Any) -> str:
    """Format a value for an override in JSON, which is valid TOML for the values of settings. Raises `ConfigError`."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        if parse_override(f"key={text}")[1] == value:
            return text
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"`{key}` = {value!r} cannot stand in a plan: put it into a TOML file, and name that as `preset`")
