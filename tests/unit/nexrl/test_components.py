"""The table of components: variables, threads, access to Redis, order of stopping."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import pytest

from nexrl.components import BY_NAME, COMPONENTS, Wiring, component_of, stop_waves
from nexrl.spec import Experiment
from nexrl.spec.monitor import FailureRule

WIRING = Wiring(
    Path("/x/experiment.yaml"),
    Path("/x"),
    "controller:1",
    "reader:5",
    "pool:2",
    "sync:3",
    "t:6,t:7",
    "redis://r:4",
    True,
)


@pytest.fixture
def experiment() -> Experiment:
    spec = {"model": {"path": "x"}, "data": {"type": "mock"}, "trainer": {"steps": 1, "threads": 3}}
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "test"}, "spec": spec}
    return Experiment.model_validate(document)


@pytest.mark.guide("B11")
def test_each_role_is_a_service_that_can_be_started() -> None:
    roles = {point.name: point.load() for point in entry_points(group="nexrl.services")}
    services = Path(__file__).parents[3] / "services"
    assert {f"nexrl_{name.replace('-', '_')}" for name in roles} == {
        package.name for package in services.glob("*/nexrl_*")
    }
    assert all(callable(main) for main in roles.values())


def test_a_process_names_its_component() -> None:
    named = {
        **{"trainer": "trainer", "rollout-12": "rollout", "x-trajectory-pool-5d9c7-x2k4f": "trajectory-pool"},
        **{"my-trainer-trajectory-pool-5d9c7-x2k4f": "trajectory-pool", "redis": "", "trainers": ""},
        **{"data-reader": "data-reader", "x-trajectory-pool-5d9c7-x2k4f-data-reader": "data-reader"},
    }
    assert {instance: component_of(instance) for instance in named} == named


def test_a_failure_rule_may_name_every_component_and_nothing_else() -> None:
    names = get_args(get_args(FailureRule.model_fields["components"].annotation)[0])
    assert set(names) == set(BY_NAME)


def test_a_component_stops_before_those_it_needs_to_end_well() -> None:
    assert stop_waves() == [
        ["trainer", "rollout"],
        ["weight-sync", "inference"],
        ["data-reader", "trajectory-pool"],
        ["controller"],
    ]


def test_only_the_control_services_are_told_of_redis(experiment: Experiment) -> None:
    told = {c.name for c in COMPONENTS if "NEXRL_REDIS_URL" in WIRING.environment(c, experiment.spec)}
    assert told == {"controller", "trajectory-pool", "weight-sync"}


def test_only_the_pool_is_told_of_the_data_reader(experiment: Experiment) -> None:
    told = {c.name for c in COMPONENTS if "NEXRL_DATA_READER" in WIRING.environment(c, experiment.spec)}
    assert told == {"trajectory-pool"}


def test_each_component_has_the_threads_of_its_section_or_one(experiment: Experiment) -> None:
    threads = {c.name: WIRING.environment(c, experiment.spec)["OMP_NUM_THREADS"] for c in COMPONENTS}
    assert threads["trainer"] == "3"
    assert {threads[name] for name in BY_NAME if name != "trainer"} == {"1"}


def test_the_controller_is_told_of_no_controller(experiment: Experiment) -> None:
    assert WIRING.environment(BY_NAME["controller"], experiment.spec)["NEXRL_CONTROLLER"] == ""
    assert WIRING.environment(BY_NAME["trainer"], experiment.spec)["NEXRL_CONTROLLER"] == "controller:1"
