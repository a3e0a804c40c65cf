"""`docs/examples/grafana.json`: a Grafana dashboard of the metrics that a run's processes serve to Prometheus.

It is made from the metric catalogue, with the charts of the report; `python -m r3async.tools.config_reference` writes it, and
`--check` finds it out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from r3async.record.catalogue import METRICS, Metric
from r3async.record.prometheus import metric_name
from r3async.views.charts import CHARTS, Chart

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_RUN = 'role="driver",run=~"$run"'
"""The driver serves the metrics of the last step."""
UNITS = {"s": "s", "fraction": "percentunit", "bytes": "bytes", "MB": "decmbytes"}
WIDTH, HEIGHT, ABREAST = 12, 8, 8
"""Of a chart, in 24 columns; and how many numbers stand beside each other."""
ENGINES = (
    ("Engine requests", "running now", "r3async_engine_running", "short"),
    ("Engine tokens", "generated a second", "rate(r3async_engine_generated_tokens{of}[2m])", "short"),
    ("Engine pauses", "seconds a second", "rate(r3async_engine_pause_seconds{of}[2m])", "percentunit"),
)
PROCESSES = (
    ("Memory", "of each process", "process_resident_memory_bytes", "bytes"),
    ("Processor", "cores", "rate(process_cpu_seconds_total{of}[2m])", "short"),
)


def dashboard() -> str:
    """The file's text."""
    panels: list[dict[str, Any]] = []
    shown = [known for known in METRICS.values() if known.gauge]
    panels += _headlines(shown)
    at = 4 * -(-len(shown) // ABREAST)
    for title, charts in (
        ("Training", [_curves(chart) for chart in CHARTS if chart.lines]),
        ("Engines", [_by_role(*each) for each in ENGINES]),
        ("Processes", [_by_role(*each) for each in PROCESSES]),
    ):
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, at, 2 * WIDTH, 1)})
        for number, panel in enumerate(charts):
            row, column = divmod(number, 2)
            panels.append(panel | {"gridPos": _place(column * WIDTH, at + 1 + row * HEIGHT, WIDTH, HEIGHT)})
        at += 1 + -(-len(charts) // 2) * HEIGHT
    whole = {
        "title": "r3async",
        "uid": "r3async",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }
    return json.dumps(whole, indent=1) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "data source"}
    query = f"label_values({metric_name('step')}, run)"
    yield {
        "name": "run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "run"},
        "refresh": 2,
        "multi": True,
        "includeAll": False,
        "sort": 2,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _target(number: int, expression: str, legend: str) -> dict[str, Any]:
    return {"refId": f"A{number}", "datasource": SOURCE, "expr": expression, "legendFormat": legend}


def _headlines(shown: Sequence[Metric]) -> Iterator[dict[str, Any]]:
    """A number each, of what the live view has gauges for."""
    width = 2 * WIDTH // ABREAST
    for number, known in enumerate(shown):
        row, column = divmod(number, ABREAST)
        yield {
            "type": "stat",
            "title": known.label,
            "description": known.docs,
            "datasource": SOURCE,
            "gridPos": _place(column * width, 4 * row, width, 4),
            "targets": [_target(0, f"{metric_name(known.name)}{{{OF_RUN}}}", "{{run}}")],
            "fieldConfig": {"defaults": {"unit": UNITS.get(known.unit, "short"), "decimals": 3}, "overrides": []},
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"},
        }


def _curves(chart: Chart) -> dict[str, Any]:
    targets = [
        _target(number, f"{metric_name(line.metric)}{{{OF_RUN}}}", f"{{{{run}}}} {line.label}")
        for number, line in enumerate(chart.lines)
    ]
    unit = METRICS[chart.lines[0].metric].unit
    if chart.bound:
        bound = f"{metric_name('staleness/bound')}{{{OF_RUN}}}"
        targets.append(_target(len(targets), bound, "{{run}} allowed"))
    return _panel(chart.title, chart.caption, targets, UNITS.get(unit, "short"), log=chart.log)


def _by_role(title: str, caption: str, expression: str, unit: str) -> dict[str, Any]:
    of = '{run=~"$run"}'
    query = expression.replace("{of}", of) if "{of}" in expression else expression + of
    return _panel(title, caption, [_target(0, query, "{{run}} {{role}}")], unit)


def _panel(
    title: str, caption: str, targets: Sequence[dict[str, Any]], unit: str, *, log: bool = False
) -> dict[str, Any]:
    scale = {"type": "log", "log": 10} if log else {"type": "linear"}
    custom = {"lineWidth": 2, "fillOpacity": 0, "showPoints": "never", "scaleDistribution": scale}
    return {
        "type": "timeseries",
        "title": title,
        "description": caption,
        "datasource": SOURCE,
        "targets": list(targets),
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }
