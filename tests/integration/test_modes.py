"""The modes of weight sync at the pool: how far rollouts may run ahead, and what bounds staleness."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import PoolClient, running_pool
from tests.support.services import small_experiment

BATCH_SIZE = 4
STEPS = 4

Deploy = Callable[..., Awaitable[PoolClient]]


@pytest.fixture
async def deploy(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Deploy]:
    """Starts a pool of STEPS batches of BATCH_SIZE samples; in the asynchronous modes, stalenessThreshold is 1."""
    async with AsyncExitStack() as stack:

        async def start(mode: str, algorithm: str = "grpo", **trajectory_pool: Any) -> PoolClient:
            experiment = small_experiment(
                experiment_name,
                weightSync={"mode": mode},
                algorithm={"type": algorithm},
                trainer={"steps": STEPS},
                trajectoryPool={"batchSize": BATCH_SIZE, "groupSize": 2, **trajectory_pool},
            )
            return await stack.enter_async_context(running_pool(tmp_path, redis_url, experiment))

        yield start


async def train_one(pool: PoolClient, step: int) -> None:
    """Batch, train, acknowledge and commit one step."""
    batch = await pool.lease_batch()
    assert batch.lease.batch_id == step
    await pool.put_train_batch(batch.lease)
    await pool.ack(step)
    await pool.set_version(step + 1)


@pytest.mark.guide("L2", "L13", "L14", "L15", "Q26")
@pytest.mark.parametrize(("mode", "batches"), [("sync", 1), ("batch-async", 2), ("fully-async", STEPS)])
async def test_the_mode_says_how_many_batches_are_granted_before_a_worker_waits(
    deploy: Deploy, mode: str, batches: int
) -> None:
    pool = await deploy(mode)
    granted = await pool.fill()
    assert len(granted) == batches * BATCH_SIZE
    assert (await pool.lease()).waiting_on == "credit"


@pytest.mark.guide("L14")
async def test_in_mode_fully_async_staleness_is_bounded_by_dropping(deploy: Deploy) -> None:
    pool = await deploy("fully-async")
    await pool.fill(version=0)
    for step in range(2):
        await train_one(pool, step)
    assert not (await pool.lease_batch()).HasField("lease")  # version 0 is two steps older than batch 2
    assert (await pool.state()).dropped["stale"] == 2 * BATCH_SIZE
    assert len(await pool.fill(version=2)) == 2 * BATCH_SIZE  # granted again
    for step in range(2, STEPS):
        await train_one(pool, step)
    state = await pool.state()
    assert (state.trained, state.dropped["stale"]) == (STEPS * BATCH_SIZE, 2 * BATCH_SIZE)
    assert not (await pool.audit()).findings


@pytest.mark.guide("L15")
async def test_in_mode_batch_async_the_credit_bounds_staleness_and_nothing_is_dropped(deploy: Deploy) -> None:
    pool = await deploy("batch-async")
    for step in range(STEPS):
        await pool.fill(version=step)
        await train_one(pool, step)
    assert (await pool.state()).dropped["stale"] == 0


async def test_a_batch_of_all_that_was_granted_is_bounded_in_mode_fully_async_too(deploy: Deploy) -> None:
    pool = await deploy("fully-async", readiness="loaded_batch_finished")
    assert len(await pool.fill()) == 2 * BATCH_SIZE
    assert len((await pool.lease_batch()).lease.groups) == 2 * BATCH_SIZE / 2


@pytest.mark.parametrize(("key_list", "batches"), [(["domain"], 2), (["task_id", "domain"], STEPS), ([], STEPS)])
async def test_groups_that_span_tasks_are_bounded_in_mode_fully_async_too(
    deploy: Deploy, key_list: list[str], batches: int
) -> None:
    pool = await deploy("fully-async", algorithm="mock", keyList=key_list)
    granted = 0
    while leases := (await pool.lease()).leases:
        granted += sum(len(lease.samples) for lease in leases)
    assert granted == batches * BATCH_SIZE
