"""The command `python -m dev.bench.page`: write the tables of README.md and docs/ that are made
from data in docs/figures.

Between `<!-- bench: NAME -->` and `<!-- end of NAME -->` stands the table of bench/NAME.json, the
report that `python -m dev bench NAME --json` printed. `--check` writes nothing, and exits 1 if a
page differs from what would be written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from dev.bench.report import BenchReport, report_lines

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES_DIRECTORY = DOCS / "figures"
PLACE = re.compile(r"(<!-- bench: ([\w-]+) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)
"""The place of a table that is made from data."""


def fill_tables(page: str) -> str:
    """Return `page` with the tables of its data; a place without data stays as it is."""

    def fill_table(place: re.Match[str]) -> str:
        begin, name, _, end = place.groups()
        path = FIGURES_DIRECTORY / "bench" / f"{name}.json"
        if not path.exists():
            return place.group()
        lines = report_lines(msgspec.json.decode(path.read_bytes(), type=BenchReport), padded=False)
        return "\n".join([begin.rstrip("\n"), *lines, end])

    return PLACE.sub(fill_table, page)


def read_pages() -> dict[str, str]:
    """Return the texts of README.md and of the pages in docs/, by path from the top
    of the repository."""
    paths = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    return {str(path.relative_to(DOCS.parent)): path.read_text() for path in paths}


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them with `--check`."""
    out_of_date = []
    for name, text in read_pages().items():
        filled = fill_tables(text)
        if filled == text:
            continue
        out_of_date.append(name)
        if "--check" not in arguments:
            (DOCS.parent / name).write_text(filled)
            print(f"wrote {name}")
    if "--check" in arguments and out_of_date:
        print(
            f"{', '.join(out_of_date)}: out of date; run python -m dev.bench.page", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
