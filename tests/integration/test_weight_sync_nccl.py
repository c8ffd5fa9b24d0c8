"""The transaction with transport NCCL between real processes. A stand-in takes the place of NCCL itself.

The stand-in is as blind as NCCL's kernels: no member notices that another one died. So these tests show that the
transaction does.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.store import Redis
from nexrl_weight_sync.weight_sync import View
from tests.support import standin_nccl
from tests.support.patience import finished
from tests.support.standin_nccl import standin_gpu
from tests.support.weights import SHORT_LEASE_SECONDS, example_tensors, rules, running_weight_sync, taken

TRAINER_GPU = standin_gpu("GPU-0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all communicators; one for each epoch with NCCL."""
    standin_nccl.install(tmp_path, monkeypatch)
    return tmp_path


def communicators(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ready_ids(view: View) -> set[str]:
    return {replica.replica_id for replica, ready in view.replicas if ready}


def is_serving(policy_version: int, *replica_ids: str) -> Callable[[View], bool]:
    return lambda view: view.committed_version == policy_version and ready_ids(view) >= set(replica_ids)


async def test_versions_travel_by_nccl_through_one_communicator_and_the_log_says_why(
    redis: Redis, experiment_name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("a", gpu="GPU-1"), world.replica("b", gpu="GPU-2"))
        publisher = await world.publisher(gpu=TRAINER_GPU)
        for version in range(3):
            publication = await publisher.publish(taken(example_tensors(version), version))
            assert (publication.committed_version, publication.attempts) == (version, 1)
            assert ready_ids(world.weight_sync.view()) == {"a", "b"}
        assert communicators(folder) == ["communicator-0"]
        assert caplog.text.count("weights travel by nccl: the trainer and each replica have a GPU of their own") == 1


async def test_a_replica_without_a_gpu_takes_all_to_gloo_and_its_end_takes_them_back(
    redis: Redis, experiment_name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await world.replica("a", gpu="GPU-1")
        without = await world.replica("b")
        publisher = await world.publisher(gpu=TRAINER_GPU)
        await publisher.publish(taken(example_tensors(0), 0))
        assert ready_ids(world.weight_sync.view()) == {"a", "b"}
        assert "weights travel by gloo: replica b receives into host memory" in caplog.text
        assert communicators(folder) == []
        without.kill()
        await publisher.publish(taken(example_tensors(1), 1))
        await world.until(is_serving(1, "a"))
        await publisher.publish(taken(example_tensors(2), 2))
        assert communicators(folder) != []


async def test_a_replica_killed_in_mid_transfer_is_put_out_although_nccl_does_not_notice(
    redis: Redis, experiment_name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("sound", gpu="GPU-1"), world.replica("dying", "die", gpu="GPU-2"))
        publisher = await world.publisher(gpu=TRAINER_GPU)
        await publisher.publish(taken(example_tensors(0), 0))
        publication = await finished(publisher.publish(taken(example_tensors(1), 1)), "version 1 is published")
        assert "expired: " not in caplog.text  # nobody waits for the dead
        assert publication.committed_version == 1
        assert publication.attempts >= 2
        assert ready_ids(world.weight_sync.view()) == {"sound"}
        # The trainer and the other replica left the communicator in which the dead one would have hung.
        aborted = {path.name for path in (folder / "communicator-0").glob("aborted.*")}
        assert len(aborted) == 2
        assert "aborted.0" in aborted


async def test_a_replica_that_hangs_in_the_collective_is_put_out_with_its_lease(
    redis: Redis, experiment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_weight_sync(redis, experiment_name, rules(lease_seconds=SHORT_LEASE_SECONDS)) as world:
        _, frozen = await asyncio.gather(world.replica("sound", gpu="GPU-1"), world.replica("frozen", gpu="GPU-2"))
        publisher = await world.publisher(gpu=TRAINER_GPU)
        await publisher.publish(taken(example_tensors(0), 0))
        frozen.freeze()
        publication = await finished(publisher.publish(taken(example_tensors(1), 1)), "version 1 is published")
        assert publication.committed_version == 1
        await world.until(lambda view: ready_ids(view) == {"sound"})
        assert "expired: replica frozen is silent" in caplog.text
        assert "took too long" not in caplog.text  # it was not the timeout of the sync


async def test_a_replica_whose_gpu_has_other_bytes_is_put_out(redis: Redis, experiment_name: str) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await asyncio.gather(world.replica("sound", gpu="GPU-1"), world.replica("flipping", "flip", gpu="GPU-2"))
        publisher = await world.publisher(gpu=TRAINER_GPU)
        await publisher.publish(taken(example_tensors(0), 0))
        await publisher.publish(taken(example_tensors(1), 1))
        assert ready_ids(world.weight_sync.view()) == {"sound"}


async def test_a_late_replica_gets_the_committed_version_by_nccl(
    redis: Redis, experiment_name: str, folder: Path
) -> None:
    async with running_weight_sync(redis, experiment_name, rules(lease_seconds=SHORT_LEASE_SECONDS)) as world:
        first = await world.replica("first", gpu="GPU-1")
        publisher = await world.publisher(gpu=TRAINER_GPU)
        await publisher.publish(taken(example_tensors(0), 0))
        first.kill()
        await world.until(lambda view: not view.replicas)
        await world.replica("second", gpu="GPU-1")
        await world.until(is_serving(0, "second"))
        assert communicators(folder)[:2] == ["communicator-0", "communicator-1"]


async def test_a_trainer_that_restarts_sends_in_a_communicator_of_its_own(
    redis: Redis, experiment_name: str, folder: Path
) -> None:
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        await world.replica("a", gpu="GPU-1")
        first = await world.publisher(gpu=TRAINER_GPU)
        await first.publish(taken(example_tensors(0), 0))
        await world.trainer_dies(first)
        second = await world.publisher(gpu=TRAINER_GPU)
        assert (await second.publish(taken(example_tensors(1), 1))).committed_version == 1
        assert communicators(folder) == ["communicator-0", "communicator-1"]
