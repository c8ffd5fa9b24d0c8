"""Metrics reach every backend that the experiment lists."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from nexrl.errors import InvalidArgumentError
from nexrl.metrics_file import MetricsFile
from nexrl_controller.logging_backends import PrometheusBackend, open_backends
from tests.support.controller import experiment


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.guide("M2", "M15", "Q43")
def test_each_post_is_a_line_at_once(tmp_path: Path) -> None:
    backend = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    backend.post(1, 12.3456, {"loss": 0.5})
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "time": 12.346, "loss": 0.5}]
    backend.close()


def test_a_restarted_controller_appends_after_dropping_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1}\n{"step": 2, "ti')
    backend = MetricsFile(path)
    backend.post(2, 2, {})
    backend.close()
    assert lines(path) == [{"step": 1, "time": 1}, {"step": 2, "time": 2}]


def test_a_value_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    backend = MetricsFile(tmp_path / "metrics.jsonl")
    backend.post(1, 1, {"loss": float("nan"), "lr": float("inf")})
    backend.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "time": 1, "loss": None, "lr": None}]


def test_prometheus_gets_known_names_only() -> None:
    PrometheusBackend().post(1, 1, {"reward_mean": 0.25, "a_users_own": 1.0})
    assert REGISTRY.get_sample_value("nexrl_metric", {"name": "reward_mean"}) == 0.25
    assert REGISTRY.get_sample_value("nexrl_metric", {"name": "a_users_own"}) is None


def test_a_backend_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InvalidArgumentError, match=r"logger\.backends: wandb is not installed"):
        open_backends(experiment(logger={"backends": ["wandb"]}), tmp_path)


@pytest.mark.guide("M2", "Q2", "Q3")
def test_wandb_gets_project_name_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[object] = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None, finish=lambda: logged.append("end"))

    def init(**settings: object) -> SimpleNamespace:
        logged.append(settings)
        return run

    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(init=init))
    backends = open_backends(experiment("sort", project="toys", logger={"backends": ["wandb"]}), tmp_path)
    for backend in backends:
        backend.post(3, 1, {"loss": 0.5})
        backend.close()
    settings = {"project": "toys", "name": "sort", "id": "sort", "resume": "allow", "dir": str(tmp_path)}
    assert logged == [settings, {"loss": 0.5, "step": 3}, "end"]
