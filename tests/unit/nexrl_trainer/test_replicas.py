"""Another replica of the trainer: which calls it refuses, and how each side notices the other's end."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.rpc import server as rpc_server
from nexrl.rpc.client import call, connect
from nexrl.rpc.server import ServiceProcess
from nexrl.v1 import trainer_replica_service_pb2 as pb
from nexrl.v1.trainer_replica_service_pb2_grpc import TrainerReplicaServiceStub
from nexrl_trainer import hosted_ranks, other_replica, server
from nexrl_trainer.other_replica import OtherReplica
from nexrl_trainer.rank_processes import RankEnd, RankProcess, first_end
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.services import settings, small_experiment

OWN = pb.RunRanksRequest(trainer_id="own", replica=1, replicas=2, processes_per_replica=1, rendezvous="127.0.0.1:1")
LOST = 6


def variant(**fields: Any) -> pb.RunRanksRequest:
    request = pb.RunRanksRequest.FromString(OWN.SerializeToString())
    for name, value in fields.items():
        setattr(request, name, value)
    return request


class Replica:
    """Replica 1 of 2 in this process. Its only rank is a shell, and it notes the code that it ends with."""

    def __init__(self, process: ServiceProcess, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.channel = channel
        self.codes: list[int] = []
        self.rank: asyncio.subprocess.Process | None = None

    def stub(self) -> Any:
        return TrainerReplicaServiceStub(self.channel)

    async def has_started(self) -> bool:
        return self.rank is not None

    async def has_ended(self) -> bool:
        return bool(self.codes) or self.process.stopping.is_set()


@pytest.fixture
async def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    trainer = {"steps": 4, "replicas": 2, "processesPerReplica": 1, "device": "cpu"}
    process = ServiceProcess("trainer", settings(tmp_path, replica=1), small_experiment(trainer=trainer))
    channel = connect(process.address)  # of replica 0, so it outlives this process
    replica = Replica(process, channel)

    async def started(ranks: range, *_: Any) -> list[RankProcess]:
        replica.rank = await asyncio.create_subprocess_exec("sleep", "600")
        return [RankProcess.watched(ranks[0], replica.rank)]

    monkeypatch.setattr(hosted_ranks, "start_ranks", started)
    monkeypatch.setattr(hosted_ranks, "end_process", replica.codes.append)
    running = asyncio.create_task(process.run(server.start))
    async with channel:
        await channel.channel_ready()
        yield replica
        process.stopping.set()
        await running
    if replica.rank is not None and replica.rank.returncode is None:
        replica.rank.kill()
        await replica.rank.wait()


@pytest.mark.guide("Q20")
async def test_a_replica_runs_its_ranks_until_replica_0_says_how_they_end(replica: Replica) -> None:
    other = OtherReplica.started(replica.stub(), OWN, lambda: None)
    await eventually(replica.has_started)
    await other.end(10, "code of the user")
    await eventually(replica.has_ended)
    assert replica.codes == [10]
    assert replica.rank is not None
    assert replica.rank.returncode == -9


async def test_a_replica_whose_caller_is_gone_ends_at_once_and_with_it_its_ranks(replica: Replica) -> None:
    channel = connect(replica.process.address)
    stream = TrainerReplicaServiceStub(channel).RunRanks(OWN)
    assert await stream.read() == pb.RunRanksResponse(started=pb.RunRanksResponse.Started())
    await channel.close()
    await eventually(replica.has_ended)
    assert replica.codes == [LOST]


async def test_replica_0_notices_the_end_of_a_replica_at_once_and_names_its_ranks(replica: Replica) -> None:
    other = OtherReplica.started(replica.stub(), OWN, lambda: None)
    await eventually(replica.has_started)
    await replica.process.server.stop(None)
    end = await first_end([other])
    assert (end.rank, end.exit_code) == (1, LOST)
    assert "replica 1 of the trainer, with ranks 1 to 1, has ended or cannot be reached" in end.lost


async def test_the_end_of_a_rank_of_another_replica_reaches_replica_0_with_its_code(replica: Replica) -> None:
    other = OtherReplica.started(replica.stub(), OWN, lambda: None)
    await eventually(replica.has_started)
    assert replica.rank is not None
    replica.rank.kill()
    assert await first_end([other]) == RankEnd(1, -9)
    await other.end(-9, "rank 1 of the trainer ended with code -9")
    await eventually(replica.has_ended)
    assert replica.codes == [-9]


async def test_a_stop_of_another_replica_is_passed_on_and_ends_nothing(replica: Replica) -> None:
    asked = asyncio.Event()
    other = OtherReplica.started(replica.stub(), OWN, asked.set)
    await eventually(replica.has_started)
    signal.raise_signal(signal.SIGTERM)
    await asked.wait()
    assert not await replica.has_ended()
    await other.end(0, "stopped")
    await replica.process.stopping.wait()
    assert replica.codes == []


@pytest.mark.parametrize("wrong", [{"replica": 2}, {"replicas": 3}, {"processes_per_replica": 2}])
async def test_a_call_for_another_replica_is_refused_with_both(replica: Replica, wrong: dict[str, int]) -> None:
    other = OtherReplica.started(replica.stub(), variant(**wrong), lambda: None)
    with pytest.raises(
        InvalidArgumentError, match=r"the call is for replica .*, this is replica 1 of 2 with 1 processes"
    ):
        await first_end([other])
    assert replica.rank is None


async def test_a_call_without_the_id_of_a_trainer_is_refused(replica: Replica) -> None:
    with pytest.raises(InvalidArgumentError, match="trainer_id: is empty"):
        await first_end([OtherReplica.started(replica.stub(), variant(trainer_id=""), lambda: None)])
    assert replica.rank is None


async def test_a_replica_that_runs_the_ranks_of_one_trainer_refuses_another(replica: Replica) -> None:
    first = OtherReplica.started(replica.stub(), OWN, lambda: None)
    await eventually(replica.has_started)
    second = OtherReplica.started(replica.stub(), variant(trainer_id="another"), lambda: None)
    with pytest.raises(FailedPreconditionError, match="runs the ranks of another trainer"):
        await first_end([second])
    with pytest.raises(FailedPreconditionError, match="runs the ranks of another trainer"):
        await call(replica.stub().EndRanks, pb.EndRanksRequest(trainer_id="another"), timeout_seconds=LIMIT_SECONDS)
    assert not await replica.has_ended()
    assert not first.ended.done()


async def test_replicas_that_wait_for_each_other_in_vain_end(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_replica, "JOIN_SECONDS", 0.2)
    nobody = TrainerReplicaServiceStub(replica.process.connect("127.0.0.1:9"))
    end = await first_end([OtherReplica.started(nobody, OWN, lambda: None)])
    assert end.exit_code == LOST
    assert "did not start within" in end.lost


async def test_addresses_that_do_not_fit_the_number_of_replicas_are_refused(tmp_path: Path) -> None:
    trainer = {"steps": 4, "replicas": 3, "device": "cpu"}
    process = ServiceProcess("trainer", settings(tmp_path, trainer_replicas="a:1"), small_experiment(trainer=trainer))
    with pytest.raises(InvalidArgumentError, match=r"NEXRL_TRAINER_REPLICAS: 1 addresses, and trainer\.replicas is 3"):
        await server.start_gang(process)


async def test_the_call_between_replicas_outlives_the_age_of_other_connections() -> None:
    ages = {role: dict(rpc_server._options(role))["grpc.max_connection_age_ms"] for role in ("trainer", "rollout")}
    assert ages == {"trainer": 2**31 - 1, "rollout": 600_000}
