"""Copies of `metrics.jsonl` elsewhere: TensorBoard, W&B, MLflow, trackio.

A sink can not slow or stop a run. Each has a thread and a bounded queue of its own: `write` never waits, what does not fit is
left out and counted, and whatever a sink raises ends that sink alone. `metrics.jsonl` is the record; these are copies.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from r3async.config.observe import ObserveConfig
from r3async.config.section import ConfigError

Row = Mapping[str, Any]
Report = Callable[[str], object]
FAILURES_ALLOWED = 3
"""Rows in a row that a sink may fail to take before it is given up."""


class Backend(Protocol):
    """Where rows go. Made, called and closed in the sink's own thread."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Sink:
    """One backend behind a queue. `report` hears, at most once each, that it failed and that rows were left out."""

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
            self._report(f"sink {self.name} did not finish in time (observe.sink_timeout); it may lack the last rows")
        if self.dropped:
            self._report(f"sink {self.name} missed {self.dropped} rows")

    def _work(self) -> None:
        try:
            backend = self._make()
        except Exception as error:  # a service that does not answer, a full disk, a wrong login
            self._give_up(error)
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
                    self._give_up(error)
                    break
        try:
            backend.close()
        except Exception as error:
            self._report(f"sink {self.name} could not be closed: {type(error).__name__}: {error}")

    def _give_up(self, error: Exception) -> None:
        self._failed.set()
        self.dropped += self._queue.qsize()
        self._report(f"sink {self.name} failed and is left out from here on: {type(error).__name__}: {error}")


class SinkSet:
    """All sinks of a run. Use as a context manager; the end waits for `observe.sink_timeout` at most, for all together."""

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


def check_sinks(config: ObserveConfig) -> None:
    """Raise `ConfigError`, with the pip command, for a sink whose package is not installed."""
    from r3async.record.sink_backends import missing_package

    for name in config.sinks:
        if package := missing_package(name):
            raise ConfigError(f"`observe.sinks` has {name!r}, whose package is not installed: pip install {package}")


def open_sinks(config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any], report: Report) -> SinkSet:
    """The sinks that `config` names. `settings`: the run's configuration, resolved, for those that show it. `report`: takes a
    line for the person who watches, from any thread."""
    from r3async.record.sink_backends import BACKENDS

    check_sinks(config)

    def maker(name: str) -> Callable[[], Backend]:
        return lambda: BACKENDS[name](config, run_dir, settings)

    sinks = [Sink(name, maker(name), config.sink_queue, report) for name in config.sinks]
    return SinkSet(sinks, config.sink_timeout)
