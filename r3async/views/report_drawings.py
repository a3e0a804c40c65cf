"""Drawings of a report besides curves: heat maps of routing, and a histogram of ages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from r3async.data.metrics import finite_or_none
from r3async.record.reading import convert_valid
from r3async.views.number_formats import format_number, format_percent

MAX_MAP_COLUMNS = 400
MAX_AGES = 1000
"""Maximum bound of staleness up to which a histogram shows ages that no token has."""
STALENESS_METRIC = re.compile(r"staleness/tokens_(\d{1,9})")
"""Pattern of the metrics that count the trained tokens of one staleness."""


class AgreementLine(msgspec.Struct):
    """The agreement in a line of `routing.jsonl`.

    `agreement` is, by MoE layer, the share of recorded tokens for which the learner would choose
    the engine's experts.
    """

    step: float
    agreement: Annotated[list[float], msgspec.Meta(min_length=1)]


class ExpertLoadLine(msgspec.Struct):
    """The load in a line of `routing.jsonl`: tokens by MoE layer and expert."""

    load: Annotated[
        list[Annotated[list[float], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)
    ]
    step: Any = "?"


def build_route_maps(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the heat maps that have data, for the page's script; none for a dense model
    or an older run."""
    return [
        found
        for found in (_build_agreement_map(lines), _build_load_map(lines))
        if found is not None
    ]


def _build_agreement_map(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    rows = list(convert_valid(lines, AgreementLine))
    rows = [row for row in rows if len(row.agreement) == len(rows[-1].agreement)]
    if not rows:
        return None
    rows = rows[:: -len(rows) // MAX_MAP_COLUMNS][::-1]  # the last step is always among them
    shares = [row.agreement for row in rows]
    low = min(0.99, *map(min, shares))
    return {
        "id": "map-agreement",
        "title": "Agreement by layer",
        "caption": (
            "recorded tokens for which the learner's router would choose the engine's experts"
        ),
        "x": [row.step for row in rows],
        "y": list(range(len(shares[0]))),
        "z": [[round(share, 4) for share in layer] for layer in zip(*shares, strict=True)],
        "x_title": "step",
        "format": "share",
        "range": [low, 1],
        "ends": [format_percent(low), format_percent(1.0)],
        "colors": ["orange", "blue-soft"],
    }


def _build_load_map(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    found = [
        line
        for line in convert_valid(lines, ExpertLoadLine)
        if len({len(layer) for layer in line.load}) == 1
    ]
    if not found:
        return None
    step = found[-1].step
    table = found[-1].load
    shares = [
        [round(tokens / max(sum(layer) / len(layer), 1e-9), 3) for tokens in layer]
        for layer in table
    ]
    high = max(2, *map(max, shares))
    return {
        "id": "map-load",
        "title": "Load per expert",
        "caption": f"step {step}: tokens sent to each expert, over its layer's mean",
        "x": list(range(len(table[0]))),
        "y": list(range(len(table))),
        "z": shares,
        "x_title": "expert",
        "format": "",
        "range": [0, high],
        "ends": ["0", format_number(high)],
        "colors": ["grey-soft", "blue"],
    }


def build_staleness_histogram(
    rows: Sequence[dict[str, Any]], bound: int | None
) -> dict[str, Any] | None:
    """Build the histogram of ages in versions, as shares of all trained tokens.

    If the rows do not have the ages of tokens, the shares are of steps, by the age of their oldest
    token. None without either.
    """
    counts: Counter[int] = Counter()
    for name in sorted(set().union(*rows)):
        age = STALENESS_METRIC.fullmatch(name)
        if age:
            counts[int(age[1])] = int(sum(finite_or_none(row.get(name)) or 0 for row in rows))
    counts = +counts
    what = f"share of {counts.total():,} trained tokens"
    if not counts:
        counts.update(
            int(oldest)
            for row in rows
            if (oldest := finite_or_none(row.get("staleness/max"))) is not None
        )
        what = "share of steps by their oldest token"
    if not counts:
        return None
    ages = sorted({*range(min(bound or 0, MAX_AGES) + 1), *counts})
    return {
        "id": "ages",
        "title": "Staleness",
        "caption": f"versions between sampling and training; {what}",
        "x": ages,
        "y": [counts[age] / counts.total() for age in ages],
        "bound": bound,
    }
