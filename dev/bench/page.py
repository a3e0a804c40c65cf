"""The command `python -m dev.bench.page`: write the figures of README.md and docs/ that are made from data in
docs/figures.

A table stands between `<!-- bench: NAME -->` and `<!-- end of NAME -->`, so that none of its figures is typed by hand.
Its data is benchmarks.json, the output of `python -m dev bench all --json`. Between `<!-- science: NAME -->` and `<!--
end of NAME -->` the data is science/NAME.json, which `python -m dev bench science` wrote; `<!-- science: NAME:
reward/mean | rollout_kl/served_k3, window -->` shows these outcomes alone. Figures within sentences are those of claims.toml
(`bench/claims.py`). `--check` writes nothing, and exits 1 if a page differs from what would be written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dev.bench import claims
from r3async.views.sweeps import AXIS_LABELS, SweepResults, describe_run_counts, format_estimate, format_outcome

DATA = claims.FIGURES / "benchmarks.json"
SCIENCE = claims.FIGURES / "science"
PLACE = re.compile(claims.TABLE, re.DOTALL)
SEEDS, MODELS = 5, 3
"""Smallest numbers of seeds and initial models whose runs say something about other runs."""

Cells = Sequence[object]


def _table(heads: Cells, rows: Sequence[Cells]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(str(cell) for cell in cells)} |".replace("| --- ", "|---").replace("--- |", "---|")


def _packing(report: Mapping[str, Any]) -> Iterator[str]:
    def row(name: str, of: Mapping[str, Any]) -> Cells:
        figures = (f"{of[key]:.4f}" for key in ("efficiency", "ceiling", "apart", "dealt"))
        return name, *figures, f"{of['at_bound']} of {of['cases']}", of["below"]

    heads = ("seed", "lockstep", "ceiling", "apart", "dealt", "fewest micro-batches in", "below apart or dealt in")
    rows = [row(seed, of) for seed, of in report["by_seed"].items()]
    yield from _table(heads, [*rows, row("all", report["summary"])])
    slowest = ", ".join(f"{ms:.0f} ms at N = {n}" for n, ms in report["summary"]["cpu_ms"].items())
    yield f"\nPlanning takes at most {slowest} of processor time, on one thread."


def _wire(report: Mapping[str, Any]) -> Iterator[str]:
    def form(of: Mapping[str, float]) -> str:
        return f"{of['bytes_per_token']:.1f} B, {of['encode_us']:.3f} / {of['decode_us']:.3f} µs"

    rows = [
        (
            f"{case['name']}, `{case['form']}`, {case['tokens']:,} tokens in {case['rows']}",
            *(form(case[way]) for way in ("wire", "lists", "pickle")),
            f"{case['decode_ratio']:.1f} ×",
        )
        for case in report["cases"]
    ]
    heads = ("trajectory, samples", "wire", "lists of numbers (msgpack)", "pickle 5", "decode against lists")
    yield from _table(heads, rows)


def _transport(report: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for size in report["sizes"]:
        for path, rate in size["paths"].items():
            lag, own = rate["learner_lag_ms"], rate["learner_own_lag_ms"]
            rows.append(
                (
                    f"{size['nbytes']:,}",
                    path,
                    f"{rate['gb_per_s']:.2f}",
                    f"{rate['share_of_raw']:.2f} / {rate['share_of_curve']:.2f}",
                    f"{rate['cpu_s_per_gb']:.2f}",
                    f"{rate['share_of_raw_cpu']:.2f} / {rate['share_of_curve_cpu']:.2f}",
                    f"{lag[1]:.1f} ({own[1]:.1f})" if lag else "",
                )
            )
    heads = ("bytes", "path", "GB/s", "of raw / raw with CURVE", "CPU s/GB", "raw's CPU / raw with CURVE's")
    yield from _table((*heads, "learner's lag p99 (own), ms"), rows)


def _loss(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (name, f"{of['peak_mib']:,.0f} MiB", f"{min(of['seconds']):.2f}", f"{of['loss']:.5f}")
        for name, of in (("all logits at once", report["naive"]), ("by chunks", report["chunked"]))
    ]
    yield from _table(("form", "peak", "seconds", "loss"), rows)
    yield f"\nBy chunks takes {report['memory_ratio']:.2f} of the memory and {report['time_ratio']:.2f} times the time."


def _scale(report: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for axis in report["axes"]:
        points = [(p["size"], 1e6 * p["cpu_seconds"] / p["work"]) for p in axis["points"]]
        rows.append(
            (
                axis["name"],
                ", ".join(str(size) for size, _ in points),
                axis["unit"],
                ", ".join(f"{each:.3g}" for _, each in points),
                f"{axis['exponent']:.2f}",
                f"{axis['tail']:.2f} ({axis['limit']})",
            )
        )
    heads = ("axis", "sizes", "unit of work", "own CPU µs a unit, by size", "exponent", "of the larger half (limit)")
    yield from _table(heads, rows)


def _weights(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (part, f"{1e3 * of['median']:.1f}", f"{1e3 * of['maximum']:.1f}", f"{1e3 * each:.1f}" if each else "")
        for part, of in report["seconds"].items()
        for each in [report["ms_per_tensor"].get(part)]
    ]
    yield (
        f"{report['tensors']} tensors, {report['bytes'] / 1e6:.1f} MB, {report['updates']} updates; engines are paused for "
        f"{report['paused_share']:.1%} of the time.\n"
    )
    yield from _table(("part of an update", "median ms", "longest ms", "µs a tensor"), rows)


def _e2e(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of the pipeline against its bare parts. Ratios to a peer are left out, because they need the
    peer's Python."""
    own = report["own"]
    names = {
        "cpu_per_token_ratio": "processor time a generated token, over a bare `AsyncLLM`",
        "learner_cpu_ratio": "processor time of the learner a trained token, over a bare loop",
        "trainer_cpu_ratio": "the step alone, over the same loop",
        "learner_idle": "share of the time in which the learner waits",
        "engine_idle": "share of the time in which an engine has no request",
        "lag_p99_ms": "loop lag of its own work, p99, ms",
    }
    yield from _table(("what", "figure"), [(text, f"{own[name]:.2f}") for name, text in names.items()])
    for run in own["runs"]:
        roles = ", ".join(f"{role} {1e3 * seconds:.0f}" for role, seconds in run["by_role"].items())
        yield f"\nProcessor time a step, ms: {roles}; {run['tokens_per_step']:.0f} tokens in {run['seconds_per_step']:.2f} s."


