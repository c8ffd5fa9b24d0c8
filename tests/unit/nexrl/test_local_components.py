"""The processes of a run on one machine: how many there are, and their variables."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from nexrl.local.child import Command
from nexrl.local.components import Addresses, commands
from nexrl.local.run_folder import RunFolder
from nexrl.settings import load_settings
from nexrl.spec import Experiment

ADDRESSES = Addresses(
    "redis://127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:6", ("127.0.0.1:3", "127.0.0.1:4"), "127.0.0.1:5"
)


def started(folder: Path, **sections: object) -> dict[str, Command]:
    spec = {"model": {"path": "x"}, "data": {"type": "mock"}, "trainer": {"steps": 1}, **sections}
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "test"}, "spec": spec}
    experiment = Experiment.model_validate_json(json.dumps(document))
    run_folder = RunFolder(folder, experiment)
    with closing(run_folder._lock):
        return {made.name: made for made in commands(experiment, run_folder, ADDRESSES, None)}


@pytest.mark.guide("A4", "Q9")
def test_each_role_has_as_many_processes_as_replicas_and_each_its_threads(tmp_path: Path) -> None:
    made = started(tmp_path, inference={"replicas": 2, "threads": 3}, rollout={"replicas": 3}, trainer={"steps": 1})
    assert list(made) == [
        *("controller", "data-reader", "trajectory-pool-0", "trajectory-pool-1", "weight-sync", "trainer"),
        *("inference-0", "inference-1", "rollout-0", "rollout-1", "rollout-2"),
    ]
    assert made["inference-1"].environment["OMP_NUM_THREADS"] == "3"
    assert made["rollout-1"].environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.guide("C3", "G2", "J6", "L5")
@pytest.mark.parametrize("name", ["trainer", "rollout-0", "weight-sync"])
def test_each_process_knows_its_name_and_where_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in started(tmp_path)[name].environment.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert settings.instance == name
    assert settings.trajectory_pool == "ipv4:127.0.0.1:3,127.0.0.1:4"
    assert (settings.weight_sync, settings.controller) == (ADDRESSES.weight_sync, ADDRESSES.controller)
