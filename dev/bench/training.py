"""A real run in a separate process, which several benchmarks measure by the metrics that it writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from dev.bench.jobs import ANSWER, Say, run_job
from r3async.config import Config, config_from_dict, config_to_dict
from r3async.record.reading import read_json_objects


def train_apart(config: Config, directory: Path, *, timeout: float, say: Say) -> None:
    """Make the run `directory/NAME` that `config` names. Raises `BenchError`."""
    run_job(f"{__name__}:train_here", config_to_dict(config), type(None), directory, timeout=timeout, say=say)


def metrics_of(config: Config, directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that `train_apart` made, one row per step."""
    return read_json_objects(directory / config.name / "metrics.jsonl")


def is_made(config: Config, directory: Path) -> bool:
    """Return True if the complete run of `config` is in `directory`.

    An interrupted run is removed, since another would continue it. Metrics alone are not enough: a run that was killed
    before its last checkpoint may have all of them.
    """
    if not directory.is_dir():
        return False
    if (directory / ANSWER).is_file() and len(metrics_of(config, directory)) >= config.steps:
        return True
    shutil.rmtree(directory)
    return False


def train_here(job: dict[str, Any], directory: Path) -> None:
    """Train in the job's process. The run's output is kept in `console.txt`."""
    from r3async.tools.train import train

    with (directory / "console.txt").open("w") as file:
        train(config_from_dict(job), "bench", Console(file=file), root=directory)
