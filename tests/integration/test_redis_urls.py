"""What is said of a Redis that cannot be used: a wrong URL, a refused user, a server that would delete samples."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.store import START_SECONDS, connect_redis
from tests.support.ledger_run import PASSWORD, program
from tests.support.redis_servers import (
    Server,
    free_cluster_ports,
    running,
)


async def test_who_is_not_let_in_is_told_why(redis_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(server := Server(program("redis-6.2"), redis_folder)):
        server.ask("ACL", "SETUSER", "nexrl", "on", f">{PASSWORD}", "~nexrl:*", "+@all", "-info")
        with pytest.raises(FailedPreconditionError, match="NEXRL_REDIS_PASSWORD"):
            await connect_redis(f"unix://nexrl:{PASSWORD}-@{server.socket}")
        monkeypatch.setenv("NEXRL_REDIS_PASSWORD", PASSWORD)
        with pytest.raises(FailedPreconditionError, match=r"'info' command.*; docs/how-to/redis\.md"):
            await connect_redis(f"unix://nexrl@{server.socket}")


async def test_a_server_that_would_delete_samples_when_it_is_full_is_refused(redis_folder: Path) -> None:
    with running(server := Server(program("redis-6.2"), redis_folder, "--maxmemory-policy", "allkeys-lru")):
        async with aclosing(await connect_redis(server.url)):  # it never is
            server.ask("CONFIG", "SET", "maxmemory", "100mb")
        with pytest.raises(FailedPreconditionError, match="set it to noeviction"):
            await connect_redis(server.url)


async def test_a_cluster_and_a_server_are_not_mistaken_for_each_other(redis_folder: Path) -> None:
    found, ports = program("redis-6.2"), free_cluster_ports(2)
    node = Server(found, redis_folder / "node", "--cluster-enabled", "yes", port=ports[0])
    server = Server(found, redis_folder / "server", port=ports[1])
    with running(node, server):
        with pytest.raises(InvalidArgumentError, match=r"redis\+cluster"):
            await connect_redis(node.url)
        with pytest.raises(InvalidArgumentError, match="redis:// or rediss://"):
            await connect_redis(f"redis+cluster://127.0.0.1:{server.port}")


@pytest.mark.parametrize(
    "url", ["http://localhost", "redis://localhost:x", "redis+cluster://localhost/1", "redis://localhost?ssl_ca_cert=x"]
)
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"redis\.url: .*allowed: redis://"):
        await connect_redis(url)


@pytest.mark.parametrize("url", [f"redis://nexrl:{PASSWORD}@127.0.0.1:1", f"redis://127.0.0.1:1?password={PASSWORD}"])
async def test_no_message_repeats_a_password(url: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        await connect_redis(url)
    assert PASSWORD not in str(caught.value)


async def test_a_service_that_starts_waits_for_a_server_that_starts(redis_folder: Path) -> None:
    server = Server(program("redis-6.2"), redis_folder)
    connecting = asyncio.create_task(connect_redis(server.url, wait_seconds=START_SECONDS))
    await asyncio.sleep(0.5)  # it has found nobody, more than once
    with running(server):
        async with aclosing(await connecting) as redis:
            assert await redis.ping()


async def test_a_connection_is_closed_by_a_task_that_is_cancelled_while_it_closes_it(redis_folder: Path) -> None:
    with running(server := Server(program("redis-6.2"), redis_folder)):
        redis = await connect_redis(server.url)
        await redis.ping()
        closing = asyncio.create_task(redis.aclose())
        await asyncio.sleep(0)  # it waits for its connections
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        assert not any(each.is_connected for each in redis.connection_pool._available_connections)
