"""Copies of a run's records elsewhere: steps, evaluations and examples of episodes go to TensorBoard, W&B, MLflow, trackio.

A sink cannot slow or stop a run. Each has a thread and a bounded queue of its own: `write` never waits, what does not fit is
left out and counted, and whatever a sink raises ends that sink alone. `metrics.jsonl` is the record; these are copies.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3async.config.operation import ObserveConfig
from r3async.config.section import ConfigError
from r3async.record.backends import SINK_BACKENDS, EpisodeExample, MetricsRow, SinkBackend, find_missing_package

PrintLine = Callable[[str], object]
MAX_QUEUED_ROWS = 1024
"""For a slow sink. Further ones are left out for it, counted, and reported once."""
CLOSE_TIMEOUT_SECONDS = 15.0
"""The end of a run waits so long for sinks to write what they have."""
MAX_CONSECUTIVE_FAILURES = 3
"""Rows in a row that a sink may fail to take before it is closed."""


class Sink:
    """One backend behind a queue. `print_line` is called, at most once each, when it failed and when rows were left out."""

    def __init__(self, name: str, make_backend: Callable[[], SinkBackend], capacity: int, print_line: PrintLine):
        self.name, self._make, self._report = name, make_backend, print_line
        self._queue: queue.Queue[MetricsRow | Sequence[EpisodeExample] | None] = queue.Queue(capacity)
        self.dropped_rows = 0
        self.written_rows = 0
        self._failed = threading.Event()
        # A daemon: an interpreter that ends does not wait for a sink that hangs.
        self._thread = threading.Thread(target=self._run_thread, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: MetricsRow | Sequence[EpisodeExample]) -> None:
        """Queue a row, or examples to show; returns at once."""
        if self._failed.is_set():
            self.dropped_rows += 1
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped_rows += 1
            if self.dropped_rows == 1:
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
        if self.dropped_rows:
            self._report(f"sink {self.name} missed {self.dropped_rows} rows")

    def _run_thread(self) -> None:
        try:
            backend = self._make()
        except Exception as error:  # a service that does not answer, a full disk, a wrong login
            self._mark_failed(error)
            return
        failures = 0
        while (row := self._queue.get()) is not None:
            try:
                if isinstance(row, Mapping):
                    backend.write_metrics(row)
                else:
                    backend.write_examples(row)
                self.written_rows += 1
                failures = 0
            except Exception as error:
                self.dropped_rows += 1
                failures += 1
                if failures == MAX_CONSECUTIVE_FAILURES:
                    self._mark_failed(error)
                    break
        try:
            backend.close()
        except Exception as error:
            self._report(f"sink {self.name} could not be closed: {type(error).__name__}: {error}")

    def _mark_failed(self, error: Exception) -> None:
        self._failed.set()
        self.dropped_rows += self._queue.qsize()
        self._report(f"sink {self.name} failed and is left out from here on: {type(error).__name__}: {error}")


class SinkSet:
    """All sinks of a run. Use as a context manager; the end waits for `timeout` seconds at most, for all together."""

    def __init__(self, sinks: Sequence[Sink], timeout: float):
        self.sinks, self._timeout = list(sinks), timeout

    def write(self, row: MetricsRow | Sequence[EpisodeExample]) -> None:
        """A step's row of `metrics.jsonl`, or one of `evaluation.jsonl`, or examples of episodes; returns at once. It must not be
        changed afterwards."""
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
    for name in config.sinks:
        if package := find_missing_package(name):
            raise ConfigError(f"`observe.sinks` has {name!r}, whose package is not installed: pip install {package}")


def open_sinks(
    config: ObserveConfig,
    run_dir: Path,
    settings: Mapping[str, Any],
    print_line: PrintLine,
    timeout: float = CLOSE_TIMEOUT_SECONDS,
) -> SinkSet:
    """The sinks that `config` names. `settings`: the run's configuration, resolved, for those that show it. `print_line`: takes a
    line for the person who watches, from any thread."""
    check_sinks(config)

    def maker(name: str) -> Callable[[], SinkBackend]:
        return lambda: SINK_BACKENDS[name](config, run_dir, settings)

    sinks = [Sink(name, maker(name), MAX_QUEUED_ROWS, print_line) for name in config.sinks]
    return SinkSet(sinks, timeout)
