"""The processes of a run on one machine: how many there are, and their variables."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from nexrl.local.child import Command
from nexrl.local.components import Addresses, choose_addresses, commands
from nexrl.local.run_folder import RunFolder
from nexrl.settings import load_settings
from nexrl.spec import Experiment

ADDRESSES = Addresses(
    "redis://127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:6", ("127.0.0.1:3", "127.0.0.1:4"), "127.0.0.1:5"
)


DOCUMENT = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "test"}}
SPEC = {"model": {"path": "x"}, "data": {"type": "mock"}, "trainer": {"steps": 1}}


def started(folder: Path, **sections: object) -> dict[str, Command]:
    experiment = Experiment.model_validate_json(json.dumps({**DOCUMENT, "spec": {**SPEC, **sections}}))
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


def test_only_trainer_and_inference_are_assigned_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    made = started(tmp_path, inference={"replicas": 2})
    assigned = {name: each.environment.get("CUDA_VISIBLE_DEVICES") for name, each in made.items()}
    assert {name: gpu for name, gpu in assigned.items() if gpu} == {
        "trainer": "6",
        "inference-0": "7",
        "inference-1": "7",
    }
    assert {made[f"inference-{number}"].environment["NEXRL_GPU_SHARE"] for number in (0, 1)} == {"0.500"}


@pytest.mark.guide("Q20")
def test_replica_0_of_the_trainer_knows_where_the_others_listen(tmp_path: Path) -> None:
    trainer = {"steps": 1, "replicas": 3}
    experiment = Experiment.model_validate_json(json.dumps({**DOCUMENT, "spec": {**SPEC, "trainer": trainer}}))
    addresses, _ = choose_addresses(experiment, 0)
    run_folder = RunFolder(tmp_path, experiment)
    with closing(run_folder._lock):
        made = {made.name: made.environment for made in commands(experiment, run_folder, addresses, None)}
    others = [made[f"trainer-{replica}"]["NEXRL_LISTEN"] for replica in (1, 2)]
    assert made["trainer-0"]["NEXRL_TRAINER_REPLICAS"] == ",".join(others)
    assert [made[f"trainer-{replica}"]["NEXRL_REPLICA"] for replica in range(3)] == ["0", "1", "2"]
    assert len({*others, *addresses.trajectory_pools, addresses.controller}) == 2 + len(addresses.trajectory_pools) + 1


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
