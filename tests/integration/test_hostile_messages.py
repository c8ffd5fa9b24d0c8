"""Messages that no client of ours sends: each is refused with a status that names what is wrong."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default

from nexrl.client import TrainBatchClient
from nexrl.errors import InvalidArgumentError
from nexrl.rpc.client import call, connect
from nexrl.rpc.limits import MAX_PIECE_BYTES, request_limit_bytes
from nexrl.rpc.server import ServiceProcess
from nexrl.v1.train_batch_pool_service_pb2 import ResumeFromCheckpointRequest
from nexrl.v1.trainer_replica_service_pb2_grpc import add_TrainerReplicaServiceServicer_to_server
from nexrl.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from nexrl.v1.trajectory_pool_service_pb2 import SetPolicyVersionRequest
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights.publisher import WeightPublisher
from nexrl.weights.transport import Sender
from nexrl_controller import server as controller
from nexrl_data_reader import server as data_reader
from nexrl_inference import server as inference
from nexrl_rollout import server as rollout
from nexrl_trainer import hosted_ranks
from nexrl_trainer.build import build_learner
from nexrl_trainer.hosted_ranks import HostedRanks
from nexrl_trainer.loop import TrainWorker
from nexrl_trainer.rank_processes import RankProcess
from nexrl_trainer.server import run_checkpoints
from nexrl_trainer.service import ReplicaServicer, TrainerServicer
from nexrl_trajectory_pool import server as trajectory_pool
from nexrl_weight_sync import server as weight_sync
from tests.support.certificates import Authority, environment
from tests.support.patience import LIMIT_SECONDS
from tests.support.pool import TAG, Deploy
from tests.support.random_messages import Messages
from tests.support.services import running_service, small_experiment

CALLS = int(os.environ.get("NEXRL_FUZZ_CALLS", "200"))
SEED = int(os.environ.get("NEXRL_FUZZ_SEED", "0"))
IN_FLIGHT = 16
MAX_GROWTH_KIB = 200 * 1024
PUT_WITH_MALFORMED_RESULT = b"\x0a\x01r\x12" + bytes([len(TAG)]) + TAG.encode() + b"\x22\x02\x0a\xff"


async def start_trainer_whose_loop_has_ended(process: ServiceProcess) -> None:
    """Start a trainer that takes all calls: its loop, which refuses some of them, has ended."""
    spec = process.experiment.spec
    pool, weight_sync = (process.connect("127.0.0.1:1") for _ in range(2))
    publisher = WeightPublisher(
        WeightSyncServiceStub(weight_sync), Sender("127.0.0.1"), model_tag=TAG, bucket_bytes=2**20, timeout_seconds=1
    )
    process.on_close(publisher.close)
    checkpoints = run_checkpoints(process.settings.run_dir, spec)
    learner = await asyncio.to_thread(build_learner, spec)
    worker = TrainWorker(spec, learner, checkpoints, TrainBatchClient(pool), publisher, process.activity)
    worker.is_done = True
    process.add(add_TrainerServiceServicer_to_server, TrainerServicer(worker), "nexrl.v1.TrainerService")


async def start_other_replica(process: ServiceProcess) -> None:
    """Serve another replica of a trainer. Nobody watches for what ends it, which would end this process."""
    servicer = ReplicaServicer(HostedRanks(process))
    process.add(add_TrainerReplicaServiceServicer_to_server, servicer, "nexrl.v1.TrainerReplicaService")
    await process.set_ready()


async def no_ranks(*_: object) -> list[RankProcess]:
    return []


SERVICES: dict[str, tuple[Callable[[ServiceProcess], Awaitable[None]], list[str]]] = {
    "data reader": (data_reader.start, ["DataReader"]),
    "trajectory pool": (trajectory_pool.start, ["DataLoader", "TrainBatchPool", "TrajectoryPool", "Validator"]),
    "controller": (controller.start, ["Activity", "Controller"]),
    "weight sync": (weight_sync.start, ["WeightSync"]),
    "inference": (inference.start, ["Inference"]),
    "trainer": (start_trainer_whose_loop_has_ended, ["Trainer"]),
    "other replica of the trainer": (start_other_replica, ["TrainerReplica"]),
    "rollout": (rollout.start, ["Gateway"]),
}


@pytest.mark.parametrize(
    ("method", "content", "field"),
    [
        ("TrajectoryPoolService/PutSamples", b"\x0a\xff", "request"),
        ("TrajectoryPoolService/PutSamples", PUT_WITH_MALFORMED_RESULT, r"results\[0\]"),
        ("ValidatorService/PutValidationSamples", b"\x0a\xff", "request"),
        ("ValidatorService/PutValidationSamples", PUT_WITH_MALFORMED_RESULT, r"results\[0\]"),
        ("TrainBatchPoolService/PutTrainBatch", b"\x0a\xff", "request"),
    ],
)
async def test_malformed_bytes_of_a_put_are_an_invalid_argument(
    deploy: Deploy, method: str, content: bytes, field: str
) -> None:
    pool = await deploy()
    async with grpc.aio.insecure_channel(pool.address) as channel:
        put: Any = channel.unary_unary(f"/nexrl.v1.{method}")
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as refusal:
            await put(content, timeout=LIMIT_SECONDS)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_number_that_redis_cannot_count_to_is_refused(deploy: Deploy) -> None:
    pool = await deploy()
    version = SetPolicyVersionRequest(request_id="one", model_tag=TAG, policy_version=2**63 - 1)
    with pytest.raises(InvalidArgumentError, match=r"policy_version: 9223372036854775807; at most"):
        await call(pool.pool.SetPolicyVersion, version, timeout_seconds=LIMIT_SECONDS)
    resume = ResumeFromCheckpointRequest(request_id="one", model_tag=TAG, data_cursor=2**63 - 1)
    with pytest.raises(InvalidArgumentError, match=r"data_cursor: 9223372036854775807; at most"):
        await call(pool.train.ResumeFromCheckpoint, resume, timeout_seconds=LIMIT_SECONDS)


@pytest.mark.timeout(600 + CALLS)
@pytest.mark.parametrize("name", SERVICES)
async def test_random_messages_are_answered_or_refused_with_what_is_wrong(
    name: str, tmp_path: Path, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_ranks, "start_ranks", no_ranks)
    for variable, value in environment(Authority().write(tmp_path / "ours")).items():
        monkeypatch.setenv(variable, value)
    start, services = SERVICES[name]
    found = [Default().FindServiceByName(f"nexrl.v1.{each}Service").methods for each in services]
    methods, messages, nobody = [method for each in found for method in each], Messages(SEED), "127.0.0.1:1"
    experiment = small_experiment(experiment_name, rollout={"type": "external", "maxNewTokens": 8})
    addresses = {"redis_url": redis_url, "weight_sync": nobody, "trajectory_pool": nobody}

    async def send_many(channel: grpc.aio.Channel) -> None:
        for _ in range(0, CALLS, IN_FLIGHT):
            method = messages.random.choice(methods)
            await send(channel, method, messages.content(method.input_type))

    async with (
        running_service(tmp_path, data_reader.start, experiment) as reader,
        running_service(
            tmp_path, start, experiment, data_reader=reader.address, weights="initial", **addresses
        ) as process,
        connect(process.address) as channel,
    ):
        await channel.channel_ready()
        for method in methods:
            await send(channel, method, messages.content(method.input_type))
            await send_oversized(channel, method)
        before = resident_kib()
        async with asyncio.TaskGroup() as senders:
            for _ in range(IN_FLIGHT):
                senders.create_task(send_many(channel))
        assert not process.stopping.is_set()
        assert resident_kib() < before + MAX_GROWTH_KIB


def resident_kib() -> int:
    """Return the memory of this process in KiB, in which the server runs."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


