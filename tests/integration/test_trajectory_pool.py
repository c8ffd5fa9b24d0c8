"""Data loader, trajectory pool, train batch pool and validator: every RPC, over gRPC and a real Redis."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NotFoundError,
    ResourceExhaustedError,
)
from nexrl.rpc.client import call, new_request_id
from nexrl.store import Redis, connect_redis, key_prefix
from nexrl.v1 import data_loader_service_pb2 as loader_pb
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from tests.support.pool import CALL_SECONDS, TAG, PoolClient, failed, running_pool, scored, trajectory
from tests.support.redis import running_redis
from tests.support.services import small_experiment

Deploy = Callable[..., Awaitable[PoolClient]]
VALIDATION = {"data": {"type": "mock", "size": 2, "seed": 5}, "samplesPerTask": 2, "temperature": 0.25}
ONE_EPOCH = {"type": "mock", "size": 3, "shuffle": False, "epochs": 1}


@pytest.fixture
async def deploy(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Deploy]:
    """Starts one more process of the same pool; sections of the experiment as keywords."""
    async with AsyncExitStack() as stack:

        async def start(**sections: Any) -> PoolClient:
            experiment = small_experiment(experiment_name, **sections)
            return await stack.enter_async_context(running_pool(tmp_path, redis_url, experiment))

        yield start


def samples_of(leases: loader_pb.LeaseTasksResponse) -> list[str]:
    return [sample.sample_id for lease in leases.leases for sample in lease.samples]


def grouped(batch: pool_pb.BatchLease) -> dict[str, list[str]]:
    return {group.group_id: [sample.sample_id for sample in group.samples] for group in batch.groups}


# data loader


@pytest.mark.guide("E4", "E6", "G12")
async def test_tasks_are_leased_whole_groups_first_with_all_that_a_worker_needs(deploy: Deploy) -> None:
    pool = await deploy(rollout={"maxNewTokens": 8, "temperature": 0.5})
    assert (await pool.loader_state()).can_lease
    answer = await pool.lease(3)
    (lease,) = answer.leases
    assert [(sample.sample_id, sample.attempt) for sample in lease.samples] == [("0.0", 1), ("0.1", 1)]
    assert (lease.purpose, lease.temperature, lease.group_id) == (pb.PURPOSE_TRAINING, 0.5, "0")
    item = json.loads(lease.task.item_json)
    assert (item["id"], item["prompt"]) == (lease.task.task_id, item["answer"])
    await pool.lease()
    waiting = await pool.lease()
    assert (list(waiting.leases), waiting.waiting_on, waiting.exhausted) == ([], "credit", False)
    assert not (await pool.loader_state()).can_lease


@pytest.mark.guide("E2", "E5", "Q5", "Q6")
async def test_the_loader_counts_what_remains_until_the_data_is_exhausted(deploy: Deploy) -> None:
    pool = await deploy(data=ONE_EPOCH)
    state = await pool.loader_state()
    assert (state.items, state.cursor, state.remaining, state.finished) == (3, 0, 3, False)
    await pool.fill()
    assert (await pool.loader_state()).remaining == 1
    await pool.set_version(1)
    await pool.fill()
    state = await pool.loader_state()
    assert (state.remaining, state.finished, state.can_lease) == (0, True, False)
    answer = await pool.lease(wait_seconds=60)  # and answers at once
    assert (answer.exhausted, answer.waiting_on) == (True, "data")


async def test_data_without_an_end_has_no_remainder(deploy: Deploy) -> None:
    assert (await (await deploy()).loader_state()).remaining == -1


@pytest.mark.guide("E3")
async def test_an_item_is_read_by_its_index_and_a_wrong_index_is_refused(deploy: Deploy) -> None:
    pool = await deploy()
    request = loader_pb.GetTaskRequest(model_tag=TAG, purpose=pb.PURPOSE_TRAINING, index=2)
    task = (await call(pool.loader.GetTask, request, timeout_seconds=CALL_SECONDS)).task
    assert task.task_id == "train-2"
    request.index = 8
    with pytest.raises(NotFoundError, match="index: 8; 0 to 7"):
        await call(pool.loader.GetTask, request, timeout_seconds=CALL_SECONDS)


@pytest.mark.guide("E1")
async def test_validation_data_is_another_loader_and_missing_without_the_section(deploy: Deploy) -> None:
    pool = await deploy()
    with pytest.raises(NotFoundError, match="no section validation"):
        await pool.loader_state(pb.PURPOSE_VALIDATION)
    validating = await deploy(validation=VALIDATION)
    assert (await validating.loader_state(pb.PURPOSE_VALIDATION)).items == 2
    assert (await validating.loader_state()).items == 8


@pytest.mark.guide("E7")
async def test_a_reset_starts_the_data_again_and_keeps_what_was_granted(deploy: Deploy) -> None:
    pool = await deploy(data=ONE_EPOCH)
    first = await pool.lease(2)
    request = loader_pb.ResetDataLoaderRequest(request_id=new_request_id(), model_tag=TAG, purpose=pb.PURPOSE_TRAINING)
    await call(pool.loader.ResetDataLoader, request, timeout_seconds=CALL_SECONDS)
    assert (await pool.loader_state()).remaining == 3
    again = await pool.lease(2)
    assert again.leases[0].task == first.leases[0].task
    assert await pool.put([scored(sample) for sample in first.leases[0].samples]) == ["ACCEPTED"] * 2


async def add(pool: PoolClient, position: "loader_pb.TaskPosition.ValueType", task: pb.Task) -> None:
    request = loader_pb.AddTaskRequest(request_id=new_request_id(), model_tag=TAG, task=task, position=position)
    await call(pool.loader.AddTask, request, timeout_seconds=CALL_SECONDS)


@pytest.mark.guide("E8", "E9", "E10")
async def test_added_tasks_come_before_the_data_at_the_end_that_was_asked_for(deploy: Deploy) -> None:
    pool = await deploy(data=ONE_EPOCH)
    for name, position in [
        ("second", loader_pb.TASK_POSITION_BACK),
        ("third", loader_pb.TASK_POSITION_UNSPECIFIED),
        ("first", loader_pb.TASK_POSITION_FRONT),
    ]:
        await add(pool, position, pb.Task(task_id=name, item_json='{"prompt": "2+2="}'))
    assert (await pool.loader_state()).remaining == 6
    await pool.set_version(1)
    leases = (await pool.lease()).leases
    assert [lease.task.task_id for lease in leases] == ["first", "second", "third", "train-0"]
    assert json.loads(leases[0].task.item_json) == {"id": "first", "prompt": "2+2=", "answer": None, "metadata": {}}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (pb.Task(task_id="x", item_json="{"), "task.item_json: not JSON"),
        (pb.Task(task_id="x", item_json='{"answer": "4"}'), "task.item_json: an object with the text 'prompt'"),
        (pb.Task(item_json='{"prompt": "2+2="}'), "task.task_id: empty"),
    ],
)
async def test_an_added_task_that_no_worker_could_use_is_refused(deploy: Deploy, task: pb.Task, message: str) -> None:
    pool = await deploy()
    with pytest.raises(InvalidArgumentError, match=message):
        await add(pool, loader_pb.TASK_POSITION_FRONT, task)
    assert (await pool.lease(2)).leases[0].task.task_id == "train-0"


@pytest.mark.guide("G13")
async def test_samples_are_returned_and_renewed_by_those_who_hold_them(deploy: Deploy) -> None:
    pool = await deploy()
    held = list((await pool.lease(2)).leases[0].samples)
    renewal = loader_pb.RenewLeasesRequest(
        request_id="r", model_tag=TAG, samples=held, purpose=pb.PURPOSE_TRAINING, lease_seconds=60
    )
    assert not (await call(pool.loader.RenewLeases, renewal, timeout_seconds=CALL_SECONDS)).lost_sample_ids
    giving = loader_pb.ReturnSamplesRequest(
        request_id=new_request_id(), model_tag=TAG, samples=held, purpose=pb.PURPOSE_TRAINING
    )
    for _ in range(2):  # the same request: the first answer
        assert (await call(pool.loader.ReturnSamples, giving, timeout_seconds=CALL_SECONDS)).returned == 2
    assert list((await call(pool.loader.RenewLeases, renewal, timeout_seconds=CALL_SECONDS)).lost_sample_ids) == [
        "0.0",
        "0.1",
    ]
    assert sorted(samples_of(await pool.lease(2))) == ["0.0", "0.1"]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
async def test_a_lease_of_an_impossible_length_is_refused(deploy: Deploy, seconds: float) -> None:
    pool = await deploy()
    request = loader_pb.LeaseTasksRequest(request_id="r", model_tag=TAG, max_samples=1, lease_seconds=seconds)
    with pytest.raises(InvalidArgumentError, match="lease_seconds"):
        await call(pool.loader.LeaseTasks, request, timeout_seconds=CALL_SECONDS)


async def test_a_lease_of_nothing_and_of_an_unknown_model_are_refused(deploy: Deploy) -> None:
    pool = await deploy()
    with pytest.raises(InvalidArgumentError, match="max_samples: 0"):
        await pool.lease(0)
    with pytest.raises(NotFoundError, match=r"model_tag: 'other'; this experiment trains \['default'\]"):
        await pool.lease(tag="other")


async def test_a_short_lease_that_runs_out_is_granted_to_one_who_waits(deploy: Deploy) -> None:
    pool = await deploy()
    request = loader_pb.LeaseTasksRequest(request_id="r", model_tag=TAG, max_samples=64, lease_seconds=0.2)
    await call(pool.loader.LeaseTasks, request, timeout_seconds=CALL_SECONDS)
    again = await pool.lease(wait_seconds=20)
    assert {sample.attempt for lease in again.leases for sample in lease.samples} == {2}


# two processes over one Redis


@pytest.mark.guide("H13", "H14")
async def test_a_lease_that_waits_is_woken_by_a_commit_at_another_process(deploy: Deploy) -> None:
    here, there = await deploy(), await deploy()
    await here.lease()
    waiting = asyncio.create_task(here.lease(wait_seconds=30))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    assert await there.set_version(1) == 1
    assert samples_of(await asyncio.wait_for(waiting, 5)) == ["2.0", "2.1", "3.0", "3.1"]


@pytest.mark.guide("H7", "I7", "J14")
async def test_a_batch_and_a_train_batch_that_are_waited_for_arrive_from_another_process(deploy: Deploy) -> None:
    here, there = await deploy(), await deploy()
    batch = asyncio.create_task(here.lease_batch(wait_seconds=30))
    train_batch = asyncio.create_task(here.lease_train_batch(0, wait_seconds=30))
    await there.fill()
    lease = (await asyncio.wait_for(batch, 5)).lease
    stored = await there.put_train_batch(lease)
    assert (await asyncio.wait_for(train_batch, 5)).train_batch == stored


async def test_a_waiter_looks_again_when_the_wake_ups_were_cut_off(deploy: Deploy, redis: Redis) -> None:
    here, there = await deploy(), await deploy()
    await here.lease()
    waiting = asyncio.create_task(here.lease(wait_seconds=30))
    await asyncio.wait([waiting], timeout=0.2)
    assert await redis.client_kill_filter(_type="pubsub")  # and the version is told to nobody
    await there.set_version(1)
    assert len(samples_of(await asyncio.wait_for(waiting, 10))) == 4


async def test_a_repeated_request_gets_the_first_answer_at_another_process_too(deploy: Deploy) -> None:
    here, there = await deploy(), await deploy()
    first = await here.lease(4, request_id="lease")
    assert await there.lease(4, request_id="lease") == first
    results = [failed(sample) for lease in first.leases for sample in lease.samples]
    assert await here.put(results, request_id="put") == ["RETRIED"] * 4
    assert await there.put(results, request_id="put") == ["RETRIED"] * 4
    await here.fill()
    batch = await here.lease_batch(request_id="batch")
    assert await there.lease_batch(request_id="batch") == batch
    assert (await there.state()).imbalance == 0


# trajectories, groups, batches


@pytest.mark.guide("G11", "H4", "H6", "H12")
async def test_a_put_says_what_became_of_each_result(deploy: Deploy) -> None:
    pool = await deploy(rollout={"maxNewTokens": 8, "maxAttempts": 2})
    first, second = (await pool.lease(2)).leases[0].samples
    assert await pool.put([scored(first), failed(second)]) == ["ACCEPTED", "RETRIED"]
    assert await pool.put([scored(first), scored(second)]) == ["DUPLICATE", "FENCED"]
    assert await pool.put([scored(pb.SampleLease(sample_id="99.0", attempt=1))]) == ["FENCED"]


@pytest.mark.guide("H3", "H16", "H18", "B2")
async def test_one_key_groups_the_samples_of_a_task(deploy: Deploy) -> None:
    pool = await deploy()
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    assert grouped(batch) == {"0": ["0.0", "0.1"], "1": ["1.0", "1.1"]}
    assert (batch.batch_id, batch.attempt, batch.model_tag, batch.data_cursor) == (0, 1, TAG, 2)
    assert batch.groups[0].samples[0].trajectories[0] == trajectory()


@pytest.mark.guide("H15", "H18")
async def test_an_empty_key_list_makes_each_sample_ready_at_once(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": []})
    leases = (await pool.lease()).leases
    await pool.put([scored(leases[0].samples[0])])
    assert (await pool.state()).ready == 1
    await pool.put([scored(sample) for lease in leases for sample in lease.samples][1:])
    assert list(grouped((await pool.lease_batch()).lease)) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.guide("H2", "H17", "H18", "Q13")
async def test_two_keys_release_the_leaves_of_a_task_together(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["task_id", "turn"]})
    first, second = (await pool.lease()).leases
    await pool.put([scored(s, trajectory(turn="a/b")) for s in first.samples])
    assert (await pool.state()).ready == 2
    await pool.put([scored(s, trajectory(turn=str(k))) for k, s in enumerate(second.samples)])
    batch = (await pool.lease_batch()).lease
    assert grouped(batch) == {
        "0/turn=a%2Fb": ["0.0", "0.1"],
        "1/turn=0": ["1.0"],
        "1/turn=1": ["1.1"],
    }


@pytest.mark.guide("H17")
async def test_a_key_of_the_data_groups_samples_across_tasks(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["domain"]})
    leases = (await pool.lease()).leases
    await pool.put([scored(lease.samples[k], trajectory(domain="ab"[k])) for lease in leases for k in (0, 1)])
    assert grouped((await pool.lease_batch()).lease) == {"domain=a": ["0.0", "1.0"], "domain=b": ["0.1", "1.1"]}


@pytest.mark.guide("H17")
async def test_groups_across_tasks_that_nothing_can_fill_are_released_smaller(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["domain"]})
    waiting = asyncio.create_task(pool.lease_batch(wait_seconds=30))
    samples = [sample for lease in (await pool.lease()).leases for sample in lease.samples]
    await pool.put([scored(s, trajectory(domain=d)) for s, d in zip(samples, "aabc", strict=True)])
    batch = (await asyncio.wait_for(waiting, 5)).lease
    assert grouped(batch) == {"domain=a": ["0.0", "0.1"], "domain=b": ["1.0"], "domain=c": ["1.1"]}


async def test_a_trajectory_without_a_grouping_key_is_refused(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["domain"]})
    sample = (await pool.lease()).leases[0].samples[0]
    with pytest.raises(InvalidArgumentError, match="lacks 'domain'") as refusal:
        await pool.put([scored(sample)])
    assert refusal.value.violations[0].field == "results[0].trajectories[0].metadata"
    assert (await pool.state()).leased == 4


READINESS = {
    "batch_size": (True, 4),
    "batch_size_reached": (True, 4),
    "loaded_batch_finished": (False, 8),
    "batch_size_and_loaded_batch_finished": (False, 4),
    "batch_size_reached_and_loaded_batch_finished": (False, 4),
}


@pytest.mark.guide("H5", "Q14")
@pytest.mark.parametrize("rule", READINESS)
async def test_a_batch_is_ready_by_the_rule_in_each_of_its_spellings(deploy: Deploy, rule: str) -> None:
    is_ready_early, size = READINESS[rule]
    pool = await deploy(
        trajectoryPool={"batchSize": 4, "groupSize": 2, "readiness": rule},
        weightSync={"mode": "batch-async", "stalenessThreshold": 1},
    )
    leases = (await pool.lease()).leases  # two batches' worth
    for lease in leases[:2]:
        await pool.put([scored(sample) for sample in lease.samples])
    early = await pool.lease_batch()
    assert early.HasField("lease") == is_ready_early
    for lease in leases[2:]:
        await pool.put([scored(sample) for sample in lease.samples])
    batch = (await pool.lease_batch()).lease
    assert sum(len(group.samples) for group in batch.groups) == size


@pytest.mark.guide("H7", "H8")
async def test_a_batch_is_leased_by_size_and_model_or_not_at_all(deploy: Deploy) -> None:
    pool = await deploy()
    assert not (await pool.lease_batch()).HasField("lease")
    waiting = asyncio.create_task(pool.lease_batch(batch_size=2, wait_seconds=30))
    lease = (await pool.lease(2)).leases[0]
    await pool.put([scored(sample) for sample in lease.samples])
    batch = (await asyncio.wait_for(waiting, 5)).lease
    assert sum(len(group.samples) for group in batch.groups) == 2
    with pytest.raises(NotFoundError, match="model_tag"):
        await pool.lease_batch(tag="other")
    with pytest.raises(InvalidArgumentError, match="batch_size: -1"):
        await pool.lease_batch(batch_size=-1)
    await pool.set_version(1)
    await pool.fill(1)
    assert (await pool.lease_batch(tag="")).lease.batch_id == 1


async def test_a_returned_batch_is_leased_next(deploy: Deploy) -> None:
    pool = await deploy()
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    request = pool_pb.ReturnBatchRequest(request_id="r", model_tag=TAG, batch_id=0, attempt=1)
    await call(pool.pool.ReturnBatch, request, timeout_seconds=CALL_SECONDS)
    again = (await pool.lease_batch()).lease
    assert (again.batch_id, again.attempt, again.groups) == (0, 2, batch.groups)
    with pytest.raises(LeaseLostError):
        await pool.put_train_batch(batch)


@pytest.mark.guide("H9", "H10", "A5", "S5")
async def test_the_pools_state_counts_samples_by_state_and_knows_when_it_is_empty(deploy: Deploy) -> None:
    pool = await deploy()
    assert (await pool.state()).empty
    lease = (await pool.lease(2)).leases[0]
    await pool.put([scored(lease.samples[0])])
    state = await pool.state()
    assert (state.model_tag, state.granted, state.leased, state.grouping) == (TAG, 2, 1, 1)
    assert not state.empty, "a partial group counts"
    await pool.put([scored(lease.samples[1])])
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    state = await pool.state()
    assert (state.batched, state.ready, state.credit, state.next_batch_id, state.empty) == (4, 0, 0, 1, False)
    await pool.put_train_batch(batch)
    assert (await pool.state()).empty
    everyone = pool_pb.GetTrajectoryPoolStateRequest()
    answer = await call(pool.pool.GetTrajectoryPoolState, everyone, timeout_seconds=CALL_SECONDS)
    assert [found.model_tag for found in answer.pools] == [TAG]


async def test_a_failed_sample_is_no_zero_reward_but_a_smaller_group(deploy: Deploy) -> None:
    pool = await deploy(rollout={"maxNewTokens": 8, "maxAttempts": 1})
    leases = (await pool.lease()).leases
    results = [scored(sample) for lease in leases for sample in lease.samples]
    results[0] = failed(leases[0].samples[0], pb.VERDICT_REWARD_ERROR)
    await pool.put(results)
    batch = (await pool.lease_batch()).lease
    assert sorted(len(group.samples) for group in batch.groups) == [1, 2]
    state = await pool.state()
    assert (dict(state.dropped), state.imbalance) == ({"reward_error": 1}, 0)


# train batches


@pytest.mark.guide("J1", "J2", "J3", "I8")
async def test_a_train_batch_is_kept_until_a_checkpoint_contains_it(deploy: Deploy) -> None:
    pool = await deploy()
    incarnation = (await pool.resume()).incarnation
    await pool.fill()
    stored = await pool.put_train_batch((await pool.lease_batch()).lease)
    assert (await pool.lease_train_batch(0, incarnation)).train_batch == stored
    await pool.ack(0, incarnation)
    depth = train_pb.GetTrainBatchPoolStateRequest(model_tag=TAG)
    state = await call(pool.train.GetTrainBatchPoolState, depth, timeout_seconds=CALL_SECONDS)
    assert (state.queued, state.trained, state.durable_steps) == (0, 1, 0)

    replacing = await pool.resume()
    assert (replacing.incarnation, replacing.replayed_steps) == (incarnation + 1, 1)
    with pytest.raises(LeaseLostError, match="a newer trainer"):
        await pool.lease_train_batch(0, incarnation)
    assert (await pool.lease_train_batch(0, replacing.incarnation)).train_batch == stored
    await pool.ack(0, replacing.incarnation)

    commit = train_pb.CommitCheckpointRequest(request_id="c", model_tag=TAG, steps=1, incarnation=replacing.incarnation)
    for _ in range(2):
        await call(pool.train.CommitCheckpoint, commit, timeout_seconds=CALL_SECONDS)
    with pytest.raises(FailedPreconditionError, match="a committed checkpoint contains it"):
        await pool.lease_train_batch(0, replacing.incarnation)
    state = await call(pool.train.GetTrainBatchPoolState, depth, timeout_seconds=CALL_SECONDS)
    assert (state.queued, state.trained, state.durable_steps) == (0, 0, 1)
    assert (await pool.state()).durable == 4


@pytest.mark.guide("J4", "D4")
async def test_the_end_of_the_data_reaches_those_who_wait_for_batches(deploy: Deploy) -> None:
    pool = await deploy(data=ONE_EPOCH)
    sizes = []
    for step in range(2):
        await pool.set_version(step)
        await pool.fill(step)
        batch = (await pool.lease_batch()).lease
        sizes.append(sum(len(group.samples) for group in batch.groups))
        waiting = asyncio.create_task(pool.lease_batch(wait_seconds=30)) if step else None
        await pool.put_train_batch(batch)
        await pool.ack(step)
    assert waiting is not None
    assert sizes == [4, 2]
    assert (await asyncio.wait_for(waiting, 5)).exhausted
    assert (await pool.lease_train_batch(2, wait_seconds=30)).exhausted


async def test_a_trainer_that_comes_after_the_workers_still_says_where_to_begin(deploy: Deploy) -> None:
    pool = await deploy(trainer={"steps": 20})
    early = await pool.lease()
    answer = await pool.resume(steps=7, data_cursor=5)
    assert answer.replayed_steps == 0
    results = [scored(s, trajectory(version=7)) for x in early.leases for s in x.samples]
    assert await pool.put(results) == ["FENCED"] * 4  # of tasks that the checkpoint has behind it
    assert [lease.task.task_id for lease in (await pool.lease()).leases] == ["train-5", "train-6"]
    assert (await pool.audit()).findings_total == 0


# validation


async def start_validation(pool: PoolClient, version: int) -> int:
    request = validator_pb.StartValidationRequest(request_id=new_request_id(), model_tag=TAG, policy_version=version)
    return (await call(pool.validator.StartValidation, request, timeout_seconds=CALL_SECONDS)).samples


async def wait_validation(
    pool: PoolClient, version: int, wait_seconds: float = 0
) -> validator_pb.WaitValidationResponse:
    request = validator_pb.WaitValidationRequest(model_tag=TAG, policy_version=version, wait_seconds=wait_seconds)
    return await call(pool.validator.WaitValidation, request, timeout_seconds=wait_seconds + CALL_SECONDS)


async def end_validation(pool: PoolClient, version: int) -> None:
    request = validator_pb.EndValidationRequest(request_id=new_request_id(), model_tag=TAG, policy_version=version)
    await call(pool.validator.EndValidation, request, timeout_seconds=CALL_SECONDS)


@pytest.mark.guide("D10", "D11", "D12", "G6", "G7", "K1", "K2", "K4", "R6")
async def test_a_round_grants_validation_samples_only_until_it_has_ended(deploy: Deploy) -> None:
    here, there = await deploy(validation=VALIDATION), await deploy(validation=VALIDATION)
    training = (await here.lease(2)).leases[0]
    assert await start_validation(here, 0) == 4
    assert await start_validation(there, 0) == 4  # the same round
    with pytest.raises(FailedPreconditionError, match="version 0 is being validated"):
        await start_validation(there, 1)
    waiting = asyncio.create_task(wait_validation(there, 0, wait_seconds=30))
    leases = (await here.lease()).leases
    assert {lease.purpose for lease in leases} == {pb.PURPOSE_VALIDATION}
    assert {lease.temperature for lease in leases} == {0.25}
    assert [len(lease.samples) for lease in leases] == [2, 2]
    assert not (await here.loader_state()).can_lease
    assert not (await wait_validation(here, 0)).complete
    assert await here.put([scored(sample) for sample in training.samples]) == ["ACCEPTED"] * 2, (
        "training goes on ending"
    )
    for lease in leases:
        assert await here.put([scored(s) for s in lease.samples], purpose=lease.purpose) == ["ACCEPTED"] * 2
    assert (await asyncio.wait_for(waiting, 5)).metrics["val/num_samples"] == 4
    blocked = asyncio.create_task(here.lease(wait_seconds=30))
    await end_validation(there, 0)
    await end_validation(there, 0)
    assert {lease.purpose for lease in (await asyncio.wait_for(blocked, 5)).leases} == {pb.PURPOSE_TRAINING}
    with pytest.raises(NotFoundError, match="policy_version: 0 is not being validated"):
        await wait_validation(here, 0)


@pytest.mark.guide("K3", "K5", "K7")
async def test_metrics_are_means_by_component_and_by_source_and_failures_are_counted(deploy: Deploy) -> None:
    pool = await deploy(validation=VALIDATION, rollout={"maxNewTokens": 8, "maxAttempts": 1})
    await start_validation(pool, 3)
    first, second = (await pool.lease()).leases
    results = [
        scored(first.samples[0], trajectory(1.0, data_source="sums")),
        scored(first.samples[1], trajectory(0.5, data_source="sums")),
        scored(second.samples[0], trajectory(0.0)),
        failed(second.samples[1]),
    ]
    await pool.put(results, purpose=pb.PURPOSE_VALIDATION)
    answer = await wait_validation(pool, 3)
    assert answer.complete
    assert dict(answer.metrics) == {
        "val/reward": 0.5,
        "val/exact": pytest.approx(1 / 3),
        "val/sums/reward": 0.75,
        "val/sums/exact": 0.5,
        "val/num_samples": 3,
        "val/num_failed": 1,
    }
    assert (await pool.state()).dropped == {}, "the training ledger has nothing of it"


@pytest.mark.guide("K6")
async def test_a_late_result_of_one_round_is_none_of_the_next(deploy: Deploy) -> None:
    pool = await deploy(validation=VALIDATION)
    await start_validation(pool, 0)
    late = (await pool.lease()).leases[0]
    await end_validation(pool, 0)
    assert (await pool.lease(2)).leases[0].purpose == pb.PURPOSE_TRAINING
    await start_validation(pool, 1)
    fresh = (await pool.lease()).leases[0]
    assert fresh.task == late.task, "the data starts again"
    assert await pool.put([scored(s) for s in late.samples], purpose=pb.PURPOSE_VALIDATION) == ["FENCED"] * 2
    assert await pool.put([scored(s) for s in fresh.samples], purpose=pb.PURPOSE_VALIDATION) == ["ACCEPTED"] * 2


@pytest.mark.guide("H2")
async def test_the_ledger_is_audited_over_the_wire(deploy: Deploy, redis: Redis, experiment_name: str) -> None:
    pool = await deploy()
    await pool.fill()
    balanced = await pool.audit()
    assert (balanced.samples["granted"], balanced.samples["ready"], balanced.findings_total) == (4, 4, 0)
    await redis.hincrby(key_prefix(experiment_name, TAG) + "meta", "ready", 1)
    wrong = await pool.audit()
    assert [finding.subject for finding in wrong.findings] == ["ready"]
    assert (await pool.state()).imbalance == -1


async def test_one_sample_is_found_and_all_are_listed_page_by_page(deploy: Deploy) -> None:
    pool = await deploy()
    (sample, *_) = await pool.fill()
    request = pool_pb.GetSampleRequest(model_tag=TAG, sample_id=sample)
    found = await call(pool.pool.GetSample, request, timeout_seconds=CALL_SECONDS)
    assert found.record.state == pool_pb.SAMPLE_STATE_PRODUCED
    assert not found.record.HasField("batch_id")
    assert found.result.sample_id == sample
    await pool.put_train_batch((await pool.lease_batch()).lease)
    found = await call(pool.pool.GetSample, request, timeout_seconds=CALL_SECONDS)
    assert (found.record.state, found.record.batch_id) == (pool_pb.SAMPLE_STATE_BATCHED, 0)
    assert not found.HasField("result")

    listed, token = [], ""
    while True:
        page = pool_pb.ListSamplesRequest(model_tag=TAG, page_size=2, page_token=token)
        answer = await call(pool.pool.ListSamples, page, timeout_seconds=CALL_SECONDS)
        listed += [record.sample_id for record in answer.records]
        if not (token := answer.next_page_token):
            break
    assert listed == ["0.0", "0.1", "1.0", "1.1"]
    for wrong, field in [
        (pool_pb.ListSamplesRequest(model_tag=TAG, page_token="x"), "page_token"),
        (pool_pb.ListSamplesRequest(model_tag=TAG, page_size=-1), "page_size"),
    ]:
        with pytest.raises(InvalidArgumentError, match=field):
            await call(pool.pool.ListSamples, wrong, timeout_seconds=CALL_SECONDS)


async def test_a_put_that_finds_the_pool_full_is_repeated_until_there_is_room(deploy: Deploy) -> None:
    pool = await deploy(
        trajectoryPool={"batchSize": 2, "groupSize": 2, "maxPayloadBytes": 2**20},
        weightSync={"mode": "batch-async", "stalenessThreshold": 1},
    )
    leases = (await pool.lease()).leases
    first, second = ([scored(sample, trajectory(text="x" * 500_000)) for sample in lease.samples] for lease in leases)
    assert await pool.put(first) == ["ACCEPTED"] * 2
    request = pool_pb.PutSamplesRequest(request_id="full", model_tag=TAG, results=second)
    with pytest.raises(ResourceExhaustedError, match=r"results: .* at most 1048576 may be"):
        await call(pool.pool.PutSamples, request, timeout_seconds=0.5)
    assert (await pool.state()).leased == 2
    waiting = asyncio.create_task(pool.put(second))
    await pool.put_train_batch((await pool.lease_batch()).lease)
    assert await waiting == ["ACCEPTED"] * 2


async def test_a_redis_smaller_than_the_experiment_allows_is_never_filled(tmp_path: Path, experiment_name: str) -> None:
    experiment = small_experiment(
        experiment_name,
        trajectoryPool={"batchSize": 8, "groupSize": 8},
        weightSync={"mode": "batch-async", "stalenessThreshold": 3},
    )
    with running_redis() as url:
        async with aclosing(await connect_redis(url)) as redis:
            await redis.config_set("maxmemory", "24mb")
        async with running_pool(tmp_path, url, experiment) as pool:
            samples = [sample for lease in (await pool.lease()).leases for sample in lease.samples]
            big = [scored(sample, trajectory(text="x" * 2**20)) for sample in samples]
            for result in big[:15]:
                assert await pool.put([result]) == ["ACCEPTED"]
            request = pool_pb.PutSamplesRequest(request_id="full", model_tag=TAG, results=[big[15]])
            with pytest.raises(ResourceExhaustedError, match="two thirds of Redis' maxmemory"):
                await call(pool.pool.PutSamples, request, timeout_seconds=0.5)
            await pool.put_train_batch((await pool.lease_batch()).lease)
            assert await pool.put([big[15]]) == ["ACCEPTED"]