TABLES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "packing": _packing,
    "wire": _wire,
    "transport": _transport,
    "loss": _loss,
    "scale": _scale,
    "weights": _weights,
    "e2e": _e2e,
}
"""Functions that yield the lines of a benchmark's table, by benchmark."""


def _measured(data: Mapping[str, Any], name: str) -> str:
    """Return the sentence that says how a benchmark was measured."""
    machine = data["machine"]
    small = "A small measurement (`--quick`)" if data["quick"] else "Measured"
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    return f"{small} on {machine['cores']} cores, {versions}; load average before it {data['load'][name]:.1f}.\n"


def _science(results: SweepResults, outcomes: str = "") -> Iterator[str]:
    """Yield the means and paired differences of a sweep, and what it ran. Outcomes at equal time and tokens are only in
    its data. Raises `ValueError`.

    Args:
        outcomes: names of the outcomes to show, separated by `|`; empty for all.
    """
    complete = [run for run in results.runs if run.complete]
    few = len({run.seed for run in complete}) < SEEDS or len({run.model for run in complete}) < MODELS
    first = f" These are fewer than {SEEDS} seeds and {MODELS} initial models: a first look, and no result." * few
    yield f"{describe_run_counts(results)}, at {results.facts['commit']} on {results.facts['machine']}.{first}\n"
    asked = [name.strip() for name in outcomes.split("|") if name.strip()]
    if unknown := [name for name in asked if name not in results.outcomes]:
        raise ValueError(
            f"no outcome {unknown[0]!r} in {results.title!r}; it has {', '.join(map(repr, results.outcomes))}"
        )
    shown = asked or [name for name in results.outcomes if name.rpartition(", ")[2] not in AXIS_LABELS]
    yield from _table(
        ("", *(results.outcomes[name] for name in shown)),
        [(point.name, *(format_outcome(point, name) for name in shown)) for point in results.points],
    )
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
        yield from _table(("", *(results.outcomes[name] for name in shown)), rows)
    for run in results.runs:
        if not run.complete:
            yield f"\n`{run.name}`: {run.status}{f' ({run.reason})' if run.reason else ''}."


def written(page: str, data: Mapping[str, Any]) -> str:
    """Return `page` with the tables that `data` and the sweeps have; the place of another benchmark stays as it is."""

    def fill(place: re.Match[str]) -> str:
        begin, kind, name, outcomes, _, end = place.groups()
        if kind == "science" and (path := SCIENCE / f"{name}.json").exists():
            lines = list(_science(msgspec.json.decode(path.read_bytes(), type=SweepResults), outcomes or ""))
        elif kind == "bench" and name in data["reports"]:
            lines = [_measured(data, name), *TABLES[name](data["reports"][name])]
        else:
            return place.group()
        return "\n".join([begin.rstrip("\n"), *lines, end])

    return PLACE.sub(fill, page)


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them with `--check`."""
    data = msgspec.json.decode(DATA.read_bytes().rstrip().rpartition(b"\n")[2])
    register, out_of_date = claims.read_register(), []
    for name, text in claims.pages().items():
        made = claims.written(name, written(text, data), register)
        if made != text:
            out_of_date.append(name)
            if "--check" not in arguments:
                (claims.DOCS.parent / name).write_text(made)
                print(f"wrote {name}")
    if "--check" in arguments and out_of_date:
        print(f"{', '.join(out_of_date)}: out of date; run python -m dev.bench.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
