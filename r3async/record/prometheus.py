"""The `/metrics` endpoint for Prometheus in each process of a run (`observe.prometheus_port`)."""

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

from r3async.config.observe import ObserveConfig
from r3async.config.serving import bracket_ipv6, strip_brackets
from r3async.data.metrics import find_metric
from r3async.record.reading import read_run_config
from r3async.world.files import make_directory, replace_file

MAX_PORTS_TRIED = 100


def to_prometheus_name(name: str) -> str:
    """Convert the name of a metric: `reward/mean` -> `r3async_reward_mean`."""
    return "r3async_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


class MetricsEndpoint:
    """The Prometheus endpoint of one process.

    It serves the memory, CPU time and open files of the process, the last row passed to
    `set_metrics`, and the current result of `read_metrics()`. A separate thread serves, and calls
    `read_metrics`; `close` stops it.

    Attributes:
        port: Port on which the endpoint listens.
    """

    def __init__(self, role: str, run_dir: Path, config: ObserveConfig):
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._row: dict[str, float] = {}
        self.read_metrics: Callable[[], Mapping[str, Any]] = dict
        self._labels = {"role": role, "run": run_dir.name}
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)  # its `collect` makes it a collector
        self._server, self._thread, self.port = _start_server(
            registry, strip_brackets(config.prometheus_host), config.prometheus_port or 0
        )
        host = strip_brackets(config.prometheus_host)
        host = socket.gethostname() if host in ("0.0.0.0", "::") else bracket_ipv6(host)
        self.target_file = run_dir / "prometheus" / f"{role}.json"
        described = json.dumps([{"targets": [f"{host}:{self.port}"], "labels": self._labels}])
        try:
            make_directory(self.target_file.parent)
            replace_file(self.target_file, described.encode())
        except OSError as error:  # the endpoint serves without the file
            print(
                f"{self.target_file} could not be written ({error}): {described}", file=sys.stderr
            )

    def set_metrics(self, row: Mapping[str, Any]) -> None:
        """Serve the numbers of `row` from now on; other values are left out."""
        self._row = _select_numbers(row)

    def collect(self) -> Iterable[Any]:
        """Yield one gauge per metric; prometheus_client calls this."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        try:
            now = _select_numbers(self.read_metrics())
        except Exception as error:
            # For example, an engine is just stopping: the other metrics are still worth serving.
            print(f"figures for Prometheus could not be read: {error!r}", file=sys.stderr)
            now = {}
        for name, value in (self._row | now).items():
            gauge = GaugeMetricFamily(
                to_prometheus_name(name), find_metric(name).description, labels=list(self._labels)
            )
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def close(self) -> None:
        """Stop serving, and remove the target file."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
        self.target_file.unlink(missing_ok=True)


def _select_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


def serve_actor_metrics(role: str, run_dir: Path) -> MetricsEndpoint | None:
    """Call `serve_metrics` in a process that knows only its run's directory.

    Returns None also if that has no valid configuration.
    """
    try:
        config = msgspec.convert(read_run_config(run_dir).get("observe", {}), ObserveConfig)
    except msgspec.ValidationError as error:
        print(f"no Prometheus endpoint for {role}: {error}", file=sys.stderr)
        return None
    return serve_metrics(role, run_dir, config)


def serve_metrics(role: str, run_dir: Path, config: ObserveConfig) -> MetricsEndpoint | None:
    """Open this process's Prometheus endpoint; None if `observe.prometheus_port` is not set.

    A run continues without an endpoint that cannot be opened: then this returns None too, and
    prints a line to stderr, which is the process's log.
    """
    if config.prometheus_port is None:
        return None
    try:
        return MetricsEndpoint(role, run_dir, config)
    except (ImportError, OSError) as error:
        print(
            f"no Prometheus endpoint for {role} (observe.prometheus_port): {error}", file=sys.stderr
        )
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
