"""The data loader over gRPC and a real Redis; two processes over one Redis."""

import asyncio
import json

import pytest

from nexrl.errors import (
    InvalidArgumentError,
    NotFoundError,
)
from nexrl.rpc.client import call, new_request_id
from nexrl.store import Redis
from nexrl.v1 import data_loader_service_pb2 as loader_pb
from nexrl.v1 import trajectory_pb2 as pb
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.pool import (
    TAG,
    UNTIL_WOKEN_SECONDS,
    Deploy,
    PoolClient,
    failed,
    samples_of,
    scored,
)

VALIDATION = {"data": {"type": "mock", "size": 2, "seed": 5}, "samplesPerTask": 2, "temperature": 0.25}
ONE_EPOCH = {"type": "mock", "size": 3, "shuffle": False, "epochs": 1}


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


@pytest.mark.guide("E2", "E5")
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
    task = (await call(pool.loader.GetTask, request, timeout_seconds=LIMIT_SECONDS)).task
    assert task.task_id == "train-2"
    request.index = 8
    with pytest.raises(NotFoundError, match="index: 8; 0 to 7"):
        await call(pool.loader.GetTask, request, timeout_seconds=LIMIT_SECONDS)


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
    await call(pool.loader.ResetDataLoader, request, timeout_seconds=LIMIT_SECONDS)
    assert (await pool.loader_state()).remaining == 3
    again = await pool.lease(2)
    assert again.leases[0].task == first.leases[0].task
    assert await pool.put([scored(sample) for sample in first.leases[0].samples]) == ["ACCEPTED"] * 2


async def add(pool: PoolClient, position: "loader_pb.TaskPosition.ValueType", task: pb.Task) -> None:
    request = loader_pb.AddTaskRequest(request_id=new_request_id(), model_tag=TAG, task=task, position=position)
    await call(pool.loader.AddTask, request, timeout_seconds=LIMIT_SECONDS)


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
        (pb.Task(task_id="x", item_json='{"answer": "4"}'), "task.item_json: must be an object with the text 'prompt'"),
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
    assert not (await call(pool.loader.RenewLeases, renewal, timeout_seconds=LIMIT_SECONDS)).lost_sample_ids
    request = loader_pb.ReturnSamplesRequest(
        request_id=new_request_id(), model_tag=TAG, samples=held, purpose=pb.PURPOSE_TRAINING
    )
    for _ in range(2):  # a repeated request gets the first answer
        assert (await call(pool.loader.ReturnSamples, request, timeout_seconds=LIMIT_SECONDS)).returned == 2
    assert list((await call(pool.loader.RenewLeases, renewal, timeout_seconds=LIMIT_SECONDS)).lost_sample_ids) == [
        "0.0",
        "0.1",
    ]
    assert sorted(samples_of(await pool.lease(2))) == ["0.0", "0.1"]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
async def test_a_lease_of_an_impossible_length_is_refused(deploy: Deploy, seconds: float) -> None:
    pool = await deploy()
    request = loader_pb.LeaseTasksRequest(request_id="r", model_tag=TAG, max_samples=1, lease_seconds=seconds)
    with pytest.raises(InvalidArgumentError, match="lease_seconds"):
        await call(pool.loader.LeaseTasks, request, timeout_seconds=LIMIT_SECONDS)


async def test_a_lease_of_nothing_and_of_an_unknown_model_are_refused(deploy: Deploy) -> None:
    pool = await deploy()
    with pytest.raises(InvalidArgumentError, match="max_samples: 4097; 1 to 4096"):
        await pool.lease(4097)
    with pytest.raises(InvalidArgumentError, match="max_samples: 0"):
        await pool.lease(0)
    with pytest.raises(NotFoundError, match=r"model_tag: 'other'; this experiment trains \['default'\]"):
        await pool.lease(tag="other")


async def test_a_short_lease_that_runs_out_is_granted_to_one_who_waits(deploy: Deploy) -> None:
    pool = await deploy()
    request = loader_pb.LeaseTasksRequest(request_id="r", model_tag=TAG, max_samples=64, lease_seconds=0.2)
    await call(pool.loader.LeaseTasks, request, timeout_seconds=LIMIT_SECONDS)
    again = await pool.lease(wait_seconds=20)
    assert {sample.attempt for lease in again.leases for sample in lease.samples} == {2}


@pytest.mark.guide("H13", "H14", "H11", "L13")
async def test_a_lease_that_waits_is_woken_by_a_commit_at_another_process(deploy: Deploy) -> None:
    here, there = await deploy(), await deploy()
    await here.lease()
    waiting = asyncio.create_task(here.lease(wait_seconds=UNTIL_WOKEN_SECONDS))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    assert await there.set_version(1) == 1
    assert samples_of(await finished(waiting, "the waiting call is woken")) == ["2.0", "2.1", "3.0", "3.1"]


@pytest.mark.guide("H7", "I7", "J14", "P2")
async def test_a_batch_and_a_train_batch_that_are_waited_for_arrive_from_another_process(deploy: Deploy) -> None:
    here, there = await deploy(), await deploy()
    batch = asyncio.create_task(here.lease_batch(wait_seconds=UNTIL_WOKEN_SECONDS))
    train_batch = asyncio.create_task(here.lease_train_batch(0, wait_seconds=UNTIL_WOKEN_SECONDS))
    await there.fill()
    lease = (await finished(batch, "the batch arrives")).lease
    stored = await there.put_train_batch(lease)
    assert (await finished(train_batch, "the train batch arrives")).train_batch == stored


async def test_a_waiter_looks_again_when_the_wake_ups_were_cut_off(deploy: Deploy, redis: Redis) -> None:
    here, there = await deploy(), await deploy()
    await here.lease()
    waiting = asyncio.create_task(here.lease(wait_seconds=UNTIL_WOKEN_SECONDS))
    await asyncio.wait([waiting], timeout=0.2)
    assert await redis.client_kill_filter(_type="pubsub")  # so no process is notified of the version
    await there.set_version(1)
    assert len(samples_of(await finished(waiting, "the waiting call is woken"))) == 4


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


@pytest.mark.guide("L3", "L15", "Q27")
async def test_workers_run_ahead_by_the_staleness_that_the_experiment_allows(deploy: Deploy) -> None:
    pool = await deploy(weightSync={"mode": "batch-async", "stalenessThreshold": 2})
    assert len(samples_of(await pool.lease())) == 12
    waiting = await pool.lease()
    assert (samples_of(waiting), waiting.waiting_on) == ([], "credit")
    await pool.set_version(1)
    assert len(samples_of(await pool.lease())) == 4


@pytest.mark.guide("Q30")
async def test_the_experiments_tag_is_the_one_that_is_served(deploy: Deploy) -> None:
    model = {"scratch": {"alphabet": "0123456789", "hiddenSize": 16, "layers": 1, "heads": 2, "maxPositions": 32}}
    pool = await deploy(model={**model, "tag": "policy"})
    assert len(samples_of(await pool.lease(2, tag="policy"))) == 2
    with pytest.raises(NotFoundError, match=r"model_tag: 'default'; this experiment trains \['policy'\]"):
        await pool.lease(2)
