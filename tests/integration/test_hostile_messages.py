"""Messages that no client of ours sends: each is refused with a status that names what is wrong."""

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default

from nexrl.errors import InvalidArgumentError
from nexrl.rpc.client import call, connect
from nexrl.v1.train_batch_pool_service_pb2 import ResumeFromCheckpointRequest
from nexrl.v1.trajectory_pool_service_pb2 import SetPolicyVersionRequest
from nexrl_controller import server as controller
from nexrl_data_reader import server as data_reader
from nexrl_trajectory_pool import server as trajectory_pool
from nexrl_weight_sync import server as weight_sync
from tests.support.certificates import Authority, environment
from tests.support.pool import TAG, Deploy
from tests.support.random_messages import Messages
from tests.support.services import running_service, small_experiment

CALLS = int(os.environ.get("NEXRL_FUZZ_CALLS", "200"))
SEED = int(os.environ.get("NEXRL_FUZZ_SEED", "0"))
IN_FLIGHT = 8
MAX_GROWTH_KIB = 200 * 1024
SERVICES: dict[Any, list[str]] = {
    data_reader: ["DataReader"],
    trajectory_pool: ["DataLoader", "TrainBatchPool", "TrajectoryPool", "Validator"],
    controller: ["Activity", "Controller"],
    weight_sync: ["WeightSync"],
}
PUT_WITH_MALFORMED_RESULT = b"\x0a\x01r\x12" + bytes([len(TAG)]) + TAG.encode() + b"\x22\x02\x0a\xff"


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
            await put(content, timeout=20)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_number_that_redis_cannot_count_to_is_refused(deploy: Deploy) -> None:
    pool = await deploy()
    version = SetPolicyVersionRequest(request_id="one", model_tag=TAG, policy_version=2**63 - 1)
    with pytest.raises(InvalidArgumentError, match=r"policy_version: 9223372036854775807; at most"):
        await call(pool.pool.SetPolicyVersion, version, timeout_seconds=20)
    resume = ResumeFromCheckpointRequest(request_id="one", model_tag=TAG, data_cursor=2**63 - 1)
    with pytest.raises(InvalidArgumentError, match=r"data_cursor: 9223372036854775807; at most"):
        await call(pool.train.ResumeFromCheckpoint, resume, timeout_seconds=20)


@pytest.mark.timeout(60 + CALLS)
@pytest.mark.parametrize("server", SERVICES, ids=lambda server: server.__name__.partition(".")[0])
async def test_random_messages_are_answered_or_refused_with_what_is_wrong(
    server: Any, tmp_path: Path, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(Authority().write(tmp_path / "ours")).items():
        monkeypatch.setenv(name, value)
    messages, nobody = Messages(SEED), "127.0.0.1:1"
    methods = [
        method for name in SERVICES[server] for method in Default().FindServiceByName(f"nexrl.v1.{name}Service").methods
    ]
    experiment, addresses = small_experiment(experiment_name), {"weight_sync": nobody, "trajectory_pool": nobody}
    async with (
        running_service(tmp_path, data_reader.start, experiment) as reader,
        running_service(
            tmp_path, server.start, experiment, redis_url=redis_url, data_reader=reader.address, **addresses
        ) as process,
        connect(process.address) as channel,
    ):
        await channel.channel_ready()
        before = resident_kib()
        for _ in range(0, CALLS, IN_FLIGHT):
            chosen = [messages.random.choice(methods) for _ in range(IN_FLIGHT)]
            await asyncio.gather(*(send(channel, method, messages.content(method.input_type)) for method in chosen))
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
    assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), described
    names_field = re.match(r"[a-z_]+([.\[].*)?: ", details, re.DOTALL)
    assert code != grpc.StatusCode.INVALID_ARGUMENT or names_field, described
