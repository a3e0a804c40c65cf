"""Sinks that copy a run's records to Prometheus, TensorBoard, W&B, MLflow and trackio.

A sink cannot slow down or stop a run. Each one has its own thread and bounded queue: `write` never
waits, rows that do not fit are dropped and counted, and an exception in a sink ends only that sink.
`metrics.jsonl` is the record; sinks hold copies.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3async.config.observe import LogConfig
from r3async.config.section import ConfigError
from r3async.data.metrics import select_main_metrics
from r3async.record.sink_backends import (
    SINK_BACKENDS,
    EpisodeExample,
    MetricsRow,
    SinkBackend,
    find_missing_package,
)

PrintLine = Callable[[str], object]
MAX_QUEUED_ROWS = 1024
"""Maximum number of rows queued for a slow sink. Further rows are dropped for that sink, counted,
and reported at the first one and at the end."""
CLOSE_TIMEOUT_SECONDS = 15.0
"""Maximum seconds that the end of a run waits for sinks to write their queued rows."""
MAX_CONSECUTIVE_FAILURES = 3
"""Number of consecutive rows that fail in a sink before it is closed."""


class Sink:
    """One backend behind a queue.

    `print_line` is called when the sink failed, when the first row was dropped, and at the end if
    rows are missing.
    """

    def __init__(
        self,
        name: str,
        make_backend: Callable[[], SinkBackend],
        capacity: int,
        print_line: PrintLine,
    ):
        self.name = name
        self._make = make_backend
        self._report = print_line
        self._queue: queue.Queue[MetricsRow | Sequence[EpisodeExample] | None] = queue.Queue(
            capacity
        )
        self.dropped_rows = 0
        self.written_rows = 0
        self._failed = threading.Event()
        # A daemon thread, so that the interpreter can exit while a sink hangs.
        self._thread = threading.Thread(target=self._run_thread, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: MetricsRow | Sequence[EpisodeExample]) -> None:
        """Queue a row, or example episodes. Returns at once."""
        if self._failed.is_set():
            self.dropped_rows += 1
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped_rows += 1
            if self.dropped_rows == 1:
                self._report(
                    f"sink {self.name} is slower than the run: it will miss rows, "
                    "metrics.jsonl will not"
                )

    def close(self, deadline: float) -> None:
        """Wait until everything queued is written, but no longer than `deadline` on the
        monotonic clock."""
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
        self._report(
            f"sink {self.name} failed and is left out from here on: {type(error).__name__}: {error}"
        )


class SinkSet:
    """All sinks of a run; a context manager. Its exit waits at most `timeout` seconds for
    all sinks together."""

    def __init__(self, sinks: Sequence[Sink], timeout: float, *, only_main_metrics: bool = False):
        self.sinks = list(sinks)
        self._timeout = timeout
        self._only_main_metrics = only_main_metrics

    def write(self, row: MetricsRow | Sequence[EpisodeExample]) -> None:
        """Queue a row of `metrics.jsonl` or `evaluation.jsonl`, or example episodes, for every
        sink. Returns at once.

        The row must not be changed afterwards.
        """
        if self._only_main_metrics and isinstance(row, Mapping):
            row = select_main_metrics(row)
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


def check_sinks(config: LogConfig) -> None:
    """Raise `ConfigError`, with the pip command, for a sink whose package is not installed."""
    for name in config.to:
        package = find_missing_package(name)
        if package:
            raise ConfigError(
                f"`log.to` has {name!r}, whose package is not installed: pip install {package}"
            )


def open_sinks(
    config: LogConfig,
    run_dir: Path,
    settings: Mapping[str, Any],
    print_line: PrintLine,
    timeout: float = CLOSE_TIMEOUT_SECONDS,
) -> SinkSet:
    """Open the sinks that `config` names. Raises `ConfigError` if a package is missing.

    Args:
        config: The `observe` section of the configuration.
        run_dir: Directory of the run.
        settings: The run's resolved configuration, for sinks that show it.
        print_line: Called from any thread with a line for the user.
        timeout: Seconds that the end of the run waits for all sinks together.
    """
    check_sinks(config)

    def maker(name: str) -> Callable[[], SinkBackend]:
        return lambda: SINK_BACKENDS[name](config, run_dir, settings)

    sinks = [Sink(name, maker(name), MAX_QUEUED_ROWS, print_line) for name in config.to]
    return SinkSet(sinks, timeout, only_main_metrics=config.metrics == "main")
