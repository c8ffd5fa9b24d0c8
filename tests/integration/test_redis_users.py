"""Experiments that share a Redis: each has a user who runs its whole ledger, and reaches nothing of the others."""

import asyncio
import re
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from nexrl.errors import FailedPreconditionError
from nexrl.local.components import free_ports
from nexrl.redis_users import COMMANDS, delete_user, known_users, put_user
from nexrl.store import Redis, connect_redis, key_prefix
from nexrl_controller.state import State as ControllerState
from nexrl_controller.state_store import StateStore
from nexrl_trajectory_pool.ledger import train_batches
from nexrl_trajectory_pool.ledger.script import SCRIPT
from nexrl_weight_sync.store import WeightSyncStore
from tests.support.foreign_commands import OTHERS_CHANNEL, OTHERS_KEY, REFUSED
from tests.support.ledger_run import ALWAYS, PASSWORD, PROGRAMS, journey, program
from tests.support.patience import eventually
from tests.support.redis_servers import Server, running, running_cluster


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    """All services have it in their environment."""
    monkeypatch.setenv("NEXRL_REDIS_PASSWORD", PASSWORD)


async def make_users(url: str) -> None:
    """Make the users of two experiments, as the operator does, and a key of the second."""
    async with aclosing(await connect_redis(url)) as administrator:
        for name in ("own", "other"):
            await put_user(administrator, name, PASSWORD)
            await put_user(administrator, name, PASSWORD)  # whoever does it again changes nothing
        assert {"own", "other"} <= await known_users(administrator)
        await administrator.hset(OTHERS_KEY, "granted", "8")


@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_user_of_an_experiment_runs_its_ledger_and_nothing_else(
    name: str, redis_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_batches, "PIECE_BYTES", 4)  # train batches are put in pieces
    with running(server := Server(program(name), redis_folder)):
        await make_users(f"unix://default@{server.socket}")
        url = f"unix://own@{server.socket}"
        await journey(url, "own")
        async with aclosing(await connect_redis(url)) as redis:
            weight_sync = WeightSyncStore(redis, key_prefix("own", "model"))
            await weight_sync.save(await weight_sync.load())
            controller = StateStore(redis, "own")
            await controller.save(ControllerState(start_unix_seconds=1.0))
            assert await controller.load() == ControllerState(start_unix_seconds=1.0)
            assert server.ask("ACL", "LOG") == []  # nothing that we do was refused
            await require_refusals(redis)
        assert server.ask("HGETALL", OTHERS_KEY) == {b"granted": b"8"}
        async with aclosing(await connect_redis(f"unix://other@{server.socket}")) as other:
            assert await other.hgetall(OTHERS_KEY) == {b"granted": b"8"}


async def require_refusals(redis: Redis) -> None:
    """Raise unless everything is refused that belongs to others or to administrators, also inside a script."""
    for command in REFUSED:
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command.split())  # type: ignore[no-untyped-call]
    for call in (f"'HGETALL', '{OTHERS_KEY}'", "'KEYS', '*'", f"'PUBLISH', '{OTHERS_CHANNEL}', ''"):
        script = await redis.script_load(f"return redis.call({call})")
        with pytest.raises(ResponseError, match=r"The user executing the script|ACL failure in script"):
            await redis.evalsha(script, 0)


def test_the_commands_of_a_user_are_those_of_the_scripts_and_a_few_more() -> None:
    sent = {name.lower() for name in re.findall(r"(?:redis\.call|write|write_many)\([\"']([A-Z]+)", SCRIPT)}
    assert len(sent) > 20
    assert sent <= set(COMMANDS)


async def test_each_node_of_a_cluster_has_the_user(redis_folder: Path) -> None:
    with running_cluster(program("redis-6.2"), redis_folder) as nodes:
        url = f"redis+cluster://default@127.0.0.1:{nodes[0].port}"
        await make_users(url)
        await journey(url.replace("default", "own"), "own")
        assert [node.ask("ACL", "LOG") for node in nodes] == [[], [], []]
        nodes[1].ask("ACL", "DELUSER", "own")  # as if it had restarted
        async with aclosing(await connect_redis(url)) as administrator:
            assert "own" not in await known_users(administrator)
            await delete_user(administrator, "own")
        assert [b"own" in node.ask("ACL", "USERS") for node in nodes] == [False, False, False]


async def test_a_redis_whose_users_nobody_may_make_is_named(redis_folder: Path) -> None:
    with running(server := Server(program("redis-6.2"), redis_folder)):
        server.ask("ACL", "SETUSER", "limited", "on", f">{PASSWORD}", "~nexrl:*", "&*", "+@all", "-acl")
        async with aclosing(await connect_redis(f"unix://limited@{server.socket}")) as limited:
            with pytest.raises(FailedPreconditionError, match=r"\+acl\|setuser.*spec\.redis\.url"):
                await put_user(limited, "own", PASSWORD)


@pytest.mark.parametrize("is_tcp", [False, True], ids=["unix socket", "TCP"])
async def test_who_is_forgotten_waits_until_the_user_is_made_again(redis_folder: Path, is_tcp: bool) -> None:
    port = free_ports(1)[0] if is_tcp else 0
    with running(server := Server(program("redis-6.2"), redis_folder, *ALWAYS, port=port)):
        await make_users(f"unix://default@{server.socket}")
        url = f"redis://own@127.0.0.1:{port}" if is_tcp else f"unix://own@{server.socket}"
        async with aclosing(await connect_redis(url)) as redis:
            await redis.hset(f"{key_prefix('own', 'model')}meta", "granted", "1")
            server.end()
            server.start()
            asking = asyncio.ensure_future(redis.hget(f"{key_prefix('own', 'model')}meta", "granted"))

            async def is_refused() -> bool:
                return bool(server.ask("ACL", "LOG"))

            await eventually(is_refused)
            await make_users(f"unix://default@{server.socket}")
            assert await asking == b"1"
