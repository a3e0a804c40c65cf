"""Results of evaluations beside the checkpoints (`evaluation-00000010.json`), and the best by them.

A file exists as soon as its evaluation begins, so that the checkpoint of that step is not removed
before it is known whether it is the best.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

_FILE_PATTERN = re.compile(r"evaluation-(\d{8,})\.json")


class EvaluationFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file of the evaluation after `step`.

    Attributes:
        time: When the file was written, in unix seconds.
        figures: Figures of the evaluation's row in `evaluation.jsonl`; empty while it is played.
        result: The whole result, with the rewards of each task; empty while it is played.
    """

    step: int
    time: float
    figures: dict[str, Any] = {}
    result: dict[str, Any] = {}

    @property
    def is_finished(self) -> bool:
        return bool(self.figures)


def evaluation_path(directory: Path, step: int) -> Path:
    """Return the path of a step's evaluation file in `directory`, the directory of
    the checkpoints."""
    return directory / f"evaluation-{step:08d}.json"


def write_evaluation(
    directory: Path, evaluation: EvaluationFile, *, files: Files = REAL_WORLD.files
) -> Path:
    """Write the file of an evaluation, and return its path. Raises `OSError`."""
    make_directory(directory, files=files)
    path = evaluation_path(directory, evaluation.step)
    replace_file(path, msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n", files=files)
    return path


def read_evaluations(
    directory: Path, *, files: Files = REAL_WORLD.files
) -> dict[int, EvaluationFile]:
    """Return the evaluations by step, oldest first. Files that are no evaluations are left out.

    Raises `OSError` if the system does not return one now: it may be of the best checkpoint, which
    is then not pruned.
    """
    found = {}
    for name in files.list_names(directory):
        if not _FILE_PATTERN.fullmatch(name):
            continue
        try:
            one = decode_json(read_file(directory / name, files=files), EvaluationFile)
        except (FileNotFoundError, MalformedError):
            continue
        found[one.step] = one
    return dict(sorted(found.items()))


def remove_evaluations(
    directory: Path, *, after: int | None = None, files: Files = REAL_WORLD.files
) -> None:
    """Remove the evaluations that were not finished; with `after`, those of later steps instead,
    which a resume takes back."""
    for step, one in read_evaluations(directory, files=files).items():
        if step > after if after is not None else not one.is_finished:
            files.remove(evaluation_path(directory, step))


def find_best_evaluation(
    evaluations: dict[int, EvaluationFile], metric: str, steps: list[int]
) -> tuple[int, float] | None:
    """Return the first of `steps` whose evaluation has the largest `metric`, and that value; None
    if none was evaluated."""
    values = {
        step: evaluations[step].figures.get(metric) for step in sorted(steps) if step in evaluations
    }
    known = {step: float(value) for step, value in values.items() if isinstance(value, int | float)}
    if not known:
        return None
    best = max(known, key=lambda step: known[step])
    return best, known[best]
