"""What the driver of a run hands on while it lasts: to sinks, to whoever asks its Prometheus endpoint, and failures to the
person."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from r3async.config import Config, config_to_dict
from r3async.record.events import EVENTS_FILE
from r3async.record.reading import EPISODES_FILE, EVALUATION_FILE
from r3async.record.sinks import EpisodeExample, make_episode_example
from r3async.views.follow import FollowedFile
from r3async.views.summary import RunHistory, get_failure_key

MIN_TABLE_EXAMPLES = 16
"""That a table has at least, but for the last one of a run."""


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("evaluation/") for name in row)


class MetricsForwarder:
    """Takes the conductor's status whenever it was asked for: steps are in it. Evaluations and examples of episodes come from the
    files of the run, since an evaluation may end any time after its step; and from its events what episodes fail with, which is
    said once. Never waits but at the end."""

    def __init__(self, config: Config, run_dir: Path, print_line: Callable[[str], object]):
        from r3async.record.sinks import open_sinks, serve_metrics

        self._sinks = open_sinks(config.observe, run_dir, config_to_dict(config), print_line)
        self._run_dir, self._say = run_dir, print_line
        self._endpoint = serve_metrics("driver", run_dir, config.observe)
        self._evaluations, self._episodes = (FollowedFile(run_dir / name) for name in (EVALUATION_FILE, EPISODES_FILE))
        self._events, self._history = FollowedFile(run_dir / EVENTS_FILE), RunHistory()
        for _ in self._events.read_objects():  # of starts before this one
            pass
        self._examples: list[EpisodeExample] = []
        self._latest_metrics: dict[str, Any] = {}
        self.skip_written()

    def skip_written(self) -> None:
        """The run resumes: what its files have now was handed on before, or is of steps that are made again."""
        for file in (self._evaluations, self._episodes):
            for _ in file.read_objects():
                pass
        self._examples = []

    def show_status(self, status: Mapping[str, Any]) -> None:
        """A status of the conductor, with rows that were not in the one before."""
        for row in status["rows"]:
            self._forward_row(row)
        self._forward_new(MIN_TABLE_EXAMPLES)
        self._print_failures()

    def _print_failures(self) -> None:
        for event in self._events.read_objects():
            if self._history.add_event(event) and (kind := get_failure_key(event)) in self._history.failures:
                self._say(f"an episode failed, others like it are only counted: {self._history.failures[kind].text}")

    def _forward_row(self, row: Mapping[str, Any]) -> None:
        self._sinks.write(row)
        # An evaluation may be of an earlier step, which is not the one that the run is at.
        self._latest_metrics |= {n: v for n, v in row.items() if n not in ("step", "time") or not _is_evaluation(row)}
        if self._endpoint is not None:
            self._endpoint.set_metrics(self._latest_metrics)

    def _forward_new(self, at_least: int) -> None:
        for row in self._evaluations.read_objects():
            if {"step", "time"} <= row.keys():
                self._forward_row(row)
        for episode in self._episodes.read_objects():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another release
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
        # The run is over: whoever did not take its address away was killed.
        shutil.rmtree(self._run_dir / "prometheus", ignore_errors=True)
