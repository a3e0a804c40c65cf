"""Generator of docs/comparison.md from docs/figures/comparison.toml: `python -m dev.pages.comparison`.

A cell of the data is what another framework states about itself, with its evidence. Each piece of evidence has a date:
that of the release or thread, not the day it was read. The page prints its month. A cell whose newest date is more than
180 days before the date of writing (`as_of`) is marked "old". The date of writing is kept in the data, so that the page
is the same whenever it is checked. `--check` writes nothing, and exits with 1 if the page is not what would be written.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
DATA_PATH = PAGE_PATH.parent / "figures" / "comparison.toml"
MAX_EVIDENCE_AGE = datetime.timedelta(days=180)
PAGE_HEAD = f"""# Comparison with other frameworks

What nine other open frameworks state about the points that r3async is about, and about more, each with its evidence. A
framework that a table lacks may have the feature: no evidence was found. r3async has run only in parts on one GPU; the others
have. Each point ends with who is ahead of r3async.

Beside each source is the month of its own day: that of a release, or of the earliest entry of a pull request or issue that
was read. "Undated" are pages whose day is not known. A cell whose newest known day is more than {MAX_EVIDENCE_AGE.days} days old
is marked "old": the framework may have more by now. The page was written on {{as_of}} from [its data](figures/comparison.toml) by
`python -m dev.pages.comparison`.
"""
SOURCE_LABELS = (
    (r"/(?:pull|issues)/(\d+)$", "#"),
    (r"/(?:releases/tag|tree)/([^/]+)$", ""),
    (r"/blob/[^/]+/(?:.*/)?([^/]+)$", ""),
    (r"^https://pypi\.org/project/[^/]+/([\d.]+)/$", ""),
    (r"^https://arxiv\.org/abs/(.+)$", "arXiv "),
    (r"#(readme)$", ""),
)


class DatedEvidence(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of evidence: its address `at`, and its own date `dated`, if known."""

    at: str
    dated: datetime.date | None = None


class FrameworkStatement(msgspec.Struct, forbid_unknown_fields=True):
    """A statement of one framework. `of` is a key of `FrameworkComparison.names`."""

    of: str
    text: str
    evidence: list[DatedEvidence]


class ComparisonPoint(msgspec.Struct, forbid_unknown_fields=True):
    """One point of the comparison.

    Attributes:
        ours: What r3async does.
        others_ahead: The frameworks that do more; "" if none is known.
    """

    title: str
    ours: str
    others_ahead: str
    cell: list[FrameworkStatement]


class FrameworkComparison(msgspec.Struct, forbid_unknown_fields=True):
    """The whole data file. `as_of` is the date on which the page was written."""

    as_of: datetime.date
    names: dict[str, str]
    point: list[ComparisonPoint]


def _label_source(address: str) -> str:
    """Return a source's label: `#123` for a pull request or issue, a release's version, a file's name, else "docs"."""
    for pattern, mark in SOURCE_LABELS:
        if found := re.search(pattern, address):
            return mark + found[1]
    return "docs"


def _format_source(evidence: DatedEvidence) -> str:
    when = f"{evidence.dated:%b %Y}" if evidence.dated else "undated"
    return f"[{_label_source(evidence.at)}]({evidence.at}), {when}"


def is_old(cell: FrameworkStatement, as_of: datetime.date) -> bool:
    """Return whether the newest date of the evidence is further back than `MAX_EVIDENCE_AGE`. Evidence without a date
    is ignored."""
    days = [evidence.dated for evidence in cell.evidence if evidence.dated]
    return bool(days) and as_of - max(days) > MAX_EVIDENCE_AGE


def _format_statement(cell: FrameworkStatement, as_of: datetime.date) -> str:
    sources = "; ".join(map(_format_source, cell.evidence))
    return f"{cell.text} ({sources}{'; old' if is_old(cell, as_of) else ''})"


def render_page(data: FrameworkComparison) -> str:
    """Return the whole page in Markdown. Raises `KeyError` for a cell of a framework without a name."""
    return "\n".join(
        [PAGE_HEAD.format(as_of=data.as_of), *(line for point in data.point for line in _render_point(point, data))]
    )


def _render_point(point: ComparisonPoint, data: FrameworkComparison) -> Iterator[str]:
    yield from (f"## {point.title}", "", "| | |", "|---|---|", f"| **r3async** | {point.ours} |")
    yield from (f"| {data.names[cell.of]} | {_format_statement(cell, data.as_of)} |" for cell in point.cell)
    yield ""
    if point.others_ahead:
        yield from (f"Ahead: {point.others_ahead}", "")


def main(arguments: list[str]) -> int:
    """Write the page with today's date, or compare it (`--check`). Returns the exit status."""
    text = DATA_PATH.read_text()
    data = msgspec.toml.decode(text, type=FrameworkComparison)
    if arguments == ["--check"]:
        return int(PAGE_PATH.read_text() != render_page(data))
    today = datetime.date.today()
    DATA_PATH.write_text(text.replace(f"as_of = {data.as_of}", f"as_of = {today}"))
    PAGE_PATH.write_text(render_page(msgspec.structs.replace(data, as_of=today)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
