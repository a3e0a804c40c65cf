"""Copies of `metrics.jsonl` elsewhere: TensorBoard, W&B, MLflow, trackio; and a `/metrics` endpoint for Prometheus in each
process of a run, if `observe.prometheus_port` is set.

A sink cannot slow or stop a run. Each has a thread and a bounded queue of its own: `write` never waits, what does not fit is
left out and counted, and whatever a sink raises ends that sink alone. `metrics.jsonl` is the record; these are copies.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from r3async.config import flat
from r3async.config.operation import ObserveConfig
from r3async.config.section import ConfigError
from r3async.record.catalogue import metric
from r3async.record.reading import read_run_config
from r3async.world.files import make_directory, replace_file

Row = Mapping[str, Any]
Report = Callable[[str], object]
ROWS_WAITING = 1024
"""For a slow sink. Further ones are left out for it, counted, and reported once."""
FINISH_SECONDS = 15.0
"""The end of a run waits so long for sinks to write what they have."""
FAILURES_ALLOWED = 3
"""Rows in a row that a sink may fail to take before it is closed."""


class Backend(Protocol):
    """Where rows go. Made, called and closed in the sink's own thread."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Sink:
    """One backend behind a queue. `report` is called, at most once each, when it failed and when rows were left out."""

    def __init__(self, name: str, make: Callable[[], Backend], capacity: int, report: Report):
        self.name, self._make, self._report = name, make, report
        self._queue: queue.Queue[Row | None] = queue.Queue(capacity)
        self.dropped = 0
        self.written = 0
        self._failed = threading.Event()
        # A daemon: an interpreter that ends does not wait for a sink that hangs.
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Queue a row; returns at once."""
        if self._failed.is_set():
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._report(f"sink {self.name} is slower than the run: it will miss rows, metrics.jsonl will not")

    def close(self, deadline: float) -> None:
        """Wait, until `deadline` of the monotonic clock, for what is queued to be written."""
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._report(f"sink {self.name} did not finish in time; it may lack the last rows")
        if self.dropped:
            self._report(f"sink {self.name} missed {self.dropped} rows")

    def _work(self) -> None:
        try:
            backend = self._make()
        except Exception as error:  # a service that does not answer, a full disk, a wrong login
            self._fail(error)
            return
        failures = 0
        while (row := self._queue.get()) is not None:
            try:
                backend.write(row)
                self.written += 1
                failures = 0
            except Exception as error:
                self.dropped += 1
                failures += 1
                if failures == FAILURES_ALLOWED:
                    self._fail(error)
                    break
        try:
            backend.close()
        except Exception as error:
            self._report(f"sink {self.name} could not be closed: {type(error).__name__}: {error}")

    def _fail(self, error: Exception) -> None:
        self._failed.set()
        self.dropped += self._queue.qsize()
        self._report(f"sink {self.name} failed and is left out from here on: {type(error).__name__}: {error}")


class SinkSet:
    """All sinks of a run. Use as a context manager; the end waits for `timeout` seconds at most, for all together."""

    def __init__(self, sinks: Sequence[Sink], timeout: float):
        self.sinks, self._timeout = list(sinks), timeout

    def write(self, row: Row) -> None:
        """One step's row of `metrics.jsonl`; returns at once. The row must not be changed afterwards."""
        for sink in self.sinks:
            sink.write(row)

    def close(self) -> None:
        deadline = time.monotonic() + self._timeout
        for sink in self.sinks:
            sink.close(deadline)

    def __enter__(self) -> SinkSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- backends ----------------------------------------------------------------------------------------------------------

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


def numbers(row: Row) -> dict[str, float]:
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

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()]
        event = self._event(step=row["step"], wall_time=row["time"], summary=self._summary(value=values))
        self._file.add_event(event)

    def close(self) -> None:
        self._file.close()


class _Logged:
    """A run of a service that takes rows by `log`."""

    _run: Any

    def write(self, row: Row) -> None:
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Wandb(_Logged):
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


