"""Whether weights travel by NCCL or by Gloo."""

import re

import pytest

from nexrl.weights.rendezvous import Transport
from nexrl_weight_sync.coordinator import Coordinator
from nexrl_weight_sync.records import Replica, State, Weights
from nexrl_weight_sync.route import Route, choose_route
from tests.support.weights import rules


def test_auto_is_nccl_if_the_trainer_and_each_replica_have_a_gpu_of_their_own() -> None:
    assert choose_route("auto", "GPU-0", {"a": "GPU-1", "b": "GPU-2"}).transport is Transport.NCCL


@pytest.mark.parametrize(
    ("trainer_gpu", "replica_gpus", "reason"),
    [
        ("", {"a": "GPU-1"}, "the trainer sends from host memory"),
        ("GPU-0", {"a": "GPU-1", "b": ""}, "replica b receives into host memory"),
        (
            "GPU-0",
            {"a": "GPU-1", "b": "GPU-0"},
            "replica b shares GPU-0 with the trainer, .*NCCL_MULTI_RANK_GPU",
        ),
        ("GPU-0", {"a": "GPU-1", "b": "GPU-1"}, "replica b shares GPU-1 with replica a"),
    ],
)
def test_auto_is_gloo_otherwise_and_says_why(trainer_gpu: str, replica_gpus: dict[str, str], reason: str) -> None:
    route = choose_route("auto", trainer_gpu, replica_gpus)
    assert route.transport is Transport.GLOO
    assert re.match(reason, route.reason)


def test_gloo_stays_gloo() -> None:
    assert choose_route("gloo", "GPU-0", {"a": "GPU-1"}) == Route(Transport.GLOO, "weightSync.transport is gloo")


def test_nccl_stays_nccl_on_a_shared_gpu_and_says_what_that_needs() -> None:
    route = choose_route("nccl", "GPU-0", {"a": "GPU-0"})
    assert route.transport is Transport.NCCL
    assert "although replica a shares GPU-0 with the trainer" in route.reason


def test_a_replica_that_restarts_with_another_gpu_begins_a_new_epoch_with_its_own_route() -> None:
    made = Coordinator(rules(), State(), 0.0)

    def route_of_a_sync(gpu: str, policy_version: int) -> tuple[int, Transport]:
        made.register(Replica("a", "a:1", "", Weights(), gpu=gpu), 0.0)
        weights = Weights(policy_version, "d")
        sync = made.begin(f"r{policy_version}", weights, made.state.epoch, 0.0, "GPU-0")
        made.start_verifying(sync.sync_id, 0.0)
        made.verify(sync.sync_id, {"a": "d"})
        made.commit(sync.sync_id, ["a"], 0.0)
        return sync.epoch, sync.route.transport

    assert route_of_a_sync("GPU-1", 0) == (1, Transport.NCCL)
    assert route_of_a_sync("", 1) == (2, Transport.GLOO)
