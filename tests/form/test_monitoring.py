"""Dashboards and alerts ask for metrics that the code has, in PromQL that parses, and each alert has a runbook."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from nexrl_controller.logging_backends import PROMETHEUS_NAMES
from tests.support.helm import CHART
from tests.support.marks import ROOT

BOARDS = sorted(CHART.glob("files/dashboards/*.json"))
ALERTS = [
    rule for group in yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
RUNBOOKS = ROOT / "docs/how-to/kubernetes-troubleshooting.md"
DEFINITION = re.compile(r'\b(Counter|Gauge|Histogram|Enum)\(\s*"([a-z_0-9]+)"')
NAME = re.compile(r"\b((?:nexrl|grpc_server)_[a-z_0-9]+)\b(?!\s*=)")


@cache
def metrics() -> frozenset[str]:
    """Every name under which the code shows a metric."""
    names = set()
    for folder in (ROOT / "src", ROOT / "services"):
        for path in folder.rglob("*.py"):
            for kind, name in DEFINITION.findall(path.read_text()):
                names |= {name} | (
                    {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "Histogram" else set()
                )
    return frozenset(names)


def expressions(board: Path) -> Iterator[str]:
    for panel in json.loads(board.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def asked_for(expression: str) -> set[str]:
    """The metrics in an expression: names outside of braces, strings and groupings."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\b(by|without|ignoring|on|group_left)\s*\([^)]*\)', "", expression)
    return set(NAME.findall(bare))


def test_code_has_metrics() -> None:
    assert "nexrl_ledger_imbalance" in metrics()
    assert "grpc_server_handling_seconds_bucket" in metrics()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: str(board.stem))
def test_dashboard_shows_what_the_code_measures(board: Path) -> None:
    for expression in expressions(board):
        promql_parser.parse(expression.replace("$namespace", "a").replace("$experiment", "b"))
        assert asked_for(expression)
        assert asked_for(expression) <= metrics()


def test_dashboards_have_ids_of_their_own() -> None:
    uids = [json.loads(board.read_text())["uid"] for board in BOARDS]
    assert len(set(uids)) == len(uids) >= 3


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_alert_is_about_a_metric_of_the_code_and_has_a_runbook(alert: dict[str, Any]) -> None:
    promql_parser.parse(alert["expr"])
    assert asked_for(alert["expr"])
    assert asked_for(alert["expr"]) <= metrics()
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} <= alert["annotations"].keys()
    file_name, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / file_name == RUNBOOKS
    assert anchor == alert["alert"].lower()
    assert f"### {alert['alert']}\n" in RUNBOOKS.read_text()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: str(board.stem))
def test_dashboard_names_training_metrics_that_are_shown(board: Path) -> None:
    for expression in expressions(board):
        for names in re.findall(r'nexrl_metric\{name=~?"([^"]+)"', expression):
            assert set(names.split("|")) <= PROMETHEUS_NAMES
