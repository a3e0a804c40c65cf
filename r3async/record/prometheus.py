"""A `/metrics` endpoint for Prometheus in each process of a run, if `observe.prometheus_port` is set."""

from __future__ import annotations

import errno
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.config.operation import ObserveConfig
from r3async.record.catalogue import find_metric
from r3async.record.reading import read_run_config
from r3async.world.files import make_directory, replace_file

MAX_PORTS_TRIED = 100


def to_prometheus_name(name: str) -> str:
    """`reward/mean` -> `r3async_reward_mean`."""
    return "r3async_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


class MetricsEndpoint:
    """One process's endpoint: its memory, CPU time and open files, the last row that `set_metrics` was given, and what
    `read_metrics()` returns at that moment.

    Served by a thread of its own, which is the one that calls `read_metrics`; `close` ends it. `port`: where it listens.
    """

    def __init__(self, role: str, run_dir: Path, config: ObserveConfig):
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._row: dict[str, float] = {}
        self.read_metrics: Callable[[], Mapping[str, Any]] = dict
        self._labels = {"role": role, "run": run_dir.name}
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)  # it is one by its `collect`
        self._server, self._thread, self.port = _start_server(
            registry, config.prometheus_host, config.prometheus_port or 0
        )
        host = socket.gethostname() if config.prometheus_host in ("0.0.0.0", "::") else config.prometheus_host
        self.target_file = run_dir / "prometheus" / f"{role}.json"
        described = json.dumps([{"targets": [f"{host}:{self.port}"], "labels": self._labels}])
        try:
            make_directory(self.target_file.parent)
            replace_file(self.target_file, described.encode())
        except OSError as error:  # it serves all the same
            print(f"{self.target_file} could not be written ({error}): {described}", file=sys.stderr)

    def set_metrics(self, row: Mapping[str, Any]) -> None:
        """Show these figures from now on; whatever is no number is left out."""
        self._row = _select_numbers(row)

    def collect(self) -> Iterable[Any]:
        """For prometheus_client: a gauge a metric."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        try:
            now = _select_numbers(self.read_metrics())
        except Exception as error:  # of an engine that is just stopping, say: the rest is still worth showing
            print(f"figures for Prometheus could not be read: {error!r}", file=sys.stderr)
            now = {}
        for name, value in (self._row | now).items():
            gauge = GaugeMetricFamily(
                to_prometheus_name(name), find_metric(name).description, labels=list(self._labels)
            )
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def close(self) -> None:
        """Stop serving, and take the target file away."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
        self.target_file.unlink(missing_ok=True)


def _select_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


def serve_actor_metrics(role: str, run_dir: Path) -> MetricsEndpoint | None:
    """`serve_metrics` for a process that knows only its run's directory; None too where there is no configuration in it."""
    try:
        config = msgspec.convert(read_run_config(run_dir).get("observe", {}), ObserveConfig)
    except msgspec.ValidationError as error:
        print(f"no Prometheus endpoint for {role}: {error}", file=sys.stderr)
        return None
    return serve_metrics(role, run_dir, config)


def serve_metrics(role: str, run_dir: Path, config: ObserveConfig) -> MetricsEndpoint | None:
    """This process's endpoint, or None if `observe.prometheus_port` is not set. A run continues without one that cannot be
    opened: then None too, with a line on stderr, which is the process's log."""
    if config.prometheus_port is None:
        return None
    try:
        return MetricsEndpoint(role, run_dir, config)
    except (ImportError, OSError) as error:
        print(f"no Prometheus endpoint for {role} (observe.prometheus_port): {error}", file=sys.stderr)
        return None


def _start_server(registry: Any, host: str, port: int) -> tuple[Any, threading.Thread, int]:
    from prometheus_client import start_http_server

    last: OSError | None = None
    for candidate in range(port, min(port + MAX_PORTS_TRIED, 65536)) if port else [0]:
        try:
            server, thread = start_http_server(candidate, addr=host, registry=registry)
            return server, thread, server.server_port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            last = error
    raise OSError(f"no free port from {port} on: {last}")