class Mlflow:
    """A run of the experiment `observe.project`, in `observe.mlflow_uri` or `runs/NAME/mlruns`."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        if not config.mlflow_uri:
            # MLflow 3 refuses its plain-file store without this variable; a database would be one package more.
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

    def write(self, row: Row) -> None:
        at = int(row["time"] * 1000)
        self._client.log_batch(self._run, [self._metric(n, v, at, row["step"]) for n, v in numbers(row).items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio(_Logged):
    """A run of the local trackio project `observe.project`: `trackio show`."""

    def __init__(self, config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]):
        import trackio

        self._run = trackio.init(project=config.project, name=run_dir.name, config=dict(settings), embed=False)


BACKENDS: dict[str, Callable[[ObserveConfig, Path, Mapping[str, Any]], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def check_sinks(config: ObserveConfig) -> None:
    """Raise `ConfigError`, with the pip command, for a sink whose package is not installed."""
    for name in config.sinks:
        if package := missing_package(name):
            raise ConfigError(f"`observe.sinks` has {name!r}, whose package is not installed: pip install {package}")


def open_sinks(
    config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any], report: Report, timeout: float = FINISH_SECONDS
) -> SinkSet:
    """The sinks that `config` names. `settings`: the run's configuration, resolved, for those that show it. `report`: takes a
    line for the person who watches, from any thread."""
    check_sinks(config)

    def maker(name: str) -> Callable[[], Backend]:
        return lambda: BACKENDS[name](config, run_dir, settings)

    sinks = [Sink(name, maker(name), ROWS_WAITING, report) for name in config.sinks]
    return SinkSet(sinks, timeout)


PORTS_TRIED = 100


def metric_name(name: str) -> str:
    """`reward/mean` -> `r3async_reward_mean`."""
    return "r3async_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


class Endpoint:
    """One process's endpoint: its memory, CPU time and open files, the last row that `update` was given, and what `read()`
    returns at that moment.

    Served by a thread of its own, which is the one that calls `read`; `close` ends it. `port`: where it listens.
    """

    def __init__(self, role: str, run_dir: Path, config: ObserveConfig):
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._row: dict[str, float] = {}
        self.read: Callable[[], Mapping[str, Any]] = dict
        self._labels = {"role": role, "run": run_dir.name}
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)  # it is one by its `collect`
        self._server, self._thread, self.port = _serve(registry, config.prometheus_host, config.prometheus_port or 0)
        host = socket.gethostname() if config.prometheus_host in ("0.0.0.0", "::") else config.prometheus_host
        self.target = run_dir / "prometheus" / f"{role}.json"
        described = json.dumps([{"targets": [f"{host}:{self.port}"], "labels": self._labels}])
        try:
            make_directory(self.target.parent)
            replace_file(self.target, described.encode())
        except OSError as error:  # it serves all the same
            print(f"{self.target} could not be written ({error}): {described}", file=sys.stderr)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show these figures from now on; whatever is no number is left out."""
        self._row = _numbers(row)

    def collect(self) -> Iterable[Any]:
        """For prometheus_client: a gauge a metric."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        try:
            now = _numbers(self.read())
        except Exception as error:  # of an engine that is just stopping, say: the rest is still worth showing
            print(f"figures for Prometheus could not be read: {error!r}", file=sys.stderr)
            now = {}
        for name, value in (self._row | now).items():
            gauge = GaugeMetricFamily(metric_name(name), metric(name).docs, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def close(self) -> None:
        """Stop serving, and take the target file away."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
        self.target.unlink(missing_ok=True)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


def serve_actor(role: str, run_dir: Path) -> Endpoint | None:
    """`serve_metrics` for a process that knows only its run's directory; None too where there is no configuration in it."""
    try:
        config = msgspec.convert(read_run_config(run_dir).get("observe", {}), ObserveConfig)
    except msgspec.ValidationError as error:
        print(f"no Prometheus endpoint for {role}: {error}", file=sys.stderr)
        return None
    return serve_metrics(role, run_dir, config)


def serve_metrics(role: str, run_dir: Path, config: ObserveConfig) -> Endpoint | None:
    """This process's endpoint, or None if `observe.prometheus_port` is not set. A run continues without one that cannot be
    opened: then None too, with a line on stderr, which is the process's log."""
    if config.prometheus_port is None:
        return None
    try:
        return Endpoint(role, run_dir, config)
    except (ImportError, OSError) as error:
        print(f"no Prometheus endpoint for {role} (observe.prometheus_port): {error}", file=sys.stderr)
        return None


def _serve(registry: Any, host: str, port: int) -> tuple[Any, threading.Thread, int]:
    from prometheus_client import start_http_server

    last: OSError | None = None
    for candidate in range(port, min(port + PORTS_TRIED, 65536)) if port else [0]:
        try:
            server, thread = start_http_server(candidate, addr=host, registry=registry)
            return server, thread, server.server_port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            last = error
    raise OSError(f"no free port from {port} on: {last}")
