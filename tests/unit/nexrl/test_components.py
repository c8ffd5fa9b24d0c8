"""The table of components: variables, threads, access to Redis, order of stopping."""

from pathlib import Path

import pytest

from nexrl.components import BY_NAME, COMPONENTS, Wiring, stop_waves
from nexrl.spec import Experiment

WIRING = Wiring(Path("/x/experiment.yaml"), Path("/x"), "controller:1", "pool:2", "sync:3", "redis://r:4", True)


@pytest.fixture
def experiment() -> Experiment:
    spec = {"model": {"path": "x"}, "data": {"type": "mock"}, "trainer": {"steps": 1, "threads": 3}}
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "test"}, "spec": spec}
    return Experiment.model_validate(document)


def test_a_component_stops_before_those_it_needs_to_end_well() -> None:
    assert stop_waves() == [
        ["trainer", "rollout"],
        ["weight-sync", "inference"],
        ["trajectory-pool"],
        ["controller"],
    ]


def test_only_the_control_services_are_told_of_redis(experiment: Experiment) -> None:
    told = {c.name for c in COMPONENTS if "NEXRL_REDIS_URL" in WIRING.environment(c, experiment.spec)}
    assert told == {"controller", "trajectory-pool", "weight-sync"}


def test_each_component_has_the_threads_of_its_section_or_one(experiment: Experiment) -> None:
    threads = {c.name: WIRING.environment(c, experiment.spec)["OMP_NUM_THREADS"] for c in COMPONENTS}
    assert threads["trainer"] == "3"
    assert {threads[name] for name in BY_NAME if name != "trainer"} == {"1"}


def test_the_controller_is_told_of_no_controller(experiment: Experiment) -> None:
    assert WIRING.environment(BY_NAME["controller"], experiment.spec)["NEXRL_CONTROLLER"] == ""
    assert WIRING.environment(BY_NAME["trainer"], experiment.spec)["NEXRL_CONTROLLER"] == "controller:1"
