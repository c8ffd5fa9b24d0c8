"""Hundreds of clients that wait: each wake-up is for as many as it can serve, and costs no look of all the others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from nexrl.rpc.client import call, new_request_id
from nexrl.store import Redis, connect_redis
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import SampleLease
from nexrl_trajectory_pool import pool as pool_module
from nexrl_trajectory_pool import server as pool_server
from nexrl_trajectory_pool import wakeups
from nexrl_trajectory_pool.wakeups import WakeUps
from tests.support.patience import LIMIT_SECONDS, eventually, finished
from tests.support.pool import TAG, UNTIL_WOKEN_SECONDS, PoolClient, running_pool, scored
from tests.support.services import small_experiment

Deploy = Callable[..., Awaitable[PoolClient]]
Waiting = asyncio.Task[pb.LeaseTasksResponse]
CLIENTS = 300
CALLS_OF_OTHERS = 60
"""More calls than serve the client that is woken; far fewer than CLIENTS. The pool's own loops make none here."""


@pytest.fixture(autouse=True)
def _only_calls_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the pool's own loops, which call the ledger about three times a second: some tests count its calls."""
    monkeypatch.setattr(pool_server, "METRICS_SECONDS", 3600.0)
    monkeypatch.setattr(pool_module, "MAX_SLEEP_SECONDS", 3600.0)


@pytest.fixture
async def deploy(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Deploy]:
    """Starts one more process of the same pool; sections of the experiment as keywords."""
    async with AsyncExitStack() as stack:

        async def start(**sections: Any) -> PoolClient:
            experiment = small_experiment(experiment_name, **sections)
            return await stack.enter_async_context(running_pool(tmp_path, redis_url, experiment))

        yield start


async def count(redis: Redis, command: str) -> int:
    """How often the server has run a command so far."""
    return int((await redis.info("commandstats")).get(f"cmdstat_{command}", {}).get("calls", 0))


async def at_least(redis: Redis, command: str, number: int) -> None:
    """Return when the server has run a command so often."""

    async def is_enough() -> bool:
        return await count(redis, command) >= number

    await eventually(is_enough, f"the server has run {command} {number} times")


async def waiting(redis: Redis, number: int, *pools: PoolClient) -> list[Waiting]:
    """`number` clients of each pool that have looked for a task and found none."""
    before = await count(redis, "evalsha")
    calls = [
        asyncio.create_task(pool.lease(2, wait_seconds=UNTIL_WOKEN_SECONDS)) for _ in range(number) for pool in pools
    ]
    await at_least(redis, "evalsha", before + len(calls))
    return calls


async def end(calls: list[Waiting]) -> None:
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)


async def give_back(pool: PoolClient, samples: list[SampleLease]) -> None:
    request = pb.ReturnSamplesRequest(request_id=new_request_id(), model_tag=TAG, samples=samples)
    await call(pool.loader.ReturnSamples, request, timeout_seconds=LIMIT_SECONDS)


async def lease_all(pool: PoolClient) -> list[SampleLease]:
    held: list[SampleLease] = []
    while leases := (await pool.lease()).leases:
        held += [sample for lease in leases for sample in lease.samples]
    return held


async def test_one_sample_wakes_one_of_hundreds_for_a_few_calls_of_the_ledger(deploy: Deploy, redis: Redis) -> None:
    pool = await deploy()
    held = await lease_all(pool)
    calls = await waiting(redis, CLIENTS, pool)
    before = await count(redis, "evalsha")
    await give_back(pool, held[:1])
    (woken,), others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [s.sample_id for lease in woken.result().leases for s in lease.samples] == [held[0].sample_id]
    assert (await pool.state()).leased == len(held)
    assert await count(redis, "evalsha") - before < CALLS_OF_OTHERS
    assert not any(each.done() for each in others)
    await end(calls)


async def test_a_version_wakes_as_many_as_its_credit_serves_at_all_processes(deploy: Deploy, redis: Redis) -> None:
    here, there = await deploy(), await deploy()
    await lease_all(here)
    calls = await waiting(redis, 50, here, there)
    before = await count(redis, "evalsha")
    await here.set_version(1)  # a batch more: two tasks of two samples
    answers = asyncio.as_completed(calls, timeout=LIMIT_SECONDS)
    woken = [await next(answers), await next(answers)]
    assert [len(answer.leases[0].samples) for answer in woken] == [2, 2]
    assert await count(redis, "evalsha") - before < CALLS_OF_OTHERS
    await end(calls)


