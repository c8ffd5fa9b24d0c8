"""Uses a ledger on a Redis server that the test starts: the server programs, and a run from grant to checkpoint."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from redis.crc import key_slot

from nexrl.store import Redis, connect_redis, key_prefix
from nexrl_trajectory_pool.ledger import GrantedBatch, Ledger
from nexrl_trajectory_pool.wakeups import WakeUps
from tests.support.ledger import fill_batch, rules
from tests.support.redis_servers import (
    CLUSTER_NODES,
    SLOTS,
    Program,
    find_program,
)

PROGRAMS = ("redis-6.2", "redis-7", "valkey")
PASSWORD = "in-no-file"
EVERY_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def program(name: str) -> Program:
    """Return the server program of that name. Skips the test if it is not installed."""
    found = find_program(name)
    if found is None:
        pytest.skip(f"no {name} on this machine; `make redis-servers` fetches it")
    return found


class LedgerRun:
    """A ledger in use. This class acts as the worker, the algorithm processor and the trainer."""

    def __init__(self, redis: Redis, experiment: str) -> None:
        self.redis = redis
        self.now = 1_000_000.0
        prefix = key_prefix(experiment, "model")
        self.ledger = Ledger(redis, prefix, rules(max_attempts=100), lambda: self.now)
        self.wakeups = WakeUps(redis, [self.ledger.wake_channel])
        self.incarnation = 0

    async def begin(self) -> None:
        """Resume the trainer from the newest checkpoint that the ledger knows. All older leases have expired.

        Redis may have lost the newest version: without it there is no credit for the next batch, so it is set again.
        """
        self.now += 1000
        durable_steps = (await self.ledger.state())["durable_steps"]
        self.incarnation, _ = await self.ledger.resume("", durable_steps, 0)
        await self.ledger.set_version(durable_steps)

    async def batch(self) -> GrantedBatch:
        """Return the next batch. The call waits before the batch exists, which tests the wake-up."""

        async def lease() -> tuple[GrantedBatch | None, bool]:
            found, _ = await self.ledger.lease_batch("", 60, worker="processor")
            return found, found is not None

        waiting = asyncio.create_task(self.wakeups.until("batch", lease, 30))
        await fill_batch(self.ledger, (await self.ledger.state())["version"])
        batch = await waiting
        assert batch is not None
        return batch

    async def prepare(self, batch: GrantedBatch) -> None:
        """Put the batch's train batch. Its payload is the list of its sample ids."""
        ids = " ".join(batch.sample_ids).encode()
        await self.ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, ids)

    async def train(self, step: int) -> None:
        """Make a step whose train batch exists, commit a checkpoint, and publish the new version."""
        payload, _ = await self.ledger.lease_train_batch(step, self.incarnation)
        assert payload is not None
        await self.ledger.ack_train_batch(step, self.incarnation, payload.decode().split())
        await self.ledger.commit_checkpoint(step + 1, self.incarnation)
        await self.ledger.set_version(step + 1)

    async def go_on(self, steps: int) -> None:
        """Make all steps until `steps` are trained."""
        for step in range((await self.ledger.state())["trained_steps"], steps):
            if (await self.ledger.lease_train_batch(step, self.incarnation))[0] is None:
                await self.prepare(await self.batch())
            await self.train(step)

    async def require_balance(self, steps: int) -> None:
        """Raise unless the ledger balances and exactly `steps` steps were trained."""
        assert (await self.ledger.audit()).findings == ()
        state = await self.ledger.state()
        assert (state["trained_steps"], state["trained"], state.imbalance) == (steps, 4 * steps, 0)


@asynccontextmanager
async def run_on(url: str, experiment: str) -> AsyncIterator[LedgerRun]:
    """Start a run, and wait until its wake-ups arrive."""
    async with aclosing(await connect_redis(url)) as redis:
        run = LedgerRun(redis, experiment)
        listening = asyncio.create_task(run.wakeups.listen())
        try:
            await hear(run.wakeups, redis, run.ledger.wake_channel)
            yield run
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def hear(wakeups: WakeUps, redis: Redis, channel: str) -> None:
    """Return when published messages arrive. The subscription alone may cause a second look, but not a third."""
    looks = 0

    async def look() -> tuple[None, bool]:
        nonlocal looks
        looks += 1
        await redis.publish(channel, "looked")
        return None, looks == 3

    await wakeups.until("looked", look, 30)
    assert looks == 3


async def journey(url: str, experiment: str) -> None:
    """Make two steps, from the first grant to the checkpoint that contains them."""
    async with run_on(url, experiment) as run:
        await run.begin()
        await run.go_on(2)
        await run.require_balance(2)


def experiment_of_node(number: int, name: str) -> str:
    """Return an experiment name whose ledger is on node `number` of a cluster."""

    def node(experiment: str) -> int:
        return key_slot(key_prefix(experiment, "model").encode()) * CLUSTER_NODES // SLOTS

    return next(found for suffix in itertools.count() if node(found := f"{name}-{suffix}") == number)
