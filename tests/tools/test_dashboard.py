"""The Grafana dashboard: made from the catalogue, and asks for nothing that no process serves."""

import json
import re
import urllib.request

import pytest

from dev.pages.reference import DASHBOARD_FILE
from r3async.config.observe import ObserveConfig
from r3async.data.metrics import METRICS
from r3async.record.prometheus import MetricsEndpoint, to_prometheus_name
from r3async.rollout.scripted import ScriptedEngine
from r3async.views.charts import CHARTS


@pytest.fixture(scope="module")
def panels() -> list[dict]:
    return json.loads(DASHBOARD_FILE.read_text())["panels"]


def test_every_query_is_for_something_that_a_process_serves(panels, tmp_path) -> None:
    endpoint = MetricsEndpoint("driver", tmp_path, ObserveConfig(prometheus_port=0))
    try:
        endpoint.set_metrics(dict.fromkeys(METRICS, 1.0))
        endpoint.read_metrics = lambda: {
            f"engine/{name}": value for name, value in ScriptedEngine([]).collect_stats().items()
        }
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=240) as answer:
            served = {re.split(r"[{ ]", line)[0] for line in answer.read().decode().splitlines()}
    finally:
        endpoint.close()
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"((?:r3async|process)_\w+)\{", query)}
    assert len(queries) >= len(asked) > 40
    assert asked <= served
    assert all('run=~"$run"' in query for query in queries), "one run at a time"


def test_it_has_every_chart_of_the_report(panels) -> None:
    by_title = {panel["title"]: panel for panel in panels}
    for chart in CHARTS:
        asked = " ".join(target["expr"] for target in by_title[chart.title]["targets"])
        assert all(to_prometheus_name(line.metric) + "{" in asked for line in chart.lines)


def test_panels_do_not_lie_on_each_other(panels) -> None:
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        assert place["w"] >= 3, "a number has room to be read"
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