async def test_the_end_of_the_data_reaches_all_who_wait(deploy: Deploy, redis: Redis) -> None:
    data = {"type": "mock", "size": 2, "shuffle": False, "epochs": 1}
    here, there = await deploy(data=data), await deploy(data=data)
    held = await lease_all(here)
    calls = await waiting(redis, 50, here, there)
    await here.put([scored(sample) for sample in held])
    answers = await finished(asyncio.gather(*calls), "all are told")
    assert all(answer.exhausted and not answer.leases for answer in answers)


async def test_a_client_that_hangs_up_leaves_its_turn_to_the_next(deploy: Deploy, redis: Redis) -> None:
    pool = await deploy()
    held = await lease_all(pool)
    ended = cancelled_leases()
    gone = await waiting(redis, 10, pool)
    (next_in_line,) = await waiting(redis, 1, pool)
    await end(gone)
    await eventually(lambda: cancelled_leases() == ended + len(gone))
    await give_back(pool, held[:1])
    assert len((await finished(next_in_line, "the next in line is served")).leases) == 1


def cancelled_leases() -> float:
    labels = {"grpc_service": "nexrl.v1.DataLoaderService", "grpc_method": "LeaseTasks", "grpc_code": "CANCELLED"}
    return REGISTRY.get_sample_value("grpc_server_handled_total", labels) or 0.0


async def test_a_small_batch_does_not_wait_behind_a_large_one(deploy: Deploy, redis: Redis) -> None:
    pool = await deploy()
    held = await lease_all(pool)
    before = await count(redis, "evalsha")
    large = asyncio.create_task(pool.lease_batch(batch_size=4, wait_seconds=UNTIL_WOKEN_SECONDS))
    await at_least(redis, "evalsha", before + 1)
    small = asyncio.create_task(pool.lease_batch(batch_size=2, wait_seconds=UNTIL_WOKEN_SECONDS))
    await at_least(redis, "evalsha", before + 2)
    await pool.put([scored(sample) for sample in held[:2]])
    batch = (await finished(small, "the small batch is served")).lease
    assert [sample.sample_id for group in batch.groups for sample in group.samples] == ["0.0", "0.1"]
    assert not large.done()
    large.cancel()
    await asyncio.wait([large])


# wake-ups, and a Redis that sends none any more


class Relay:
    """Stands between a client and a Redis, and can fall silent without closing what is connected."""

    def __init__(self, path: Path, server: str) -> None:
        self.url = f"unix://{path}"
        self._path = path
        self._server = server.removeprefix("unix://")
        self._silent: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        async with await asyncio.start_unix_server(self._serve, self._path):
            yield self
            for writer in self._open:
                writer.close()

    def fall_silent(self) -> None:
        """Forward nothing more on the open connections. New connections work."""
        self._silent |= self._open

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._server)
        self._open |= {writer, server_writer}
        await asyncio.gather(self._pass_on(reader, server_writer), self._pass_on(server_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while received := await reader.read(2**16):
                if writer not in self._silent:
                    writer.write(received)
        writer.close()


@contextlib.asynccontextmanager
async def listening(url: str, channel: str) -> AsyncIterator[WakeUps]:
    """Wake-ups of one channel, with the task that listens for them."""
    redis = await connect_redis(url)
    subscribed = await count(redis, "subscribe")
    told = WakeUps(redis, [channel])
    listener = asyncio.create_task(told.listen())
    try:
        await at_least(redis, "subscribe", subscribed + 1)
        yield told
    finally:
        listener.cancel()
        await asyncio.wait([listener])
        await redis.aclose()


async def test_a_redis_that_vanished_without_a_word_is_noticed_and_all_look_again(
    tmp_path: Path, redis: Redis, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "SILENCE_SECONDS", 0.1)
    stock = looks = 0

    async def take() -> tuple[bool, bool]:
        nonlocal stock, looks
        looks += 1
        stock -= (taken := stock > 0)
        return taken, taken

    relay = Relay(tmp_path / "relay.sock", redis_url)
    async with relay.running(), listening(relay.url, experiment_name) as told:
        waits = [asyncio.create_task(told.until("tasks", take, UNTIL_WOKEN_SECONDS)) for _ in range(3)]
        await eventually(lambda: looks >= len(waits))
        relay.fall_silent()
        stock = 3
        await redis.publish(experiment_name, "tasks")  # which reaches nobody
        assert await finished(asyncio.gather(*waits), "all look again") == [True] * 3


async def test_a_connection_on_which_nothing_happens_is_kept(
    redis: Redis, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "SILENCE_SECONDS", 1.0)
    async with listening(redis_url, experiment_name):
        subscribed, asked = await count(redis, "subscribe"), await count(redis, "ping")
        await at_least(redis, "ping", asked + 3)
        assert await count(redis, "subscribe") == subscribed
