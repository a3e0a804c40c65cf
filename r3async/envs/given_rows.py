"""Rows that a program gives `r3async.train` in place of a path: a list of dicts, or a
dataset of `datasets`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from r3async.config import ConfigError
from r3async.envs.arrow_rows import read_dataset_rows
from r3async.envs.row_values import to_plain_value

ROWS_SETTINGS = ("data", "path", "eval")
"""Last parts of the settings that name rows."""


def encode_given_rows(value: Any, setting: str) -> bytes | None:
    """Return rows as lines of JSON; None for a value that is no rows, such as a path.

    Raises `ConfigError` for rows that JSON cannot hold, and for a dataset that is not one split.
    """
    if setting.rpartition(".")[2] not in ROWS_SETTINGS:
        return None
    datasets = sys.modules.get("datasets")  # without it, the value is no dataset
    if datasets is not None and isinstance(value, datasets.DatasetDict):
        raise ConfigError(
            f"`{setting}` is a DatasetDict of the splits {', '.join(value)}: give one of them, and "
            "another as `data.eval` to evaluate"
        )
    if datasets is not None and isinstance(
        value, datasets.IterableDataset | datasets.IterableDatasetDict
    ):
        raise ConfigError(
            f"`{setting}` is a stream, and every row is read before a run: give "
            "list(rows.take(1000))"
        )
    if datasets is not None and isinstance(value, datasets.Dataset):
        return _encode_rows(read_dataset_rows(value, f"`{setting}`", sys.maxsize), setting)
    if isinstance(value, list | tuple) and all(isinstance(row, Mapping) for row in value):
        return _encode_rows(value, setting)
    return None


def _encode_rows(rows: Iterable[Mapping[str, Any]], setting: str) -> bytes:
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.dumps(to_plain_value(row)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"`{setting}`, row {number}: {error}") from error
    if not lines:
        raise ConfigError(f"`{setting}` has no rows")
    return "\n".join(lines).encode()
