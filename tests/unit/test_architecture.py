"""What the components are, and which modules touch the wire and the store.

The lists are short on purpose: a new entry is a decision.
"""

import re
from importlib.metadata import entry_points
from itertools import permutations

import grimp
import pytest

from tests.support.guide import ROOT

PACKAGES = (
    "nexrl",
    "nexrl_controller",
    "nexrl_inference",
    "nexrl_rollout",
    "nexrl_trainer",
    "nexrl_trajectory_pool",
    "nexrl_weight_sync",
)

GRPC = {
    # Plumbing.
    "nexrl.rpc.channel",
    "nexrl.rpc.client",
    "nexrl.rpc.interceptor",
    "nexrl.rpc.server",
    "nexrl.rpc.status",
    # Clients: each is given a channel.
    "nexrl.activity",
    "nexrl.client",
    "nexrl.local.audit",
    "nexrl.local.launcher",
    "nexrl.local.ledger_view",
    "nexrl.local.replay",
    "nexrl.local.temporary",
    "nexrl.policy",
    "nexrl_controller.operator.followers",
    "nexrl_controller.operator.server",
    "nexrl_inference.replica",
    "nexrl_trainer.loop",
    "nexrl_trainer.processor",
    "nexrl_weight_sync.replicas",
    # Servicers.
    "nexrl_controller.service",
    "nexrl_inference.service",
    "nexrl_trainer.service",
    "nexrl_trajectory_pool.service",
    "nexrl_weight_sync.service",
}

REDIS = {
    "nexrl.store",
    "nexrl_controller.state_store",
    "nexrl_trajectory_pool.wakeups",
    "nexrl_weight_sync.store",
}

KUBERNETES = {"nexrl.k8s.api"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize(("package", "allowed"), [("grpc", GRPC), ("redis", REDIS), ("kubernetes", KUBERNETES)])
def test_only_named_modules_import_the_package(graph: grimp.ImportGraph, package: str, allowed: set[str]) -> None:
    importers = graph.find_modules_that_directly_import(package)
    assert {module for module in importers if not module.startswith("nexrl.v1.")} == allowed


@pytest.mark.guide("A2")
def test_services_meet_only_over_grpc(graph: grimp.ImportGraph) -> None:
    services = [package for package in PACKAGES if package != "nexrl"]
    imports = [
        (importer, imported)
        for importer, imported in permutations(services, 2)
        if graph.direct_import_exists(importer=importer, imported=imported, as_packages=True)
    ]
    assert imports == []


@pytest.mark.guide("A2", "A7")
def test_each_component_is_a_grpc_service_with_one_implementation() -> None:
    contracts = "\n".join(path.read_text() for path in (ROOT / "proto").rglob("*.proto"))
    servicers = "\n".join(path.read_text() for path in (ROOT / "services").rglob("nexrl_*/service.py"))
    promised = sorted(re.findall(r"^service (\w+) {", contracts, re.MULTILINE))
    assert promised == sorted(re.findall(r"^class \w+Servicer\((\w+)Servicer\):", servicers, re.MULTILINE))
    assert promised == [
        *("ActivityService", "ControllerService", "DataLoaderService", "InferenceService", "TrainBatchPoolService"),
        *("TrainerService", "TrajectoryPoolService", "ValidatorService", "WeightSyncService"),
    ]


@pytest.mark.guide("B11")
def test_each_role_is_a_service_that_can_be_started() -> None:
    roles = {point.name: point.load() for point in entry_points(group="nexrl.services")}
    of_experiments = roles.keys() - {"operator"}  # which is in the controller's package
    assert {f"nexrl_{name.replace('-', '_')}" for name in of_experiments} == set(PACKAGES) - {"nexrl"}
    assert all(callable(main) for main in roles.values())
