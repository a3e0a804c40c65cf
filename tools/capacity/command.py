"""The commands `r3async plan PRESET --capacity` and `--published`: predict a cluster and print the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from r3async.config import Config, ConfigError, load_config
from r3async.world.files import replace_file

from ..targets import name_target
from .cluster import Model, predict
from .estimate import HARDWARE, CalibrationError, calibrate, estimate
from .published import CASES, markdown, reproduce
from .report import lines, picture, sweep

Say = Callable[[str], object]


class Settings(msgspec.Struct, frozen=True):
    """The options of `--capacity`.

    Attributes:
        generators: Numbers of generators to compare; empty for the preset's own.
        staleness: Bounds to compare; empty for the preset's own.
        ranks: Ranks of the learner; 0 for the preset's own.
        lost: Seconds between two failures of a generator.
        run: Directory of a run whose measured durations replace the estimates.
    """

    generators: tuple[int, ...] = ()
    staleness: tuple[int, ...] = ()
    ranks: int = 0
    hardware: str = "h100"
    lost: float = 0.0
    steps: int = 32
    seed: int = 0
    run: Path | None = None
    picture: Path | None = None


def capacity_command(
    preset: str, overrides: Sequence[str], settings: Settings, *, json: bool = False, say: Say, note: Say
) -> None:
    """Print the table and the advice. Raises `ConfigError`."""
    if settings.hardware not in HARDWARE:
        raise ConfigError(f"--hardware {settings.hardware!r} must be one of {', '.join(HARDWARE)}")
    if settings.steps < 12:
        raise ConfigError(f"--steps {settings.steps} must be at least 12: the first eight fill the pipeline")
    config = _config(preset, overrides, settings.run)
    model = msgspec.structs.replace(_model(config, settings), lost=settings.lost)
    if settings.run is not None:
        _compare(model, settings, config.steps, note)
    began = time.process_time()
    report = sweep(
        model,
        staleness=settings.staleness or (config.schedule.max_staleness,),
        generators=settings.generators or (model.generators,),
        steps=settings.steps,
        seed=settings.seed,
        say=note,
    )
    note(f"computed in {time.process_time() - began:.0f} s of CPU time")
    if settings.picture is not None:
        with name_target(settings.picture):
            replace_file(settings.picture, picture(report).encode())
        note(f"picture: {settings.picture}")
    if json:
        say(msgspec.json.encode(report).decode())
    else:
        for line in lines(report):
            say(line)


def _config(preset: str, overrides: Sequence[str], run: Path | None) -> Config:
    if run is not None and not (run / "config.toml").is_file():
        raise ConfigError(f"--calibrate {run}: it is no directory of a run (no config.toml in it)")
    if run is None and not preset:
        raise ConfigError("--capacity needs a preset, or --calibrate RUN")
    return load_config(
        preset or str(run / "config.toml" if run else ""), list(overrides), command=None if run else "train"
    )


def _model(config: Config, settings: Settings) -> Model:
    if settings.run is not None:
        try:
            return calibrate(settings.run, config)
        except CalibrationError as error:
            raise ConfigError(str(error)) from error
    ranks = settings.ranks or config.learner.parallel.world_size
    return estimate(config, generators=config.generator.count, ranks=ranks, hardware=HARDWARE[settings.hardware])


def _compare(model: Model, settings: Settings, steps: int, note: Say) -> None:
    """Print how well the prediction from the run's own durations matches the time that the run took.

    Args:
        steps: Number of steps that the run was configured for.
    """
    from r3async.record.reading import read_json_objects

    assert settings.run is not None
    rows = read_json_objects(settings.run / "metrics.jsonl")
    settle = min(8, len(rows) // 3)
    took = (rows[-1]["time"] - rows[settle]["time"]) / max(len(rows) - 1 - settle, 1)
    made = predict(model, steps=len(rows), settle=settle, seed=settings.seed, ends=len(rows) == steps)
    note(
        f"{settings.run.name} took {took:.3g} s a step; its durations predict {made.seconds_per_step:.3g} "
        f"({made.seconds_per_step / took - 1:+.0%})"
    )


def published_command(*, json: bool = False, say: Say, note: Say) -> None:
    """Predict every published curve and print the table."""
    cases = [make() for make in CASES.values()]
    for case in cases:
        note(f"{case.name}. Source: {case.source}. Given: {case.inputs}. Assumed: {case.assumed}.")
    rows = [row for case in cases for row in reproduce(case, note)]
    say(msgspec.json.encode(rows).decode() if json else markdown(rows))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse a comma-separated list of numbers such as `1,2,4`. Raises `ConfigError`."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (-1,)
    if any(number < 0 for number in found):
        raise ConfigError(f"{option} {text!r}: whole numbers with commas between them, like 1,2,4")
    return found
