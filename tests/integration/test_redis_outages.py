"""What the ledger outlasts: restarts, torn files, servers that load, are full, or do not answer."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.exceptions import BusyLoadingError

from nexrl.errors import UnavailableError
from nexrl.local.append_only_file import make_whole
from nexrl.store import Redis, connect_redis, key_prefix, owner_key
from nexrl_trajectory_pool.ledger import Ledger
from tests.support.ledger import rules
from tests.support.ledger_run import ALWAYS, EVERY_SECOND, PROGRAMS, experiment_of_node, program, run_on
from tests.support.patience import eventually, eventually_blocking
from tests.support.redis_servers import (
    Server,
    running,
    running_cluster,
)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("options", "how"), [(ALWAYS, signal.SIGKILL), (EVERY_SECOND, signal.SIGTERM)], ids=["killed", "stopped"]
)
async def test_a_restart_in_the_middle_of_a_run_loses_nothing(
    name: str, options: tuple[str, ...], how: signal.Signals, redis_folder: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), redis_folder, *options)):
        async with run_on(server.url, experiment_name) as run:
            await run.begin()
            await run.go_on(1)
            await run.prepare(await run.batch())
            before = await run.ledger.state()
            server.end(how)
            asked = asyncio.create_task(run.ledger.state())  # while there is no server
            await asyncio.to_thread(server.start)
            assert await asked == before
            await run.go_on(3)
            await run.require_balance(3)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_files_that_lose_their_end_again_and_again_leave_a_ledger_in_balance(
    name: str, redis_folder: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), redis_folder, *EVERY_SECOND)):
        async with run_on(server.url, experiment_name) as run:
            for step in range(1, 8):
                await run.begin()
                await run.go_on(step)
                server.end()
                cut(redis_folder)
                make_whole(redis_folder)
                await asyncio.to_thread(server.start)
            await run.begin()
            await run.go_on(8)
            await run.require_balance(8)


def cut(redis_folder: Path) -> None:
    """Take the end off an append-only file, as the loss of a machine does."""
    file = next(file for file in redis_folder.rglob("*.aof") if ".base." not in file.name)
    os.truncate(file, max(0, file.stat().st_size - 2500))


def is_loading_after_restart(server: Server, delay_microseconds: int) -> bool:
    """Restart the server with a delay for each key. Returns whether it still loads when it is asked."""
    server.end(signal.SIGTERM)
    server.start("--key-load-delay", str(delay_microseconds))
    try:
        server.ask("GET", "other")
    except BusyLoadingError:
        return True
    return False


async def test_a_server_that_loads_its_data_is_waited_for(redis_folder: Path, experiment_name: str) -> None:
    with running(server := Server(program("redis-6.2"), redis_folder, *EVERY_SECOND)):
        async with run_on(server.url, experiment_name) as run:
            await run.begin()
            pipeline = run.redis.pipeline(transaction=False)
            for number in range(8_000):
                pipeline.set(f"other:{number}", "")
            await pipeline.execute()
            delays = (200 * 2**number for number in range(8))  # microseconds: on a busy machine it has loaded too soon
            await asyncio.to_thread(eventually_blocking, lambda: is_loading_after_restart(server, next(delays)))
            await run.go_on(1)
            await run.require_balance(1)


@pytest.mark.parametrize("name", ["redis-7", "valkey"])  # Redis 6.2 does not ask a script for replicas
@pytest.mark.parametrize(("setting", "code"), [("maxmemory", "OOM"), ("min-replicas-to-write", "NOREPLICAS")])
async def test_a_server_that_may_not_write_is_waited_for(
    name: str, setting: str, code: str, redis_folder: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), redis_folder)):
        async with run_on(server.url, experiment_name) as run:
            await run.begin()
            server.ask("CONFIG", "SET", setting, 1)
            going_on = asyncio.create_task(run.go_on(1))
            await asyncio.to_thread(
                eventually_blocking, lambda: f"errorstat_{code}" in server.ask("INFO", "errorstats")
            )
            server.ask("CONFIG", "SET", setting, 0)
            await going_on
            await run.require_balance(1)


async def test_a_node_of_a_cluster_that_restarts_is_waited_for(redis_folder: Path, experiment_name: str) -> None:
    with running_cluster(program("redis-6.2"), redis_folder, *ALWAYS) as nodes:
        async with run_on(f"redis+cluster://127.0.0.1:{nodes[0].port}", experiment_of_node(1, experiment_name)) as run:
            await run.begin()
            await run.go_on(1)
            nodes[1].end()
            asked = asyncio.create_task(run.ledger.audit())
            await asyncio.to_thread(
                eventually_blocking, lambda: b"cluster_state:fail" in nodes[0].ask("CLUSTER", "INFO")
            )
            await asyncio.to_thread(nodes[1].start)
            assert (await asked).findings == ()
            await run.go_on(3)
            await run.require_balance(3)


async def test_a_call_has_an_end(redis_folder: Path, experiment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.store.RETRY_SECONDS", 0.2)
    with running(server := Server(program("redis-6.2"), redis_folder)):
        await require_end(server.url, [server], experiment_name)


async def test_a_password_that_was_changed_is_named_with_what_to_do(
    redis_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl.store.RETRY_SECONDS", 0.2)
    monkeypatch.setenv("NEXRL_REDIS_PASSWORD", "old")
    with running(server := Server(program("redis-6.2"), redis_folder)):
        server.ask("ACL", "SETUSER", "nexrl", "on", "allkeys", "allchannels", "allcommands", ">old")
        url = server.url.replace("://", "://nexrl@")
        async with aclosing(await connect_redis(url)) as redis:
            server.ask("ACL", "SETUSER", "nexrl", "resetpass", ">new")
            server.ask("CLIENT", "KILL", "USER", "nexrl")
            with pytest.raises(UnavailableError, match=r"username.*; set .* NEXRL_REDIS_PASSWORD, then start again$"):
                await redis.ping()


async def test_a_call_of_a_cluster_has_an_end(
    redis_folder: Path, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl.store.RETRY_SECONDS", 0.2)
    with running_cluster(program("redis-6.2"), redis_folder) as nodes:
        await require_end(f"redis+cluster://127.0.0.1:{nodes[0].port}", nodes, experiment_name)


async def require_end(url: str, servers: Sequence[Server], experiment: str) -> None:
    """Raise unless calls fail with an error that says so when the servers are gone."""
    async with aclosing(await connect_redis(url)) as redis:
        ledger, pipeline = Ledger(redis, key_prefix(experiment, "model"), rules()), redis.pipeline(transaction=False)
        await ledger.state()
        for server in servers:
            server.end()
        pipeline.ttl(owner_key(experiment))
        for call in (ledger.state(), pipeline.execute()):
            with pytest.raises(UnavailableError, match=r"redis\.url: Redis is not available"):
                await call


async def test_a_call_in_flight_when_its_client_closes_leaves_no_connection_open(redis_url: str, redis: Redis) -> None:
    async def opened() -> dict[str, str]:
        return {each["id"]: each["cmd"] for each in await redis.client_list() if each["id"] not in before}

    async def has_sent() -> bool:
        return "blpop" in (await opened()).values()

    async def has_sent_again() -> bool:
        return await has_sent() and not (await opened()).keys() & sent.keys()

    async def is_closed() -> bool:
        return not await opened()

    before: dict[str, str] = {}
    before = await opened()
    client = await connect_redis(redis_url)
    waiting = asyncio.ensure_future(client.blpop(["closing"], timeout=5))
    await eventually(has_sent)
    sent = await opened()
    await client.aclose()
    await eventually(has_sent_again)
    await redis.rpush("closing", "element")
    assert await waiting is not None
    await eventually(is_closed)