async def send(channel: grpc.aio.Channel, method: Any, content: bytes) -> None:
    """Send these bytes as a message. Fails if they are refused without a word about what is wrong."""
    stub: Any = channel.unary_stream(f"/{method.containing_service.full_name}/{method.name}")
    sent = stub(content, timeout=0.5)
    with suppress(grpc.aio.AioRpcError):
        async for _ in sent:
            pass
    code, details = await sent.code(), await sent.details() or ""
    described = f"{method.full_name}: {code}: {details}: {content!r}"
    assert code != grpc.StatusCode.UNKNOWN, described
    assert code != grpc.StatusCode.INTERNAL, described
    names_field = re.match(r"(train batch: )?\w+(, \w+)*([.\[].*)?: ", details, re.DOTALL)
    assert code != grpc.StatusCode.INVALID_ARGUMENT or names_field, described


async def send_oversized(channel: grpc.aio.Channel, method: Any) -> None:
    """Send a message above the limit of the method. Fails if it is not refused with its size and the limit."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    size = min(request_limit_bytes(path), MAX_PIECE_BYTES) + 1
    stub: Any = channel.unary_stream(path)
    with pytest.raises(
        grpc.aio.AioRpcError, match=rf"{size} bytes; {path} takes at most|larger than max \({size} vs"
    ) as no:
        async for _ in stub(bytes(size), timeout=LIMIT_SECONDS):
            pass
    assert no.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
