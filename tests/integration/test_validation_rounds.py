"""Validation rounds over gRPC and a real Redis."""

import asyncio

import pytest

from nexrl.errors import (
    FailedPreconditionError,
    NotFoundError,
)
from nexrl.rpc.client import call, new_request_id
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.pool import (
    TAG,
    UNTIL_WOKEN_SECONDS,
    Deploy,
    PoolClient,
    failed,
    scored,
    trajectory,
)

VALIDATION = {"data": {"type": "mock", "size": 2, "seed": 5}, "samplesPerTask": 2, "temperature": 0.25}


async def start_validation(pool: PoolClient, version: int) -> int:
    request = validator_pb.StartValidationRequest(request_id=new_request_id(), model_tag=TAG, policy_version=version)
    return (await call(pool.validator.StartValidation, request, timeout_seconds=LIMIT_SECONDS)).samples


async def wait_validation(
    pool: PoolClient, version: int, wait_seconds: float = 0
) -> validator_pb.WaitValidationResponse:
    request = validator_pb.WaitValidationRequest(model_tag=TAG, policy_version=version, wait_seconds=wait_seconds)
    return await call(pool.validator.WaitValidation, request, timeout_seconds=wait_seconds + LIMIT_SECONDS)


async def end_validation(pool: PoolClient, version: int) -> None:
    request = validator_pb.EndValidationRequest(request_id=new_request_id(), model_tag=TAG, policy_version=version)
    await call(pool.validator.EndValidation, request, timeout_seconds=LIMIT_SECONDS)


@pytest.mark.guide("D10", "D11", "D12", "G6", "G7", "K1", "K2", "K4", "R6", "Q39")
async def test_a_round_grants_validation_samples_only_until_it_has_ended(deploy: Deploy) -> None:
    here, there = await deploy(validation=VALIDATION), await deploy(validation=VALIDATION)
    training = (await here.lease(2)).leases[0]
    assert await start_validation(here, 0) == 4
    assert await start_validation(there, 0) == 4  # the same round
    with pytest.raises(FailedPreconditionError, match="version 0 is being validated"):
        await start_validation(there, 1)
    waiting = asyncio.create_task(wait_validation(there, 0, wait_seconds=UNTIL_WOKEN_SECONDS))
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
    assert (await finished(waiting, "the waiting call is woken")).metrics["val/num_samples"] == 4
    await end_validation(there, 0)
    await end_validation(there, 0)
    assert {lease.purpose for lease in (await here.lease()).leases} == {pb.PURPOSE_TRAINING}
    with pytest.raises(NotFoundError, match="policy_version: 0 is not being validated"):
        await wait_validation(here, 0)


async def test_a_request_for_tasks_that_waits_is_woken_when_the_round_ends(deploy: Deploy) -> None:
    here, there = await deploy(validation=VALIDATION), await deploy(validation=VALIDATION)
    await start_validation(here, 0)
    assert len((await here.lease()).leases) == 2
    waiting = asyncio.create_task(here.lease(wait_seconds=UNTIL_WOKEN_SECONDS))
    # speed: on a slow machine it may not wait yet, and is granted without being woken
    assert not (await asyncio.wait([waiting], timeout=0.2))[0]
    await end_validation(there, 0)
    assert {lease.purpose for lease in (await finished(waiting, "training goes on")).leases} == {pb.PURPOSE_TRAINING}


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


async def test_the_samples_of_a_round_can_be_counted_listed_and_read_until_it_has_ended(deploy: Deploy) -> None:
    pool = await deploy(validation=VALIDATION, rollout={"maxNewTokens": 8, "maxAttempts": 1})
    await pool.fill()  # training samples, which have the same ids
    await start_validation(pool, 0)
    first, second = (await pool.lease()).leases
    results = [scored(first.samples[0], trajectory(0.5)), *map(failed, second.samples)]
    await pool.put(results, purpose=pb.PURPOSE_VALIDATION)
    counted = pool_pb.GetTrajectoryPoolStateRequest(model_tag=TAG, purpose=pb.PURPOSE_VALIDATION)
    (state,) = (await call(pool.pool.GetTrajectoryPoolState, counted, timeout_seconds=LIMIT_SECONDS)).pools
    assert (state.granted, state.leased, dict(state.dropped)) == (4, 1, {"env_error": 2})
    listing = pool_pb.ListSamplesRequest(model_tag=TAG, purpose=pb.PURPOSE_VALIDATION)
    records = (await call(pool.pool.ListSamples, listing, timeout_seconds=LIMIT_SECONDS)).records
    assert [(record.sample_id, record.state) for record in records] == [
        (first.samples[0].sample_id, pool_pb.SAMPLE_STATE_PRODUCED),
        (first.samples[1].sample_id, pool_pb.SAMPLE_STATE_LEASED),
    ]
    reading = pool_pb.GetSampleRequest(model_tag=TAG, sample_id=records[0].sample_id, purpose=pb.PURPOSE_VALIDATION)
    found = await call(pool.pool.GetSample, reading, timeout_seconds=LIMIT_SECONDS)
    assert found.result.trajectories[0].reward == 0.5
    await end_validation(pool, 0)
    assert not (await call(pool.pool.ListSamples, listing, timeout_seconds=LIMIT_SECONDS)).records
