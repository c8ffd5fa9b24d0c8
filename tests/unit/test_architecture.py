"""Which modules touch the wire and the store. The lists are short on purpose: a new entry is a decision."""

import grimp
import pytest

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
    "nexrl.rpc.client",
    "nexrl.rpc.interceptor",
    "nexrl.rpc.server",
    "nexrl.rpc.status",
    # Clients: each is given a channel.
    "nexrl.activity",
    "nexrl.client",
    "nexrl.local.launcher",
    "nexrl.policy",
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
    "nexrl.local.launcher",
    "nexrl_controller.state_store",
    "nexrl_trajectory_pool.wakeups",
    "nexrl_weight_sync.store",
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize(("package", "allowed"), [("grpc", GRPC), ("redis", REDIS)])
def test_only_named_modules_import_the_package(graph: grimp.ImportGraph, package: str, allowed: set[str]) -> None:
    importers = graph.find_modules_that_directly_import(package)
    assert {module for module in importers if not module.startswith("nexrl.v1.")} == allowed
