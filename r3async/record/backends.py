"""What each service of `sinks.py` is given, and in which form: TensorBoard, W&B, MLflow, trackio.

A run that resumes continues what its earlier starts wrote: `sinks/` in its directory has the id of its run in each service.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from r3async.config import flatten_section
from r3async.config.operation import ObserveConfig
from r3async.world.files import make_directory, replace_file

MetricsRow = Mapping[str, Any]
"""Of a step or of an evaluation: `step`, `time` in seconds since 1970, and figures by name."""


class EpisodeExample(NamedTuple):
    """A played episode, as a row of a table. `answer`: all its turns after the first prompt."""

    step: int
    trajectory: str
    reward: float
    turns: int
    prompt: str
    answer: str


EPISODES_TABLE = "episodes"
"""What the table of examples is called."""
MAX_TABLE_EXAMPLES = 256
"""In a service that has one table for the whole run."""
MAX_TEXT_CHARACTERS = 10_000
"""Of a prompt or an answer in the table; what is longer is cut."""
RUN_IDS_DIRECTORY = "sinks"
"""A directory of a run: what the run is called in each service, in a file that has the service's name."""
MLFLOW_TABLES_TAG, MLFLOW_TABLES = (
    "mlflow.loggedArtifacts",
    json.dumps([{"path": f"{EPISODES_TABLE}.json", "type": "table"}]),
)
"""By which MLflow knows a file as a table."""


def make_episode_example(episode: Mapping[str, Any]) -> EpisodeExample:
    """From an object of `episodes.jsonl`. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
    turns = [dict(turn) for turn in episode["turns"]]
    said = [turns[0]["assistant"]] if turns else []
    for turn in turns[1:]:
        said += [f"[environment] {turn['user']}", str(turn["assistant"])]
    prompt, answer = (turns[0]["user"] if turns else "", "\n\n".join(said))
    return EpisodeExample(
        int(episode["step"]),
        str(episode.get("trajectory", "")),
        float(episode["reward"]),
        len(turns),
        str(prompt)[:MAX_TEXT_CHARACTERS],
        answer[:MAX_TEXT_CHARACTERS],
    )


class SinkBackend(Protocol):
    """Where rows go. Made, called and closed in the sink's own thread."""

    def write_metrics(self, row: MetricsRow) -> None:
        """The figures of a step, or of an evaluation, which may be of an earlier step."""
        ...

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        """Episodes that were not shown before."""
        ...

    def close(self) -> None: ...


SINK_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
"""By sink: the module that it imports, and what pip calls it."""


def find_missing_package(name: str) -> str:
    """What to install for that sink; empty if it is there. Imports nothing."""
    module, package = SINK_PACKAGES[name]
    return "" if importlib.util.find_spec(module) else package


def select_numbers(row: MetricsRow) -> dict[str, float]:
    """The figures of a row that can be drawn, also those that an environment told an evaluation: no texts, no nulls, and not what
    counts the rows."""
    told = [(of, value) for of, value in row.items() if of.endswith("/metrics") and isinstance(value, Mapping)]
    inner = {f"{of}/{name}": value for of, values in told for name, value in values.items()}
    return {
        name: float(value)
        for name, value in {**row, **inner}.items()
        if isinstance(value, (int, float)) and name not in ("step", "time")
    }


def read_run_id(run_dir: Path, service: str) -> str:
    """Of the run in that service, from an earlier start; "" if there was none."""
    path = run_dir / RUN_IDS_DIRECTORY / service
    return path.read_text().strip() if path.is_file() else ""


def write_run_id(run_dir: Path, service: str, run_id: str) -> str:
    """For the next start. Returns it."""
    make_directory(run_dir / RUN_IDS_DIRECTORY)
    replace_file(run_dir / RUN_IDS_DIRECTORY / service, run_id.encode())
    return run_id


