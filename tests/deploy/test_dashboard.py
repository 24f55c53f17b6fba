"""The Grafana dashboard asks only for what /metrics shows, with labels that are there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chart import TOGGLES, of_kind, render
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.messages import ShardStats, Stats
from paceline.deploy.metrics import Metrics

FILE = Path(__file__).resolve().parents[2] / "deploy" / "dashboards" / "paceline.json"
ROWS = ["Traffic", "Latency", "Drafting", "Shards", "Cache"]
WORDS = {"by", "le", "rate", "sum", "max", "increase", "histogram_quantile", "ignoring", "group_left"}


def panels() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text())["panels"]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """Labels by name of the sample, of a replica that has served a request with drafts."""
    stats = Stats(
        accepted_per_pos=[2, 1], steps_by_rows=[1], blocks_by_len=[0, 2], shards=[ShardStats(shard=0)]
    )
    metrics = Metrics("m", "0", lambda: stats)
    metrics.start().finish("stop")
    metrics.answered("POST", "/v1/completions", 200, 0.1)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def faults(expression: str, shown: dict[str, set[str]]) -> list[str]:
    """Names that no replica shows, and labels that none of the names has."""
    bare = re.sub(r"\[[^]]*\]|\{[^}]*\}|\"[^\"]*\"", "", expression)
    names = set(re.findall(r"[a-z_]+:[a-z0-9_]+|http_[a-z_]+", bare))
    labels = {"le"} | set().union(*(shown.get(name, set()) for name in names))
    grouped = {
        label.strip()
        for group in re.findall(r"(?:by|ignoring) ?\(([^)]*)\)", bare)
        for label in group.split(",")
    }
    matched = set(re.findall(r"(\w+)=~?\"", expression))
    unknown = [name for name in sorted(names) if name not in shown]
    return unknown + sorted((grouped | matched) - labels) + (["no name"] if not names else [])


def test_every_expression_names_what_there_is(shown: dict[str, set[str]]) -> None:
    told = list(expressions())
    assert len(told) > 40
    assert [(title, faults(expr, shown)) for title, expr in told if faults(expr, shown)] == []


def test_every_alert_of_the_chart_names_what_there_is(shown: dict[str, set[str]]) -> None:
    (rules,) = of_kind(render(TOGGLES["monitoring"]), "PrometheusRule")
    (group,) = rules["spec"]["groups"]
    told = [(rule["alert"], rule["expr"].replace('namespace="llm"', "")) for rule in group["rules"]]

    assert len(told) == 4
    assert [(name, faults(expr, shown)) for name, expr in told if faults(expr, shown)] == []


def test_the_check_sees_a_planted_fault(shown: dict[str, set[str]]) -> None:
    assert faults("rate(paceline:no_such_total[5m])", shown) == ["paceline:no_such_total"]
    assert faults("sum by (nobody) (paceline:steps_total)", shown) == ["nobody"]
    assert faults('paceline:steps_total{shard="0"}', shown) == ["shard"]
    assert faults("paceline:steps_total", shown) == []


def test_parentheses_match_and_words_are_known() -> None:
    for title, expression in expressions():
        assert expression.count("(") == expression.count(")"), title
        bare = re.sub(
            r"\[[^]]*\]|\{[^}]*\}|\"[^\"]*\"|\([a-z_, ]+\)|[a-z_]+:[a-z0-9_]+|http_[a-z_]+", "", expression
        )
        assert set(re.findall(r"[a-z_]+", bare)) <= WORDS, title


def test_panels_lie_side_by_side() -> None:
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ROWS
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
