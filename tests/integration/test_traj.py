"""Looking into a run: its own pool or a copy of its ledger; its replicas, or an engine with the weights of then."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from nexrl.errors import CheckFailedError, FailedPreconditionError, NotFoundError, UnavailableError
from nexrl.local.child import Command
from nexrl.local.ledger_view import pool_of
from nexrl.local.redis_server import redis_command
from nexrl.local.replay import ReplayOptions, replay
from nexrl.local.run_folder import RunFolder, is_running
from nexrl.local.temporary import running
from nexrl.local.trajectories import samples_of
from nexrl.rpc.client import call
from nexrl.spec import dump_resolved
from nexrl.store import connect_redis
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.data_loader_service_pb2 import LeaseTasksRequest
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl.v1.policy_pb2 import Replica
from nexrl.v1.trajectory_pb2 import CompletionSpan, Draw, Group, PolicySpan, SampleResult, Trajectory
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.pool import running_pool, scored
from tests.support.rollout import FakeEngine, FakePool, FakeWeightSync, completion, serving
from tests.support.services import small_experiment

EXPERIMENT = small_experiment("looked-into")
RECORDED = [5, 6, 7]
LEASE_SECONDS = 3.0
"""Long enough that the run has ended before; it is waited for."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A running run, with a batch of one sample: RECORDED after the tokens 1, 2, drawn by version 3 with seed 9."""
    folder = RunFolder(tmp_path, EXPERIMENT)
    drawn = completion(RECORDED)
    trajectory = Trajectory(
        token_ids=[1, 2, *RECORDED],
        loss_mask=[False, False, True, True, True],
        logprobs=[0, 0, *drawn.logprobs],
        spans=[PolicySpan(start=2, end=5, policy_version=3)],
        completions=[CompletionSpan(start=2, end=5, draw=Draw(seed=9, temperature=1, max_new_tokens=8))],
    )
    bare = Trajectory(token_ids=[1, 2], loss_mask=[False, True], logprobs=[0, -1], spans=trajectory.spans)
    samples = [
        SampleResult(sample_id=f"0.{k}", attempt=1, trajectories=[each]) for k, each in enumerate((trajectory, bare))
    ]
    batch = pool_pb.BatchLease(batch_id=3, groups=[Group(group_id="0", samples=samples)])
    (folder.path / "trajectories" / "batch_000003.pb").write_bytes(batch.SerializeToString())
    folder.write_json("endpoints.json", {"controller": "", "trajectory_pool": "", "weight_sync": ""})
    yield folder
    folder.close()


@asynccontextmanager
async def private_redis(folder: Path) -> AsyncIterator[str]:
    """The URL of a server that keeps its data in `folder`."""
    socket = folder.parent / "redis.sock"

    async def until_it_answers() -> None:
        await eventually(socket.exists)
        async with aclosing(await connect_redis(f"unix://{socket}")):
            return

    async with running(Command("redis", redis_command(folder, socket), {}), folder.parent, until_it_answers()):
        yield f"unix://{socket}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def engine_of(version: int, tokens: Sequence[int] = RECORDED) -> FakeEngine:
    def reply(request: GenerateRequest, index: int) -> GeneratedCompletion:
        return completion(tokens, versions=[version] * len(tokens))

    return FakeEngine(reply)


@asynccontextmanager
async def replica_of(folder: RunFolder, engine: FakeEngine, announced: int = 3) -> AsyncIterator[None]:
    """A run without a reachable pool, and with one replica, which weight sync has at version `announced`."""
    registry = FakeWeightSync()
    pool = FakePool()

    async def get_sample(request: pool_pb.GetSampleRequest, context: object) -> pool_pb.GetSampleResponse:
        record = pool_pb.SampleRecord(sample_id=request.sample_id, state=pool_pb.SAMPLE_STATE_DURABLE, batch_id=3)
        return pool_pb.GetSampleResponse(record=record)

    vars(pool)["GetSample"] = get_sample
    async with serving(pool) as pool_address, serving(engine) as address, serving(registry) as weight_sync:
        await registry.set(Replica(replica_id="inference-0", address=address, policy_version=announced, ready=True))
        folder.write_json("endpoints.json", {"trajectory_pool": pool_address, "weight_sync": weight_sync})
        yield