class TensorBoardBackend:
    """Event files in `runs/NAME/tensorboard`: `tensorboard --logdir runs`. TensorFlow is not needed."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._text = event_pb2, summary_pb2, text_pb
        self._file = EventFileWriter(str(run_dir / "tensorboard"), max_queue_size=1, flush_secs=5)
        self._last_step = math.inf

    def write_metrics(self, row: MetricsRow) -> None:
        figures = select_numbers(row)
        if not all(name.startswith("evaluation/") for name in figures):
            if row["step"] <= self._last_step:
                # A start of the run: what earlier ones wrote of this step, and of later ones, is not of this run any more.
                log = self._events.SessionLog(status=self._events.SessionLog.START)
                self._add_event(row, session_log=log)
            self._last_step = row["step"]
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add_event(row, summary=self._summaries.Summary(value=values))

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        table = np.array([EpisodeExample._fields, *([str(cell) for cell in each] for each in examples)])
        self._add_event({"step": examples[-1].step, "time": time.time()}, summary=self._text(EPISODES_TABLE, table))

    def _add_event(self, row: MetricsRow, **fields: Any) -> None:
        self._file.add_event(self._events.Event(step=row["step"], wall_time=row["time"], **fields))

    def close(self) -> None:
        self._file.close()


class WandbBackend:
    """A run of W&B. `offline`: `wandb sync runs/NAME/wandb/offline-run-*` sends it later, all starts of a run to one run there.

    Steps are the metric `step`, not W&B's own count, which never goes back: an evaluation comes after later steps, and a run
    that resumes from a checkpoint repeats some."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        import wandb

        number = read_run_id(run_dir, "wandb") or write_run_id(run_dir, "wandb", secrets.token_hex(8))
        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            id=number,
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            mode=config.wandb_mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
            allow_val_change=True,
        )
        self._table = wandb.Table
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write_metrics(self, row: MetricsRow) -> None:
        self._run.log({**select_numbers(row), "step": row["step"]})

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        table = self._table(columns=list(EpisodeExample._fields), data=[list(each) for each in examples])
        self._run.log({EPISODES_TABLE: table, "step": examples[-1].step})

    def close(self) -> None:
        self._run.finish()


class MlflowBackend:
    """A run of the experiment `observe.project`, in `observe.mlflow_uri` or `runs/NAME/mlruns`."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        if not config.mlflow_uri:
            # MLflow 3 refuses its plain-file store without this variable; a database would be one package more.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(config.mlflow_uri or (run_dir / "mlruns").absolute().as_uri())
        self._examples: deque[EpisodeExample] = deque(maxlen=MAX_TABLE_EXAMPLES)
        if self._resume_run(run_dir):
            return  # its parameters stay: MLflow lets none change
        experiment = self._client.get_experiment_by_name(config.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.project)
        made = self._client.create_run(
            number, run_name=run_dir.name, tags={MLFLOW_TABLES_TAG: MLFLOW_TABLES}
        ).info.run_id
        self._run = write_run_id(run_dir, "mlflow", made)
        parameters = [Param(key, str(value)[:500]) for key, value in flatten_section(dict(settings)).items()]
        for first in range(0, len(parameters), 100):  # of one call, at most
            self._client.log_batch(self._run, params=parameters[first : first + 100])

    def _resume_run(self, run_dir: Path) -> bool:
        """Whether an earlier start has a run there."""
        from mlflow.exceptions import MlflowException

        self._run = read_run_id(run_dir, "mlflow")
        try:
            if self._run:
                self._client.update_run(self._run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False  # another store than before, or somebody deleted it
        return bool(self._run)

    def write_metrics(self, row: MetricsRow) -> None:
        at = int(row["time"] * 1000)
        named = {name.replace("@", "_at_"): value for name, value in select_numbers(row).items()}  # MLflow takes no @
        self._client.log_batch(self._run, [self._metric(n, v, at, row["step"]) for n, v in named.items()])

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        self._examples += examples
        table = {"columns": EpisodeExample._fields, "data": list(self._examples)}
        self._client.log_dict(self._run, table, f"{EPISODES_TABLE}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TrackioBackend:
    """A run of the local trackio project `observe.project`: `trackio show`. A run is known there by its name."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        import trackio

        resume = "allow" if read_run_id(run_dir, "trackio") else "never"
        write_run_id(run_dir, "trackio", run_dir.name)
        self._table = trackio.Table
        self._run = trackio.init(
            project=config.project, name=run_dir.name, config=dict(settings), embed=False, resume=resume
        )

    def write_metrics(self, row: MetricsRow) -> None:
        self._run.log(select_numbers(row), step=row["step"])

    def write_examples(self, examples: Sequence[EpisodeExample]) -> None:
        table = self._table(columns=list(EpisodeExample._fields), data=[list(each) for each in examples])
        self._run.log({EPISODES_TABLE: table}, step=examples[-1].step)

    def close(self) -> None:
        self._run.finish()


SINK_BACKENDS: dict[str, Callable[[ObserveConfig, Path, Mapping[str, Any]], SinkBackend]] = {
    "tensorboard": TensorBoardBackend,
    "wandb": WandbBackend,
    "mlflow": MlflowBackend,
    "trackio": TrackioBackend,
}
