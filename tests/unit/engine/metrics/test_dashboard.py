"""The Grafana dashboard of examples/: its queries read as PromQL and name only metrics and labels that exist."""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from engine.metrics.names import METRICS
from tests.unit.engine.metrics.test_alert_rules import selectors

DASHBOARD = Path(__file__).parents[4] / "examples" / "prometheus" / "grafana-dashboard.json"
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]


@pytest.mark.parametrize("title, target", TARGETS)
def test_a_panel_names_metrics_and_labels_that_exist(title: str, target: dict[str, str]) -> None:
    found = selectors(promql_parser.parse(target["expr"].replace("$job", ".*")))
    names = {selector.name for selector in found}
    assert names, title
    assert names == set(re.findall(r"tidemark_\w+", target["expr"]))
    for selector in found:
        assert selector.name in METRICS, selector.name
        assert {matcher.name for matcher in selector.matchers.matchers} <= set(METRICS[selector.name].labels)
    by = re.search(r"sum by \(([\w, ]+)\)", target["expr"])
    left = set(re.split(", ", by[1])) if by is not None else set.union(*(set(METRICS[name].labels) for name in names))
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= left


def test_the_jobs_to_choose_from_are_those_of_a_metric_that_exists() -> None:
    (metric, label) = re.findall(r"label_values\((\w+), (\w+)\)", DASHBOARD.read_text())[0]
    assert label in METRICS[metric].labels


def test_panels_have_titles_and_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) == len({panel["title"] for panel in PANELS})
    cells = [
        (x, y)
        for panel in PANELS
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
