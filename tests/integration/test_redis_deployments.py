"""The ledger on Redis as it is deployed: a server or a cluster, with its own user, with TLS; how long keys stay."""

import re
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from nexrl.errors import FailedPreconditionError
from nexrl.local.components import free_ports
from nexrl.local.ownership import owned
from nexrl.store import Redis, connect_redis, expire_experiment, keep_experiment, key_prefix, owner_key
from nexrl_trajectory_pool.ledger import train_batches
from tests.support.ledger_run import PASSWORD, PROGRAMS, experiment_of_node, journey, needs_openssl, program
from tests.support.marks import ROOT
from tests.support.redis_servers import (
    Server,
    make_certificates,
    running,
    running_cluster,
)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_one_server(name: str, redis_folder: Path, experiment_name: str) -> None:
    with running(server := Server(program(name), redis_folder)):
        await journey(server.url, experiment_name)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_cluster_each_of_whose_nodes_has_an_experiment(
    name: str, redis_folder: Path, experiment_name: str
) -> None:
    with running_cluster(program(name), redis_folder) as nodes:
        for number, node in enumerate(nodes):
            experiment = experiment_of_node(number, experiment_name)
            await journey(f"redis+cluster://127.0.0.1:{nodes[0].port}", experiment)
            assert f"nexrl:{{{experiment}/model}}:meta".encode() in node.ask("KEYS", "*")


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documented user as an administrator makes it; its password is in our environment."""
    monkeypatch.setenv("NEXRL_REDIS_PASSWORD", PASSWORD)
    monkeypatch.setattr(train_batches, "PIECE_BYTES", 4)  # train batches are put in pieces
    rule = re.search(r"^user (nexrl .*)$", (ROOT / "docs/how-to/redis.md").read_text(), re.MULTILINE)
    assert rule is not None
    return rule[1].replace("PASSWORD", PASSWORD).split()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_user_who_may_do_what_is_documented_and_nothing_else(
    name: str, login: list[str], redis_folder: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), redis_folder)):
        server.ask("ACL", "SETUSER", *login)
        url = f"unix://nexrl@{server.socket}"
        await journey(url, experiment_name)
        async with owned(url, experiment_name), aclosing(await connect_redis(url)) as redis:
            await expire_experiment(redis, experiment_name, 100)
            await keep_experiment(redis, experiment_name)
            assert server.ask("ACL", "LOG") == []  # nothing that we do was refused
            await require_refusals(redis)


async def require_refusals(redis: Redis) -> None:
    """Raise unless what we do not do is refused."""
    for command in (
        "GET other",
        "PUBLISH other 1",
        "FLUSHALL",
        "KEYS *",
        "CONFIG GET *",
        "EVAL return 0",
        "SORT nexrl:x",
    ):
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command.split())  # type: ignore[no-untyped-call]


@needs_openssl
async def test_tls_with_certificates_on_both_sides(login: list[str], redis_folder: Path, experiment_name: str) -> None:
    own, port = make_certificates(redis_folder / "tls"), free_ports(1)[0]
    url = f"rediss://nexrl@127.0.0.1:{port}"
    of_authority, of_us = f"?ssl_ca_certs={own.authority}", f"&ssl_certfile={own.certificate}&ssl_keyfile={own.key}"
    with running(server := Server(program("redis-7"), redis_folder, "--tls-port", str(port), *own.options)):
        server.ask("ACL", "SETUSER", *login)
        await journey(url + of_authority + of_us, experiment_name)
        for less in (url + of_authority, url):
            with pytest.raises(FailedPreconditionError, match=r"redis\.url: rediss://127.*certificate.*FILE"):
                await connect_redis(less)


@needs_openssl
async def test_the_authority_is_replaced_under_an_open_connection(redis_folder: Path) -> None:
    own, port = make_certificates(redis_folder / "tls"), free_ports(1)[0]
    options = (*own.options, "--tls-auth-clients", "no")
    with running(server := Server(program("redis-7"), redis_folder, "--tls-port", str(port), *options)):
        connection = await connect_redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={own.authority}")
        assert await connection.ping()
        make_certificates(redis_folder / "tls")
        server.ask("CONFIG", "SET", *("tls-cert-file", str(own.certificate), "tls-key-file", str(own.key)))
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await connection.ping()
        await connection.aclose()


@needs_openssl
async def test_a_cluster_with_tls_and_a_user(login: list[str], redis_folder: Path, experiment_name: str) -> None:
    own = make_certificates(redis_folder / "tls")
    options = (*own.options, "--tls-auth-clients", "no", "--tls-cluster", "yes")
    with running_cluster(program("redis-7"), redis_folder, *options, is_encrypted=True) as nodes:
        for node in nodes:
            node.ask("ACL", "SETUSER", *login, "+cluster|slots", "+command")
        await journey(f"rediss+cluster://nexrl@127.0.0.1:{nodes[0].port}?ssl_ca_certs={own.authority}", experiment_name)
        assert [node.ask("ACL", "LOG") for node in nodes] == [[], [], []]


@pytest.mark.parametrize("is_cluster", [False, True])
async def test_the_keys_of_an_experiment_end_and_are_kept_when_it_goes_on(is_cluster: bool, redis_folder: Path) -> None:
    found = program("redis-6.2")
    with ExitStack() as stack:
        if is_cluster:
            url = f"redis+cluster://127.0.0.1:{stack.enter_context(running_cluster(found, redis_folder))[0].port}"
        else:
            stack.enter_context(running(server := Server(found, redis_folder)))
            url = server.url
        async with aclosing(await connect_redis(url)) as redis:
            await require_ends(redis)


async def require_ends(redis: Redis) -> None:
    """Raise unless the keys of one experiment, and no others, are given an end, and are kept afterwards."""
    names = [f"{key_prefix('mine', part)}{number}" for part in ("controller", "model") for number in range(600)]
    others = [key_prefix("mine-too", "model") + "meta", owner_key("mine")]
    for name in [*names, *others]:
        await redis.set(name, "")
    await redis.expire(names[0], 50)

    await expire_experiment(redis, "mine", 1000)
    assert await redis.ttl(names[0]) <= 50
    assert {await redis.ttl(name) > 900 for name in names[1:]} == {True}
    assert [await redis.ttl(name) for name in others] == [-1, -1]

    await keep_experiment(redis, "mine")
    assert {await redis.ttl(name) for name in names} == {-1}
