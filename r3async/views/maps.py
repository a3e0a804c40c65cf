"""The heat maps of a report, made of `routing.jsonl`: agreement by layer over the steps, and load per expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MAX_COLUMNS = 400


def _numbers(values: Any) -> list[float] | None:
    """A list of finite numbers, or None: lines of other releases, or damaged ones, are not drawn."""
    if not isinstance(values, list) or not values:
        return None
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v) for v in values):
        return None
    return values


def _table(rows: Any) -> list[list[float]] | None:
    lines = [_numbers(row) for row in rows] if isinstance(rows, list) and rows else [None]
    found = [line for line in lines if line is not None]
    return found if len(found) == len(lines) and len({len(line) for line in found}) == 1 else None


def describe_maps(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The maps that there is data for, as the page's script wants them; none for a dense model or an older run."""
    return [found for found in (_agreement(lines), _load(lines)) if found is not None]


def _agreement(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    rows = [
        (line["step"], shares)
        for line in lines
        if _numbers([line.get("step")]) and (shares := _numbers(line.get("agreement")))
    ]
    rows = [row for row in rows if len(row[1]) == len(rows[-1][1])]
    if not rows:
        return None
    every = -(-len(rows) // MAX_COLUMNS)
    rows = rows[::-1][::every][::-1]  # the last step is always among them
    lowest = min(min(shares) for _, shares in rows)
    return {
        "id": "map-agreement",
        "title": "Agreement by layer",
        "caption": "recorded tokens for which the learner's router would choose the engine's experts",
        "x": [step for step, _ in rows],
        "y": list(range(len(rows[0][1]))),
        "z": [[round(shares[layer], 4) for _, shares in rows] for layer in range(len(rows[0][1]))],
        "x_title": "step",
        "format": ".2%",
        "range": [min(lowest, 0.99), 1],
        "colors": ["orange", "blue-soft"],
        "each": "step %{x}, MoE layer %{y}",
    }


def _load(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    for line in reversed(lines):
        table = _table(line.get("load"))
        if table is None:
            continue
        shares = [[round(tokens / max(sum(row) / len(row), 1e-9), 3) for tokens in row] for row in table]
        return {
            "id": "map-load",
            "title": "Load per expert",
            "caption": f"step {line.get('step', '?')}: tokens sent to each expert, over its layer's mean",
            "x": list(range(len(table[0]))),
            "y": list(range(len(table))),
            "z": shares,
            "x_title": "expert",
            "format": ".2f",
            "range": [0, max(max(max(row) for row in shares), 2)],
            "colors": ["grey-soft", "blue"],
            "each": "expert %{x}, MoE layer %{y}",
        }
    return None
