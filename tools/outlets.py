"""Forward a run's metrics to sinks and a Prometheus endpoint, and its failures to the
user, in the driver."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from r3async.config import Config, config_to_dict
from r3async.record.events import EVENTS_FILE
from r3async.record.reading import EPISODES_FILE, EVALUATION_FILE
from r3async.record.sink_backends import EpisodeExample, make_episode_example
from r3async.views.follow import FollowedFile
from r3async.views.summary import RunHistory, get_failure_key

MIN_TABLE_EXAMPLES = 16
"""Minimum number of examples in a table, except for the last one of a run."""


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("evaluation/") for name in row)


class MetricsForwarder:
    """A forwarder of the metrics, episodes and failures of a run.

    It takes each status that the conductor reports; steps are in it. Evaluations and example
    episodes come from the run's files, because an evaluation may end any time after its step.
    Failures of episodes come from its events, and each kind is printed once. It never blocks
    except at the end.
    """

    def __init__(self, config: Config, run_dir: Path, print_line: Callable[[str], object]):
        from r3async.record.prometheus import serve_metrics
        from r3async.record.sinks import open_sinks

        self._sinks = open_sinks(config.log, run_dir, config_to_dict(config), print_line)
        self._run_dir = run_dir
        self._say = print_line
        self._endpoint = serve_metrics("driver", run_dir, config.observe)
        self._evaluations, self._episodes = (
            FollowedFile(run_dir / name) for name in (EVALUATION_FILE, EPISODES_FILE)
        )
        self._events = FollowedFile(run_dir / EVENTS_FILE)
        self._history = RunHistory()
        for _ in self._events.read_objects():  # events of earlier starts
            pass
        self._examples: list[EpisodeExample] = []
        self._latest_metrics: dict[str, Any] = {}
        self.skip_written()

    def skip_written(self) -> None:
        """Skip what the files contain when a run resumes: it was forwarded before, or its
        steps are repeated."""
        for file in (self._evaluations, self._episodes):
            for _ in file.read_objects():
                pass
        self._examples = []

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Forward the new rows of a conductor's status."""
        for row in status["rows"]:
            self._forward_row(row)
        self._forward_new(MIN_TABLE_EXAMPLES)
        self._print_failures()

    def _print_failures(self) -> None:
        for event in self._events.read_objects():
            if self._history.add_event(event):
                kind = get_failure_key(event)
                if kind in self._history.failures:
                    self._say(
                        "an episode failed, others like it are only counted: "
                        f"{self._history.failures[kind].text}"
                    )

    def _forward_row(self, row: Mapping[str, Any]) -> None:
        self._sinks.write(row)
        # An evaluation may belong to an earlier step than the run's present one.
        self._latest_metrics |= {
            n: v for n, v in row.items() if n not in ("step", "time") or not _is_evaluation(row)
        }
        if self._endpoint is not None:
            self._endpoint.set_metrics(self._latest_metrics)

    def _forward_new(self, at_least: int) -> None:
        for row in self._evaluations.read_objects():
            if {"step", "time"} <= row.keys():
                self._forward_row(row)
        for episode in self._episodes.read_objects():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # written by another release
                self._examples.append(make_episode_example(episode))
        if len(self._examples) >= at_least:
            self._sinks.write(self._examples)
            self._examples = []

    def __enter__(self) -> MetricsForwarder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._forward_new(1)
        self._print_failures()
        for file in (self._evaluations, self._episodes, self._events):
            file.close()
        self._sinks.close()
        if self._endpoint is not None:
            self._endpoint.close()
        # The run is over: a process that did not remove its address was killed.
        shutil.rmtree(self._run_dir / "prometheus", ignore_errors=True)
