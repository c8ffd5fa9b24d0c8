"""Weight sync from end to end: real gRPC, real Redis, real Gloo between real processes, and real SIGKILL."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.errors import InvalidArgumentError, NotFoundError
from nexrl.rpc.client import call, new_request_id
from nexrl.store import Redis, key_prefix
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.weights import publisher as publisher_module
from nexrl.weights.manifest_proto import manifest_to_wire
from nexrl.weights.packing import snapshot
from nexrl.weights.published import PublishedVersions
from nexrl_weight_sync import weight_sync
from nexrl_weight_sync.weight_sync import View
from tests.support.patience import LIMIT_SECONDS, eventually, finished
from tests.support.weights import (
    BUCKET_BYTES,
    MODEL_TAG,
    SHORT_LEASE_SECONDS,
    World,
    example_tensors,
    rules,
    running_weight_sync,
    taken,
)

EXPIRED = "expired: "
"""Weight sync logs it when a lease or a sync has reached its end. What is noticed at once needs no such end."""


def ready_ids(view: View) -> set[str]:
    return {replica.replica_id for replica, ready in view.replicas if ready}


def is_serving(policy_version: int, *replica_ids: str) -> Callable[[View], bool]:
    return lambda view: view.committed_version == policy_version and ready_ids(view) >= set(replica_ids)


def prepare(policy_version: int, *, wait_seconds: float) -> pb.PrepareSyncRequest:
    packed = snapshot(example_tensors(policy_version), policy_version=policy_version, bucket_bytes=BUCKET_BYTES)
    return pb.PrepareSyncRequest(
        request_id=new_request_id(),
        model_tag=MODEL_TAG,
        manifest=manifest_to_wire(packed.manifest),
        host="127.0.0.1",
        port=1,
        wait_seconds=wait_seconds,
    )


async def gate(world: World, wait_seconds: float = 0) -> pb.CheckRolloutStatusResponse:
    request = pb.CheckRolloutStatusRequest(model_tag=MODEL_TAG, wait_seconds=wait_seconds)
    return await call(world.stub().CheckRolloutStatus, request, timeout_seconds=wait_seconds + LIMIT_SECONDS)


async def watched(world: World) -> pb.WatchReplicasResponse:
    """Return the first message of WatchReplicas."""
    states = world.stub().WatchReplicas(pb.WatchReplicasRequest(model_tag=MODEL_TAG), timeout=LIMIT_SECONDS)
    first: pb.WatchReplicasResponse = await anext(aiter(states))
    states.cancel()
    return first


@pytest.mark.guide("L6", "L8", "L9", "L10")
async def test_versions_reach_all_replicas_through_one_open_group(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("a"), world.replica("b"))
        assert (await gate(world)).status == pb.ROLLOUT_STATUS_BLOCK
        assert (await watched(world)).gate == "no policy version has been committed yet"
        publisher = await world.publisher()
        epochs = set()
        for version in range(3):
            publication = await publisher.publish(taken(example_tensors(version), version))
            assert (publication.committed_version, publication.attempts) == (version, 1)
            assert ready_ids(world.weight_sync.view()) == {"a", "b"}
            epochs.add(world.weight_sync.coordinator.state.epoch)
        assert epochs == {1}
        assert (await gate(world)).status == pb.ROLLOUT_STATUS_CONTINUE
        assert (await watched(world)).gate == ""
        request = pb.GetWeightSyncStateRequest(model_tag=MODEL_TAG)
        state = await call(world.stub().GetWeightSyncState, request, timeout_seconds=LIMIT_SECONDS)
        assert (state.committed_version, state.waiting_for_validation) == (2, False)
        assert sorted(set(world.told)) == [0, 1, 2]


async def test_the_pool_is_told_again_what_it_may_have_forgotten(
    redis: Redis, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "REPEAT_SECONDS", 0.05)
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await world.replica("a")
        await (await world.publisher()).publish(taken(example_tensors(0), 0))
        await eventually(lambda: world.told.count(0) >= 3)


async def test_a_replica_killed_in_mid_transfer_is_put_out_and_the_others_get_the_version(
    redis: Redis, experiment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("sound"), world.replica("dying", "die"))
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        publication = await finished(publisher.publish(taken(example_tensors(1), 1)), "version 1 is published")
        assert publication.committed_version == 1
        assert publication.attempts >= 2
        assert ready_ids(world.weight_sync.view()) == {"sound"}
        assert EXPIRED not in caplog.text  # nobody waits for the dead


async def test_a_replica_that_leaves_in_the_middle_of_its_load_holds_nobody_up(
    redis: Redis, experiment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("sound"), world.replica("leaving", "leave"))
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        publication = await finished(publisher.publish(taken(example_tensors(1), 1)), "version 1 is published")
        assert (publication.committed_version, publication.attempts) == (1, 1)
        assert ready_ids(world.weight_sync.view()) == {"sound"}
        assert "during the call" in caplog.text
        assert EXPIRED not in caplog.text


async def test_a_replica_dead_before_the_transfer_does_not_hold_it_up(
    redis: Redis, experiment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        _, dead = await asyncio.gather(world.replica("sound"), world.replica("dead"))
        dead.kill()
        publisher = await world.publisher()
        publication = await finished(publisher.publish(taken(example_tensors(0), 0)), "version 0 is published")
        assert publication.committed_version == 0
        assert ready_ids(world.weight_sync.view()) == {"sound"}
        assert EXPIRED not in caplog.text


async def test_a_silent_replica_is_put_out_with_its_lease(
    redis: Redis, experiment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules(lease_seconds=SHORT_LEASE_SECONDS)) as world:
        _, frozen = await asyncio.gather(world.replica("sound"), world.replica("frozen"))
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        frozen.freeze()
        publication = await finished(publisher.publish(taken(example_tensors(1), 1)), "version 1 is published")
        assert publication.committed_version == 1
        await world.until(lambda view: ready_ids(view) == {"sound"})
        assert "expired: replica frozen is silent" in caplog.text
        assert "took too long" not in caplog.text  # it was not the timeout of the sync


async def test_a_replica_with_other_bytes_is_put_out_and_served_again(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("sound"), world.replica("flipping", "flip"))
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        assert ready_ids(world.weight_sync.view()) == {"sound", "flipping"}
        await publisher.publish(taken(example_tensors(1), 1))
        assert ready_ids(world.weight_sync.view()) == {"sound"}
        await publisher.publish(taken(example_tensors(2), 2))
        await world.until(is_serving(2, "sound", "flipping"))


async def test_a_late_replica_gets_the_committed_version_without_a_new_one(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules(lease_seconds=SHORT_LEASE_SECONDS)) as world:
        first = await world.replica("first")
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        first.kill()
        await world.until(lambda view: not view.replicas)
        assert "no replica" in (await gate(world)).reason
        await world.replica("second")
        await world.until(is_serving(0, "second"))
        assert (await gate(world)).status == pb.ROLLOUT_STATUS_CONTINUE


async def synced(world: World) -> tuple[str, int]:
    """Return what identifies a sync."""
    state = await call(
        world.stub().GetWeightSyncState,
        pb.GetWeightSyncStateRequest(model_tag=MODEL_TAG),
        timeout_seconds=LIMIT_SECONDS,
    )
    outcome = world.weight_sync.coordinator.last_outcome
    assert outcome is not None
    return outcome.sync_id, state.epoch


@pytest.mark.guide("L19")
async def test_a_late_replica_takes_the_version_from_the_shared_folder_and_disturbs_nobody(
    redis: Redis, experiment_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publisher_module, "CATCH_UP_SECONDS", 1000.0)  # it is not broadcast again
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        world.shared = tmp_path
        await world.replica("first")
        publisher = await world.publisher()
        for version in range(2):
            await publisher.publish(taken(example_tensors(version), version))
        before = await synced(world)
        await asyncio.gather(world.replica("second"), world.replica("third"))
        await world.until(is_serving(1, "first", "second", "third"))
        assert await synced(world) == before
        assert (await publisher.publish(taken(example_tensors(2), 2))).committed_version == 2
        await world.until(is_serving(2, "first", "second", "third"))


async def test_replicas_are_served_from_the_shared_folder_without_a_trainer(
    redis: Redis, experiment_name: str, tmp_path: Path
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        world.shared = tmp_path
        first = await world.replica("first")
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        await eventually((tmp_path / MODEL_TAG / "version_0").is_dir)
        await world.trainer_dies(publisher)
        first.kill()
        await world.replica("second")
        await world.until(is_serving(0, "second"))


async def test_a_torn_version_in_the_shared_folder_is_broadcast_instead(
    redis: Redis, experiment_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publisher_module, "CATCH_UP_SECONDS", 0.2)
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        world.shared = tmp_path
        await world.replica("first")
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        before = await synced(world)
        tensors = tmp_path / MODEL_TAG / "version_0" / "model.safetensors"
        await eventually(tensors.is_file)
        os.truncate(tensors, 1000)
        monkeypatch.setattr(PublishedVersions, "write", lambda self, weights: None)  # nor is it mended
        await world.replica("second")
        await world.until(is_serving(0, "first", "second"))
        assert await synced(world) != before


async def test_a_replica_of_another_model_is_put_out(
    redis: Redis, experiment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("sound"), world.replica("misfit", "misfit"))
        publisher = await world.publisher()
        await finished(publisher.publish(taken(example_tensors(0), 0)), "version 0 is published")
        assert ready_ids(world.weight_sync.view()) == {"sound"}
        assert EXPIRED not in caplog.text


async def test_an_older_version_is_left_alone(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await world.replica("a")
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(3), 3))
        replay = await world.publisher()
        assert (await replay.publish(taken(example_tensors(2), 2))).committed_version == 3
        assert (await replay.publish(taken(example_tensors(4), 4))).committed_version == 4


async def test_a_trainer_whose_ledger_has_lost_steps_serves_replicas_again(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        former = await world.replica("former")
        trainer = await world.publisher()
        await trainer.publish(taken(example_tensors(5), 5))
        await world.trainer_dies(trainer)
        former.kill()  # with the last copy of version 5
        await world.replica("a")
        resumed = await world.publisher()
        resumed.newest_version = 5  # it has all steps, and will come to version 5
        assert (await resumed.publish(taken(example_tensors(2), 2))).committed_version == 5
        resumed.newest_version = 4
        assert (await resumed.publish(taken(example_tensors(3), 3))).committed_version == 3
        await world.until(is_serving(3, "a"))
        assert (await resumed.publish(taken(example_tensors(4), 4))).committed_version == 4


@pytest.mark.guide("L8", "L11", "L12")
async def test_a_validation_holds_the_version(redis: Redis, experiment_name: str) -> None:
    its_rules = rules(is_due=lambda policy_version: policy_version == 0)
    async with running_weight_sync(redis, experiment_name, its_rules) as world:
        await world.replica("a")
        publisher = await world.publisher()
        await publisher.publish(taken(example_tensors(0), 0))
        stub = world.stub()
        request = pb.WaitForValidationRequest(model_tag=MODEL_TAG, wait_seconds=LIMIT_SECONDS)
        held = await call(stub.WaitForValidation, request, timeout_seconds=LIMIT_SECONDS)
        assert (held.waiting, held.policy_version) == (True, 0)
        prepared = await call(stub.PrepareSync, prepare(1, wait_seconds=0.1), timeout_seconds=LIMIT_SECONDS)
        assert (prepared.sync_id, prepared.waiting_on) == ("", "validation")
        assert (await gate(world)).status == pb.ROLLOUT_STATUS_CONTINUE  # validation rollouts pass it
        next_version = asyncio.create_task(publisher.publish(taken(example_tensors(1), 1)))
        end = pb.EndValidationHoldRequest(request_id=new_request_id(), model_tag=MODEL_TAG, policy_version=0)
        await call(stub.EndValidationHold, end, timeout_seconds=LIMIT_SECONDS)
        assert (await next_version).committed_version == 1


async def test_a_restarted_service_goes_on_from_the_committed_version(redis: Redis, experiment_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with running_weight_sync(redis, experiment_name, rules(), port) as first:
        await first.replica("a")
        publisher = await first.publisher()
        await publisher.publish(taken(example_tensors(5), 5))
        epoch = first.weight_sync.coordinator.state.epoch
        clients = first.closing.pop_all()  # the replica and the trainer outlive this service
    async with running_weight_sync(redis, experiment_name, rules(), port) as second, clients:
        assert second.weight_sync.coordinator.committed.policy_version == 5
        await second.until(is_serving(5, "a"))
        assert (await publisher.publish(taken(example_tensors(6), 6))).committed_version == 6
        assert second.weight_sync.coordinator.state.epoch > epoch


async def test_calls_that_name_no_sync_or_tag_are_refused(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        stub = world.stub()
        commit = pb.CommitSyncRequest(request_id="r", model_tag=MODEL_TAG, sync_id="x")
        with pytest.raises(NotFoundError, match="not running"):
            await call(stub.CommitSync, commit, timeout_seconds=LIMIT_SECONDS)
        with pytest.raises(NotFoundError, match="model_tag"):
            await call(
                stub.GetWeightSyncState, pb.GetWeightSyncStateRequest(model_tag="other"), timeout_seconds=LIMIT_SECONDS
            )
        nameless = pb.RegisterReplicaRequest(request_id="r", model_tag=MODEL_TAG)
        with pytest.raises(InvalidArgumentError, match="replica_id"):
            await call(stub.RegisterReplica, nameless, timeout_seconds=LIMIT_SECONDS)
        request = pb.PrepareSyncRequest(request_id="r", model_tag=MODEL_TAG)
        with pytest.raises(InvalidArgumentError, match="manifest"):
            await call(stub.PrepareSync, request, timeout_seconds=LIMIT_SECONDS)


async def test_a_version_that_redis_has_lost_is_committed_again(redis: Redis, experiment_name: str) -> None:
    key = f"{key_prefix(experiment_name, MODEL_TAG)}weight_sync"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with running_weight_sync(redis, experiment_name, rules(), port) as first:
        await first.replica("a")
        publisher = await first.publisher()
        await publisher.publish(taken(example_tensors(5), 5))
        kept = await redis.dump(key)
        await first.replica("b")
        await first.until(is_serving(5, "a", "b"))  # in a new epoch
        await publisher.publish(taken(example_tensors(6), 6))
        clients = first.closing.pop_all()
    await redis.restore(key, 0, kept or b"", replace=True)
    async with running_weight_sync(redis, experiment_name, rules(), port) as second, clients:
        assert second.weight_sync.coordinator.committed.policy_version == 5
        await second.until(is_serving(6, "a", "b"))
