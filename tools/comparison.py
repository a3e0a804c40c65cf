"""`python -m r3async.tools.comparison`: docs/comparison.md, from docs/figures/comparison.toml.

A cell of the data is what another framework states about itself, its evidence, and the day on which that was read. What is older
than 60 days on the day of writing (`as_of`) is printed as "?". The day is kept in the data, so that
the page is the same whenever it is checked. `--check` writes nothing, and exits 1 if the page is not what would be written.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "comparison.md"
DATA = PAGE.parent / "figures" / "comparison.toml"
OLD = datetime.timedelta(days=60)
HEAD = """# Comparison with other frameworks

What other open frameworks state about the points that r3async is about, each with its evidence. A framework that a table
lacks may have the feature: no evidence was found. "?" stands for evidence older than 60 days. The page was written on
{as_of} from [its data](figures/comparison.toml) by `python -m r3async.tools.comparison`. Each point ends with who is
ahead of r3async.
"""


class Cell(msgspec.Struct, forbid_unknown_fields=True):
    """What one framework states. `of`: a key of `Comparison.names`; `evidence`: addresses; `read`: when they were read."""

    of: str
    text: str
    evidence: list[str]
    read: datetime.date
    commit: str = ""


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """A row of the comparison. `ours`: what r3async does; `others_ahead`: who does more, "" for nobody known."""

    title: str
    ours: str
    others_ahead: str
    cell: list[Cell]


class Comparison(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file. `as_of`: the day on which the page was written."""

    as_of: datetime.date
    names: dict[str, str]
    point: list[Point]


def _label(address: str) -> str:
    """`#123` of a pull request or issue, `v1.2` of a release, else "docs"."""
    if numbered := re.search(r"/(?:pull|issues)/(\d+)$", address):
        return f"#{numbered[1]}"
    return address.rsplit("/", 1)[1] if "/releases/tag/" in address else "docs"


def _statement(cell: Cell, as_of: datetime.date) -> str:
    sources = ", ".join(f"[{_label(address)}]({address})" for address in cell.evidence)
    at = f" at `{cell.commit}`" if cell.commit else ""
    return f"? ({sources})" if as_of - cell.read > OLD else f"{cell.text} ({sources}{at})"


def page(data: Comparison) -> str:
    """The whole page in Markdown. Raises KeyError for a cell of a framework that has no name."""
    return "\n".join([HEAD.format(as_of=data.as_of), *(line for point in data.point for line in _point(point, data))])


def _point(point: Point, data: Comparison) -> Iterator[str]:
    yield from (f"## {point.title}", "", "| | |", "|---|---|", f"| **r3async** | {point.ours} |")
    yield from (f"| {data.names[cell.of]} | {_statement(cell, data.as_of)} |" for cell in point.cell)
    yield ""
    if point.others_ahead:
        yield from (f"Ahead: {point.others_ahead}", "")


def main(arguments: list[str]) -> int:
    """Write the page with today's date, or compare it (`--check`). The process's exit code."""
    text = DATA.read_text()
    data = msgspec.toml.decode(text, type=Comparison)
    if arguments == ["--check"]:
        return int(PAGE.read_text() != page(data))
    today = datetime.date.today()
    DATA.write_text(text.replace(f"as_of = {data.as_of}", f"as_of = {today}"))
    PAGE.write_text(page(msgspec.structs.replace(data, as_of=today)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