async def test_a_run_that_has_ended_is_read_from_a_copy_that_lets_no_lease_run_out(
    folder: RunFolder, tmp_path: Path
) -> None:
    redis = folder.path / "redis"
    async with private_redis(redis) as url, running_pool(tmp_path, url, EXPERIMENT) as pool:
        await pool.set_version(0)
        (lease,) = (await pool.lease(2)).leases
        await pool.put([scored(sample) for sample in lease.samples])
        request = LeaseTasksRequest(request_id="r", model_tag="default", max_samples=2, lease_seconds=LEASE_SECONDS)
        (unfinished,) = (await call(pool.loader.LeaseTasks, request, timeout_seconds=LIMIT_SECONDS)).leases
    folder.close()
    before = contents(redis)
    async with samples_of(folder.path) as samples:
        await asyncio.sleep(max(0.0, unfinished.deadline_unix_seconds - time.time()))
        seen = {record.sample_id: record.state async for record in samples.records()}
        held = await samples.get(lease.samples[0].sample_id)
    assert seen == {
        **dict.fromkeys([sample.sample_id for sample in lease.samples], pool_pb.SAMPLE_STATE_PRODUCED),
        **dict.fromkeys([sample.sample_id for sample in unfinished.samples], pool_pb.SAMPLE_STATE_LEASED),
    }
    assert held.trajectories[0].reward == 1.0
    assert contents(redis) == before


async def test_a_run_that_is_on_is_asked_itself(folder: RunFolder) -> None:
    async with replica_of(folder, engine_of(3)), samples_of(folder.path) as samples:
        assert is_running(folder.path)
        sample = await samples.get("0.0")
        assert (sample.state, sample.batch, sample.step) == ("durable", 3, 4)
        assert list(sample.trajectories[0].token_ids) == [1, 2, *RECORDED]
    folder.close()
    assert not is_running(folder.path)


async def test_a_shared_redis_that_is_away_is_told_without_a_wait_for_a_pool(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = small_experiment("looked-into", redis={"url": "redis://127.0.0.1:1"})
    folder.experiment_file.write_text(dump_resolved(shared))
    for _ in ("on", "ended"):
        with pytest.raises(UnavailableError, match=r"^redis\.url: redis://127\.0\.0\.1:1: .*no Redis answers"):
            async with pool_of(folder.path):
                pass
        folder.close()
    async with samples_of(folder.path) as samples:
        assert (await samples.get("0.0")).batch == 3
    assert capsys.readouterr().err.count("\n") == 1


async def test_a_run_without_a_ledger_is_named(folder: RunFolder, tmp_path: Path) -> None:
    folder.close()
    (folder.path / "redis").rmdir()
    with pytest.raises(NotFoundError, match="no folder redis"):
        async with pool_of(folder.path):
            pass
    shared = small_experiment("other", redis={"url": "redis://127.0.0.1:1"})
    (folder.path / "experiment.yaml").write_text(dump_resolved(shared))
    with pytest.raises(NotFoundError, match="belongs to a later run of this name"):
        async with pool_of(folder.path):
            pass


@pytest.mark.parametrize("tokens", [RECORDED, [5, 8]])
async def test_a_replica_that_serves_the_version_draws_it_again(
    folder: RunFolder, tokens: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of(3, tokens)
    async with replica_of(folder, engine):
        if tokens == RECORDED:
            await replay(folder.path, "0.0", ReplayOptions())
            assert "equal; largest difference" in capsys.readouterr().out
        else:
            with pytest.raises(CheckFailedError, match=r"0\.0: 1 of 1 parts differ"):
                await replay(folder.path, "0.0", ReplayOptions())
            assert "different from token 3 on" in capsys.readouterr().out
    (request,) = engine.requests
    assert (list(request.prompt_token_ids), list(request.seeds), request.max_new_tokens) == ([1, 2], [9], 8)


@pytest.mark.parametrize(("served", "announced"), [(4, 4), (4, 3)], ids=["has moved on", "moves on meanwhile"])
async def test_a_version_that_nobody_has_is_refused_with_those_that_there_are(
    folder: RunFolder, served: int, announced: int
) -> None:
    (folder.path / "checkpoints" / "global_step_8").mkdir()
    async with replica_of(folder, engine_of(served), announced):
        with pytest.raises(NotFoundError, match=r"policy version 3, .* available: 0, 8. Select .* --version"):
            await replay(folder.path, "0.0", ReplayOptions())


async def test_an_engine_that_is_named_is_asked_whatever_it_serves(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with replica_of(folder, engine_of(4)), serving(engine_of(7)) as address:
        await replay(folder.path, "0.0", ReplayOptions(engine=address))
    printed = capsys.readouterr().out
    assert f"{address}, policy version 7" in printed
    assert "another policy version" in printed


async def test_a_sample_of_a_worker_that_records_no_draw_is_refused(folder: RunFolder) -> None:
    async with replica_of(folder, engine_of(3)):
        with pytest.raises(FailedPreconditionError, match="there is no record of how it was drawn"):
            await replay(folder.path, "0.1", ReplayOptions())
