"""What each sink does with a row. A package is imported when its sink is opened, and only then."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from r3async.config import flat
from r3async.config.observe import ObserveConfig

PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
"""By sink: the module that it imports, and what pip calls it."""


def missing_package(name: str) -> str:
    """What to install for that sink; empty if it is there. Imports nothing."""
    module, package = PACKAGES[name]
    return "" if importlib.util.find_spec(module) else package


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that can be drawn: no texts, no nulls, and not what counts the rows."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and name not in ("step", "time")
    }


class TensorBoard:
    """Event files in `runs/NAME/tensorboard`: `tensorboard --logdir runs`. TensorFlow is not needed."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._file = EventFileWriter(str(run_dir / "tensorboard"), max_queue_size=1, flush_secs=5)

    def write(self, row: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()]
        event = self._event(step=row["step"], wall_time=row["time"], summary=self._summary(value=values))
        self._file.add_event(event)

    def close(self) -> None:
        self._file.close()


class Wandb:
    """A run of W&B. `offline`: `wandb sync runs/NAME/wandb/offline-run-*` sends it later."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        import wandb

        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            mode=config.wandb_mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of the experiment `observe.project`, in `observe.mlflow_uri` or `runs/NAME/mlruns`."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        if not config.mlflow_uri:
            # MLflow 3 refuses its plain-file store unless it is told that this is meant; a database would be one package more.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(config.mlflow_uri or (run_dir / "mlruns").absolute().as_uri())
        experiment = self._client.get_experiment_by_name(config.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.project)
        self._run = self._client.create_run(number, run_name=run_dir.name).info.run_id
        parameters = [Param(key, str(value)[:500]) for key, value in flat(dict(settings)).items()]
        for first in range(0, len(parameters), 100):  # of one call, at most
            self._client.log_batch(self._run, params=parameters[first : first + 100])

    def write(self, row: Mapping[str, Any]) -> None:
        at = int(row["time"] * 1000)
        self._client.log_batch(self._run, [self._metric(n, v, at, row["step"]) for n, v in numbers(row).items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """A run of the local trackio project `observe.project`: `trackio show`."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        import trackio

        self._run = trackio.init(project=config.project, name=run_dir.name, config=dict(settings), embed=False)

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


BACKENDS: dict[str, Callable[[ObserveConfig, Path, Mapping[str, Any]], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
