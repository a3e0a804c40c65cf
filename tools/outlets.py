"""What the driver of a run hands on while it lasts: to sinks, to whoever asks its Prometheus endpoint, and failures to the
person."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from r3async.config import Config, to_dict
from r3async.record.backends import Example, example_of
from r3async.record.events import EVENTS
from r3async.record.reading import EPISODES, EVALUATION
from r3async.views.follow import FollowedFile
from r3async.views.summary import History, failure_kind

EXAMPLES = 16
"""That a table has at least, but for the last one of a run."""


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("evaluation/") for name in row)


class Outlets:
    """Takes the conductor's status whenever it was asked for: steps are in it. Evaluations and examples of episodes come from the
    files of the run, since an evaluation may end any time after its step; and from its events what episodes fail with, which is
    said once. Never waits but at the end."""

    def __init__(self, config: Config, run_dir: Path, say: Callable[[str], object]):
        from r3async.record.prometheus import serve_metrics
        from r3async.record.sinks import open_sinks

        self._sinks = open_sinks(config.observe, run_dir, to_dict(config), say)
        self._run_dir, self._say = run_dir, say
        self._endpoint = serve_metrics("driver", run_dir, config.observe)
        self._evaluations, self._episodes = (FollowedFile(run_dir / name) for name in (EVALUATION, EPISODES))
        self._events, self._history = FollowedFile(run_dir / EVENTS), History()
        for _ in self._events.objects():  # of starts before this one
            pass
        self._examples: list[Example] = []
        self._figures: dict[str, Any] = {}
        self.rewind()

    def rewind(self) -> None:
        """The run resumes: what its files have now was handed on before, or is of steps that are made again."""
        for file in (self._evaluations, self._episodes):
            for _ in file.objects():
                pass
        self._examples = []

    def show(self, status: Mapping[str, Any]) -> None:
        """A status of the conductor, with rows that were not in the one before."""
        for row in status["rows"]:
            self._write(row)
        self._follow(EXAMPLES)
        self._tell_failures()

    def _tell_failures(self) -> None:
        for event in self._events.objects():
            if self._history.take(event) and (kind := failure_kind(event)) in self._history.failures:
                self._say(f"an episode failed, others like it are only counted: {self._history.failures[kind].text}")

    def _write(self, row: Mapping[str, Any]) -> None:
        self._sinks.write(row)
        # An evaluation may be of an earlier step, which is not the one that the run is at.
        self._figures |= {n: v for n, v in row.items() if n not in ("step", "time") or not _is_evaluation(row)}
        if self._endpoint is not None:
            self._endpoint.update(self._figures)

    def _follow(self, at_least: int) -> None:
        for row in self._evaluations.objects():
            if {"step", "time"} <= row.keys():
                self._write(row)
        for episode in self._episodes.objects():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another release
                self._examples.append(example_of(episode))
        if len(self._examples) >= at_least:
            self._sinks.write(self._examples)
            self._examples = []

    def __enter__(self) -> Outlets:
        return self

    def __exit__(self, *exc: object) -> None:
        self._follow(1)
        self._tell_failures()
        for file in (self._evaluations, self._episodes, self._events):
            file.close()
        self._sinks.close()
        if self._endpoint is not None:
            self._endpoint.close()
        # The run is over: whoever did not take its address away was killed.
        shutil.rmtree(self._run_dir / "prometheus", ignore_errors=True)
