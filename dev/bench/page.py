"""The command `python -m dev.bench.page`: write the figures of README.md and docs/ that are made from data in
docs/figures.

Between `<!-- bench: NAME -->` and `<!-- end of NAME -->` stands the table of bench/NAME.json, the report that
`python -m dev bench NAME --json` printed. Between `<!-- science: NAME -->` and `<!-- end of NAME -->` the data is
science/NAME.json, the results of a sweep; `<!-- science: NAME: reward/mean | rollout_kl/served_k3, window -->` shows these
outcomes alone. `--check` writes nothing, and exits 1 if a page differs from what would be written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dev.bench.report import BenchReport, format_table, report_lines
from r3async.views.sweeps import AXIS_LABELS, SweepResults, describe_run_counts, format_estimate, format_outcome

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES_DIRECTORY = DOCS / "figures"
PLACE = re.compile(r"(<!-- (bench|science): ([\w-]+)(?:: ([^>\n]+))? -->\n)(.*?)(<!-- end of \3 -->)", re.DOTALL)
"""The place of a table that is made from data."""
SEEDS, MODELS = 5, 3
"""Smallest numbers of seeds and initial models whose runs say something about other runs."""


def _render_sweep(results: SweepResults, outcomes: str = "") -> Iterator[str]:
    """Yield the means and paired differences of a sweep, and what it ran. Outcomes at equal time and tokens are only in
    its data. Raises `ValueError`.

    Args:
        outcomes: names of the outcomes to show, separated by `|`; empty for all.
    """
    complete = [run for run in results.runs if run.complete]
    few = len({run.seed for run in complete}) < SEEDS or len({run.model for run in complete}) < MODELS
    first = f" These are fewer than {SEEDS} seeds and {MODELS} initial models: a first look, and no result." * few
    yield f"{describe_run_counts(results)}, at {results.facts['commit']} on {results.facts['machine']}.{first}\n"
    requested = [name.strip() for name in outcomes.split("|") if name.strip()]
    if unknown := [name for name in requested if name not in results.outcomes]:
        raise ValueError(
            f"no outcome {unknown[0]!r} in {results.title!r}; it has {', '.join(map(repr, results.outcomes))}"
        )
    shown = requested or [name for name in results.outcomes if name.rpartition(", ")[2] not in AXIS_LABELS]
    heads = ("", *(results.outcomes[name] for name in shown))
    rows = [(point.name, *(format_outcome(point, name) for name in shown)) for point in results.points]
    yield from format_table(heads, rows, padded=False)
    compared = [point for point in results.points if point.differences]
    if compared:
        yield "\nDifferences of runs with the same seed and initial model, with 95 % intervals:\n"
        rows = [
            (
                f"{point.name} less {point.base}",
                *(format_estimate(point.differences.get(name), signed=True) for name in shown),
            )
            for point in compared
        ]
        yield from format_table(heads, rows, padded=False)
    for run in results.runs:
        if not run.complete:
            yield f"\n`{run.name}`: {run.status}{f' ({run.reason})' if run.reason else ''}."


def fill_tables(page: str) -> str:
    """Return `page` with the tables of its data; a place without data stays as it is."""

    def fill_table(place: re.Match[str]) -> str:
        begin, kind, name, outcomes, _, end = place.groups()
        path = FIGURES_DIRECTORY / kind / f"{name}.json"
        if not path.exists():
            return place.group()
        if kind == "science":
            lines = _render_sweep(msgspec.json.decode(path.read_bytes(), type=SweepResults), outcomes or "")
        else:
            lines = report_lines(msgspec.json.decode(path.read_bytes(), type=BenchReport), padded=False)
        return "\n".join([begin.rstrip("\n"), *lines, end])

    return PLACE.sub(fill_table, page)


def read_pages() -> dict[str, str]:
    """Return the texts of README.md and of the pages in docs/, by path from the top of the repository."""
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
        print(f"{', '.join(out_of_date)}: out of date; run python -m dev.bench.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
