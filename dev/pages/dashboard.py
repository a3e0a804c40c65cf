"""Generator of `docs/examples/grafana.json`, a Grafana dashboard of the metrics that a run
serves to Prometheus.

The dashboard is made from the metric catalogue, with the charts of the report.
`python -m dev.pages.reference` writes it, and its `--check` detects when it is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from r3async.data.metrics import METRICS, Metric
from r3async.record.prometheus import to_prometheus_name
from r3async.views.charts import CHARTS, Chart

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN_SELECTOR = 'role="driver",run=~"$run"'
"""PromQL selector of the chosen runs' drivers, which serve the metrics of the last step."""
GRAFANA_UNITS = {"s": "s", "fraction": "percentunit", "bytes": "bytes", "MB": "decmbytes"}
PANEL_WIDTH = 12
PANEL_HEIGHT = 8
STATS_PER_ROW = 8
"""Width and height of a chart on Grafana's grid of 24 columns, and the number of stat
panels in a row."""
ENGINE_PANELS = (
    ("Engine requests", "running now", "r3async_engine_running", "short"),
    (
        "Engine tokens",
        "generated a second",
        "rate(r3async_engine_generated_tokens{of}[2m])",
        "short",
    ),
    (
        "Engine pauses",
        "seconds a second",
        "rate(r3async_engine_pause_seconds{of}[2m])",
        "percentunit",
    ),
)
PROCESS_PANELS = (
    ("Memory", "of each process", "process_resident_memory_bytes", "bytes"),
    ("Processor", "cores", "rate(process_cpu_seconds_total{of}[2m])", "short"),
)


def render_dashboard() -> str:
    """Return the text of the dashboard file."""
    panels: list[dict[str, Any]] = []
    shown = [metric for metric in METRICS.values() if metric.gauge]
    panels += _iter_stat_panels(shown)
    at = 4 * -(-len(shown) // STATS_PER_ROW)
    for title, charts in (
        ("Training", [_make_chart_panel(chart) for chart in CHARTS if chart.lines]),
        ("Engines", [_make_role_panel(*each) for each in ENGINE_PANELS]),
        ("Processes", [_make_role_panel(*each) for each in PROCESS_PANELS]),
    ):
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": _make_grid_position(0, at, 2 * PANEL_WIDTH, 1),
            }
        )
        for number, panel in enumerate(charts):
            row, column = divmod(number, 2)
            panels.append(
                panel
                | {
                    "gridPos": _make_grid_position(
                        column * PANEL_WIDTH, at + 1 + row * PANEL_HEIGHT, PANEL_WIDTH, PANEL_HEIGHT
                    )
                }
            )
        at += 1 + -(-len(charts) // 2) * PANEL_HEIGHT
    dashboard = {
        "title": "r3async",
        "uid": "r3async",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_iter_variables())},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _iter_variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "data source",
    }
    query = f"label_values({to_prometheus_name('step')}, run)"
    yield {
        "name": "run",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "run"},
        "refresh": 2,
        "multi": True,
        "includeAll": False,
        "sort": 2,
    }


def _make_grid_position(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _make_target(number: int, expression: str, legend: str) -> dict[str, Any]:
    return {
        "refId": f"A{number}",
        "datasource": DATASOURCE,
        "expr": expression,
        "legendFormat": legend,
    }


def _iter_stat_panels(shown: Sequence[Metric]) -> Iterator[dict[str, Any]]:
    """Yield a stat panel for each metric that has a gauge."""
    width = 2 * PANEL_WIDTH // STATS_PER_ROW
    for number, metric in enumerate(shown):
        row, column = divmod(number, STATS_PER_ROW)
        yield {
            "type": "stat",
            "title": metric.label,
            "description": metric.description,
            "datasource": DATASOURCE,
            "gridPos": _make_grid_position(column * width, 4 * row, width, 4),
            "targets": [
                _make_target(0, f"{to_prometheus_name(metric.name)}{{{RUN_SELECTOR}}}", "{{run}}")
            ],
            "fieldConfig": {
                "defaults": {"unit": GRAFANA_UNITS.get(metric.unit, "short"), "decimals": 3},
                "overrides": [],
            },
            "options": {
                "reduceOptions": {"calcs": ["lastNotNull"]},
                "colorMode": "none",
                "graphMode": "area",
            },
        }


def _make_chart_panel(chart: Chart) -> dict[str, Any]:
    targets = [
        _make_target(
            number,
            f"{to_prometheus_name(line.metric)}{{{RUN_SELECTOR}}}",
            f"{{{{run}}}} {line.label}",
        )
        for number, line in enumerate(chart.lines)
    ]
    unit = METRICS[chart.lines[0].metric].unit
    if chart.shows_bound:
        bound = f"{to_prometheus_name('staleness/bound')}{{{RUN_SELECTOR}}}"
        targets.append(_make_target(len(targets), bound, "{{run}} allowed"))
    return _make_panel(
        chart.title,
        chart.caption,
        targets,
        GRAFANA_UNITS.get(unit, "short"),
        log=chart.has_log_scale,
    )


def _make_role_panel(title: str, caption: str, expression: str, unit: str) -> dict[str, Any]:
    of = '{run=~"$run"}'
    query = expression.replace("{of}", of) if "{of}" in expression else expression + of
    return _make_panel(title, caption, [_make_target(0, query, "{{run}} {{role}}")], unit)


def _make_panel(
    title: str, caption: str, targets: Sequence[dict[str, Any]], unit: str, *, log: bool = False
) -> dict[str, Any]:
    scale = {"type": "log", "log": 10} if log else {"type": "linear"}
    custom = {"lineWidth": 2, "fillOpacity": 0, "showPoints": "never", "scaleDistribution": scale}
    return {
        "type": "timeseries",
        "title": title,
        "description": caption,
        "datasource": DATASOURCE,
        "targets": list(targets),
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
    }
