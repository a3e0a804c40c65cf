"""Backends: the form in which TensorBoard, W&B, MLflow and trackio get the rows.

A resumed run continues the runs that its earlier starts created in the services; the run's
directory `sinks/` has their ids.
"""

from __future__ import annotations

import importlib.util
import json
import math
import netrc
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import numpy as np

from r3async.config import flatten_section
from r3async.config.observe import LogConfig
from r3async.world.files import make_directory, replace_file

MetricsRow = Mapping[str, Any]
"""The row of a step or an evaluation: `step`, `time` in unix seconds, and metrics by name."""


class EpisodeExample(NamedTuple):
    """An episode as a row of a table. `answer` has all its turns after the first prompt."""

    step: int
    trajectory: str
    reward: float
    turns: int
    prompt: str
    answer: str


EPISODES_TABLE = "episodes"
"""Name of the table of example episodes."""
MAX_TABLE_EXAMPLES = 256
"""Maximum number of examples in a service that has one table for the whole run; the
newest are kept."""
MAX_TEXT_CHARACTERS = 10_000
"""Maximum characters of a prompt or an answer in the table; longer texts are cut."""
RUN_IDS_DIRECTORY = "sinks"
"""Directory of a run that holds the id of the run in each service, in a file named
after the service."""
MLFLOW_TABLES_TAG = "mlflow.loggedArtifacts"
MLFLOW_TABLES = json.dumps([{"path": f"{EPISODES_TABLE}.json", "type": "table"}])
"""Name and value of the tag by which MLflow recognizes a file as a table."""


def make_episode_example(episode: Mapping[str, Any]) -> EpisodeExample:
    """Convert an object of `episodes.jsonl`. Raises `KeyError`, `TypeError` or `ValueError` if it
    is not an episode."""
    turns = [dict(turn) for turn in episode["turns"]]
    said = [turns[0]["assistant"]] if turns else []
    for turn in turns[1:]:
        said += [f"[environment] {turn['user']}", str(turn["assistant"])]
    prompt = turns[0]["user"] if turns else ""
    answer = "\n\n".join(said)
    return EpisodeExample(
        int(episode["step"]),
        str(episode.get("trajectory", "")),
        float(episode["reward"]),
        len(turns),
        str(prompt)[:MAX_TEXT_CHARACTERS],
        answer[:MAX_TEXT_CHARACTERS],
    )


class SinkBackend(Protocol):
    """The service that a sink writes to. It is created, called and closed in the sink's thread."""

    def write_metrics(self, row: MetricsRow) -> None:
        """Write the metrics of a step, or of an evaluation, which may belong to an earlier step."""
        ...

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        """Write example episodes that were not written before."""
        ...

    def close(self) -> None: ...


SINK_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
"""The module that each sink imports, and the name of its package for pip."""


def find_missing_package(name: str) -> str:
    """Return the package to install for a sink; "" if it is installed. Imports nothing."""
    module, package = SINK_PACKAGES[name]
    return "" if importlib.util.find_spec(module) else package


def select_numbers(row: MetricsRow) -> dict[str, float]:
    """Return the numbers of a row that can be drawn, including the metrics that environments
    reported in an evaluation.

    Leaves out texts, nulls, `step` and `time`.
    """
    told = [
        (of, value)
        for of, value in row.items()
        if of.endswith("/metrics") and isinstance(value, Mapping)
    ]
    inner = {f"{of}/{name}": value for of, values in told for name, value in values.items()}
    return {
        name: float(value)
        for name, value in {**row, **inner}.items()
        if isinstance(value, (int, float)) and name not in ("step", "time")
    }


def read_run_id(run_dir: Path, service: str) -> str:
    """Read the id that an earlier start got for the run in `service`; "" if there was none."""
    path = run_dir / RUN_IDS_DIRECTORY / service
    return path.read_text().strip() if path.is_file() else ""


def write_run_id(run_dir: Path, service: str, run_id: str) -> str:
    """Save the id of the run in `service` for the next start, and return the id."""
    make_directory(run_dir / RUN_IDS_DIRECTORY)
    replace_file(run_dir / RUN_IDS_DIRECTORY / service, run_id.encode())
    return run_id


class TensorBoardBackend:
    """TensorBoard event files in `runs/NAME/tensorboard`: `tensorboard --logdir runs`.
    TensorFlow is not needed."""

    def __init__(self, config: LogConfig, run_dir: Path, settings: Mapping[str, Any]):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events = event_pb2
        self._summaries = summary_pb2
        self._text = text_pb
        self._file = EventFileWriter(str(run_dir / "tensorboard"), max_queue_size=1, flush_secs=5)
        self._last_step = math.inf

    def write_metrics(self, row: MetricsRow) -> None:
        figures = select_numbers(row)
        if not all(name.startswith("evaluation/") for name in figures):
            if row["step"] <= self._last_step:
                # The run was started again: what earlier starts wrote for this step and later
                # ones is obsolete.
                log = self._events.SessionLog(status=self._events.SessionLog.START)
                self._add_event(row, session_log=log)
            self._last_step = row["step"]
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in figures.items()
        ]
        self._add_event(row, summary=self._summaries.Summary(value=values))

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        table = np.array(
            [EpisodeExample._fields, *([str(cell) for cell in each] for each in examples)]
        )
        self._add_event(
            {"step": examples[-1].step, "time": time.time()},
            summary=self._text(EPISODES_TABLE, table),
        )

    def _add_event(self, row: MetricsRow, **fields: Any) -> None:
        self._file.add_event(self._events.Event(step=row["step"], wall_time=row["time"], **fields))

    def close(self) -> None:
        self._file.close()


class WandbBackend:
    """A W&B run. If `offline`, `wandb sync runs/NAME/wandb/offline-run-*` uploads it later, all
    starts to one run.

    Charts use the metric `step` instead of W&B's own step, which never decreases: evaluations
    arrive after later steps, and a run that resumes from a checkpoint repeats steps.
    """

    def __init__(self, config: LogConfig, run_dir: Path, settings: Mapping[str, Any]):
        import wandb

        number = read_run_id(run_dir, "wandb") or write_run_id(
            run_dir, "wandb", secrets.token_hex(8)
        )
        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            id=number,
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            mode=cast(
                Any, os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
            ),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True
            ),
            allow_val_change=True,
        )
        self._table = wandb.Table
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write_metrics(self, row: MetricsRow) -> None:
        self._run.log({**select_numbers(row), "step": row["step"]})

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        table = self._table(
            columns=list(EpisodeExample._fields), data=[list(each) for each in examples]
        )
        self._run.log({EPISODES_TABLE: table, "step": examples[-1].step})

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    """Return True if W&B will find a key. `wandb.login` would ask the server, for ten seconds
    without a network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MlflowBackend:
    """An MLflow run of the experiment `log.project`, at MLFLOW_TRACKING_URI or in
    `runs/NAME/mlruns`."""

    def __init__(self, config: LogConfig, run_dir: Path, settings: Mapping[str, Any]):
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow 3 refuses its plain-file store without this variable; a database would need
            # one more package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(uri or (run_dir / "mlruns").absolute().as_uri())
        self._examples: deque[EpisodeExample] = deque(maxlen=MAX_TABLE_EXAMPLES)
        if self._resume_run(run_dir):
            return  # MLflow does not allow parameters to change
        experiment = self._client.get_experiment_by_name(config.project)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(config.project)
        )
        made = self._client.create_run(
            number, run_name=run_dir.name, tags={MLFLOW_TABLES_TAG: MLFLOW_TABLES}
        ).info.run_id
        self._run = write_run_id(run_dir, "mlflow", made)
        parameters = [
            Param(key, str(value)[:500]) for key, value in flatten_section(dict(settings)).items()
        ]
        for first in range(0, len(parameters), 100):  # the limit of one call
            self._client.log_batch(self._run, params=parameters[first : first + 100])

    def _resume_run(self, run_dir: Path) -> bool:
        """Reopen the MLflow run of an earlier start. Returns False if there is none."""
        from mlflow.exceptions import MlflowException

        self._run = read_run_id(run_dir, "mlflow")
        try:
            if self._run:
                self._client.update_run(self._run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False  # the store is another than before, or somebody deleted the run
        return bool(self._run)

    def write_metrics(self, row: MetricsRow) -> None:
        at = int(row["time"] * 1000)
        # MLflow takes no @
        named = {name.replace("@", "_at_"): value for name, value in select_numbers(row).items()}
        self._client.log_batch(
            self._run, [self._metric(n, v, at, row["step"]) for n, v in named.items()]
        )

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        self._examples += examples
        table = {"columns": EpisodeExample._fields, "data": list(self._examples)}
        self._client.log_dict(self._run, table, f"{EPISODES_TABLE}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TrackioBackend:
    """A run of the local trackio project `log.project`: `trackio show`. Trackio identifies a
    run by its name."""

    def __init__(self, config: LogConfig, run_dir: Path, settings: Mapping[str, Any]):
        import trackio

        resume = "allow" if read_run_id(run_dir, "trackio") else "never"
        write_run_id(run_dir, "trackio", run_dir.name)
        self._table = trackio.Table
        self._run = trackio.init(
            project=config.project,
            name=run_dir.name,
            config=dict(settings),
            embed=False,
            resume=resume,
        )

    def write_metrics(self, row: MetricsRow) -> None:
        self._run.log(select_numbers(row), step=row["step"])

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        table = self._table(
            columns=list(EpisodeExample._fields), data=[list(each) for each in examples]
        )
        self._run.log({EPISODES_TABLE: table}, step=examples[-1].step)

    def close(self) -> None:
        self._run.finish()


SINK_BACKENDS: dict[str, Callable[[LogConfig, Path, Mapping[str, Any]], SinkBackend]] = {
    "tensorboard": TensorBoardBackend,
    "wandb": WandbBackend,
    "mlflow": MlflowBackend,
    "trackio": TrackioBackend,
}
