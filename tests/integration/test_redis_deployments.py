"""The ledger on Redis as it is deployed: what it needs, what it outlasts, and what it does when writes are lost."""

import asyncio
import itertools
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import BusyLoadingError, NoPermissionError

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, LeaseLostError, UnavailableError
from nexrl.local.append_only_file import make_whole
from nexrl.local.components import free_ports
from nexrl.local.ownership import owned
from nexrl.store import START_SECONDS, Redis, connect_redis, expire_experiment, keep_experiment, key_prefix, owner_key
from nexrl_trajectory_pool.ledger import GrantedBatch, Ledger
from nexrl_trajectory_pool.wakeups import WakeUps
from tests.support.guide import ROOT
from tests.support.ledger import fill_batch, rules
from tests.support.redis_servers import (
    CLUSTER_NODES,
    SLOTS,
    Program,
    Server,
    eventually,
    find_program,
    folder,
    free_cluster_ports,
    make_certificates,
    running,
    running_cluster,
)

PROGRAMS = ("redis-6.2", "redis-7", "valkey")
PASSWORD = "in-no-file"
EVERY_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def program(name: str) -> Program:
    """The program of that name, or the end of the test."""
    found = find_program(name)
    if found is None:
        pytest.skip(f"no {name} on this machine; `make redis-servers` fetches it")
    return found


@pytest.fixture
def path() -> Iterator[Path]:
    """A folder for servers."""
    with folder() as path:
        yield path


class Run:
    """A ledger in use: we are the worker, the algorithm processor and the trainer."""

    def __init__(self, redis: Redis, experiment: str) -> None:
        self.redis = redis
        self.now = 1_000_000.0
        prefix = key_prefix(experiment, "model")
        self.ledger = Ledger(redis, prefix, rules(max_attempts=100), lambda: self.now)
        self.wakeups = WakeUps(redis, [self.ledger.wake_channel])
        self.incarnation = 0

    async def begin(self) -> None:
        """The trainer begins at the newest checkpoint that the ledger knows of; workers and their leases are gone."""
        self.now += 1000
        self.incarnation, _ = await self.ledger.resume("", (await self.ledger.state())["durable_steps"], 0)

    async def batch(self) -> GrantedBatch:
        """The next batch, for which somebody waits before there is any."""

        async def lease() -> tuple[GrantedBatch | None, bool]:
            found, _ = await self.ledger.lease_batch("", 60, worker="processor")
            return found, found is not None

        waiting = asyncio.create_task(self.wakeups.until("batch", lease, 30))
        await fill_batch(self.ledger, (await self.ledger.state())["version"])
        batch = await waiting
        assert batch is not None
        return batch

    async def prepare(self, batch: GrantedBatch) -> None:
        """Put its train batch, which says what it is made of."""
        ids = " ".join(batch.sample_ids).encode()
        await self.ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, ids)

    async def train(self, step: int) -> None:
        """Make a step whose train batch is there, write a checkpoint, use the new weights."""
        payload, _ = await self.ledger.lease_train_batch(step, self.incarnation)
        assert payload is not None
        await self.ledger.ack_train_batch(step, self.incarnation, payload.decode().split())
        await self.ledger.commit_checkpoint(step + 1, self.incarnation)
        await self.ledger.set_version(step + 1)

    async def go_on(self, steps: int) -> None:
        """Make all steps up to `steps`."""
        for step in range((await self.ledger.state())["trained_steps"], steps):
            if (await self.ledger.lease_train_batch(step, self.incarnation))[0] is None:
                await self.prepare(await self.batch())
            await self.train(step)

    async def require_balance(self, steps: int) -> None:
        """Raise unless everything adds up, and batches 0 to `steps` - 1 were trained."""
        assert (await self.ledger.audit()).findings == ()
        state = await self.ledger.state()
        assert (state["trained_steps"], state["trained"], state.imbalance) == (steps, 4 * steps, 0)


@asynccontextmanager
async def run_on(url: str, experiment: str) -> AsyncIterator[Run]:
    """A run whose wake-ups arrive."""
    async with aclosing(await connect_redis(url)) as redis:
        run = Run(redis, experiment)
        listening = asyncio.create_task(run.wakeups.listen())
        try:
            await hear(run.wakeups, redis, run.ledger.wake_channel)
            yield run
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def hear(wakeups: WakeUps, redis: Redis, channel: str) -> None:
    """Return when what is published arrives: the second look may be due to the subscription, the third is not."""
    looks = 0

    async def look() -> tuple[None, bool]:
        nonlocal looks
        looks += 1
        await redis.publish(channel, "looked")
        return None, looks == 3

    await wakeups.until("looked", look, 30)
    assert looks == 3


async def journey(url: str, experiment: str) -> None:
    """Two steps, from the first grant to the checkpoint that contains them."""
    async with run_on(url, experiment) as run:
        await run.begin()
        await run.go_on(2)
        await run.require_balance(2)


# where it runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
async def test_one_server(name: str, path: Path, experiment_name: str) -> None:
    with running(server := Server(program(name), path)):
        await journey(server.url, experiment_name)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_cluster_each_of_whose_nodes_has_an_experiment(name: str, path: Path, experiment_name: str) -> None:
    with running_cluster(program(name), path) as nodes:
        for number, node in enumerate(nodes):
            experiment = experiment_of_node(number, experiment_name)
            await journey(f"redis+cluster://127.0.0.1:{nodes[0].port}", experiment)
            assert f"nexrl:{{{experiment}/model}}:meta".encode() in node.ask("KEYS", "*")


def experiment_of_node(number: int, name: str) -> str:
    """A name whose ledger is on that node of a cluster."""

    def node(experiment: str) -> int:
        return key_slot(key_prefix(experiment, "model").encode()) * CLUSTER_NODES // SLOTS

    return next(found for suffix in itertools.count() if node(found := f"{name}-{suffix}") == number)


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documented user as an administrator makes it; its password is in our environment."""
    monkeypatch.setenv("NEXRL_REDIS_PASSWORD", PASSWORD)
    rule = re.search(r"^user (nexrl .*)$", (ROOT / "docs/how-to/redis.md").read_text(), re.MULTILINE)
    assert rule is not None
    return rule[1].replace("PASSWORD", PASSWORD).split()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_user_who_may_do_what_is_documented_and_nothing_else(
    name: str, login: list[str], path: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), path)):
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
async def test_tls_with_certificates_on_both_sides(login: list[str], path: Path, experiment_name: str) -> None:
    own, port = make_certificates(path / "tls"), free_ports(1)[0]
    url = f"rediss://nexrl@127.0.0.1:{port}"
    of_authority, of_us = f"?ssl_ca_certs={own.authority}", f"&ssl_certfile={own.certificate}&ssl_keyfile={own.key}"
    with running(server := Server(program("redis-7"), path, "--tls-port", str(port), *own.options)):
        server.ask("ACL", "SETUSER", *login)
        await journey(url + of_authority + of_us, experiment_name)
        for less in (url + of_authority, url):
            with pytest.raises(FailedPreconditionError, match=r"redis\.url: rediss://127.*certificate.*FILE"):
                await connect_redis(less)


@needs_openssl
async def test_the_authority_is_replaced_under_an_open_connection(path: Path) -> None:
    own, port = make_certificates(path / "tls"), free_ports(1)[0]
    options = (*own.options, "--tls-auth-clients", "no")
    with running(server := Server(program("redis-7"), path, "--tls-port", str(port), *options)):
        connection = await connect_redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={own.authority}")
        assert await connection.ping()
        make_certificates(path / "tls")
        server.ask("CONFIG", "SET", *("tls-cert-file", str(own.certificate), "tls-key-file", str(own.key)))
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await connection.ping()
        await connection.aclose()


@needs_openssl
async def test_a_cluster_with_tls_and_a_user(login: list[str], path: Path, experiment_name: str) -> None:
    own = make_certificates(path / "tls")
    options = (*own.options, "--tls-auth-clients", "no", "--tls-cluster", "yes")
    with running_cluster(program("redis-7"), path, *options, is_encrypted=True) as nodes:
        for node in nodes:
            node.ask("ACL", "SETUSER", *login, "+cluster|slots", "+command")
        await journey(f"rediss+cluster://nexrl@127.0.0.1:{nodes[0].port}?ssl_ca_certs={own.authority}", experiment_name)
        assert [node.ask("ACL", "LOG") for node in nodes] == [[], [], []]


# what it outlasts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("options", "how"), [(ALWAYS, signal.SIGKILL), (EVERY_SECOND, signal.SIGTERM)], ids=["killed", "stopped"]
)
async def test_a_restart_in_the_middle_of_a_run_loses_nothing(
    name: str, options: tuple[str, ...], how: signal.Signals, path: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), path, *options)):
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
    name: str, path: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), path, *EVERY_SECOND)):
        async with run_on(server.url, experiment_name) as run:
            for step in range(1, 8):
                await run.begin()
                await run.go_on(step)
                server.end()
                cut(path)
                make_whole(path)
                await asyncio.to_thread(server.start)
            await run.begin()
            await run.go_on(8)
            await run.require_balance(8)


def cut(path: Path) -> None:
    """Take the end off an append-only file, as the loss of a machine does."""
    file = next(file for file in path.rglob("*.aof") if ".base." not in file.name)
    os.truncate(file, max(0, file.stat().st_size - 2500))


async def test_a_server_that_loads_its_data_is_waited_for(path: Path, experiment_name: str) -> None:
    with running(server := Server(program("redis-6.2"), path, *EVERY_SECOND)):
        async with run_on(server.url, experiment_name) as run:
            await run.begin()
            pipeline = run.redis.pipeline(transaction=False)
            for number in range(8_000):
                pipeline.set(f"other:{number}", "")
            await pipeline.execute()
            server.end(signal.SIGTERM)
            await asyncio.to_thread(server.start, "--key-load-delay", "200")  # microseconds
            with pytest.raises(BusyLoadingError):
                server.ask("GET", "other")
            await run.go_on(1)
            await run.require_balance(1)


@pytest.mark.parametrize("name", ["redis-7", "valkey"])  # Redis 6.2 does not ask a script for replicas
@pytest.mark.parametrize(("setting", "code"), [("maxmemory", "OOM"), ("min-replicas-to-write", "NOREPLICAS")])
async def test_a_server_that_may_not_write_is_waited_for(
    name: str, setting: str, code: str, path: Path, experiment_name: str
) -> None:
    with running(server := Server(program(name), path)):
        async with run_on(server.url, experiment_name) as run:
            await run.begin()
            server.ask("CONFIG", "SET", setting, 1)
            going_on = asyncio.create_task(run.go_on(1))
            await asyncio.to_thread(eventually, lambda: f"errorstat_{code}" in server.ask("INFO", "errorstats"))
            server.ask("CONFIG", "SET", setting, 0)
            await going_on
            await run.require_balance(1)


async def test_a_node_of_a_cluster_that_restarts_is_waited_for(path: Path, experiment_name: str) -> None:
    with running_cluster(program("redis-6.2"), path, *ALWAYS) as nodes:
        async with run_on(f"redis+cluster://127.0.0.1:{nodes[0].port}", experiment_of_node(1, experiment_name)) as run:
            await run.begin()
            await run.go_on(1)
            nodes[1].end()
            asked = asyncio.create_task(run.ledger.audit())
            await asyncio.to_thread(eventually, lambda: b"cluster_state:fail" in nodes[0].ask("CLUSTER", "INFO"))
            await asyncio.to_thread(nodes[1].start)
            assert (await asked).findings == ()
            await run.go_on(3)
            await run.require_balance(3)


async def test_a_call_has_an_end(path: Path, experiment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.store.PATIENCE_SECONDS", 0.2)
    with running(server := Server(program("redis-6.2"), path)):
        await require_end(server.url, [server], experiment_name)


async def test_a_call_of_a_cluster_has_an_end(
    path: Path, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl.store.PATIENCE_SECONDS", 0.2)
    with running_cluster(program("redis-6.2"), path) as nodes:
        await require_end(f"redis+cluster://127.0.0.1:{nodes[0].port}", nodes, experiment_name)


async def require_end(url: str, servers: Sequence[Server], experiment: str) -> None:
    """Raise unless calls give up, and say so, when the servers are gone."""
    async with aclosing(await connect_redis(url)) as redis:
        ledger, pipeline = Ledger(redis, key_prefix(experiment, "model"), rules()), redis.pipeline(transaction=False)
        await ledger.state()
        for server in servers:
            server.end()
        pipeline.ttl(owner_key(experiment))
        for call in (ledger.state(), pipeline.execute()):
            with pytest.raises(UnavailableError, match=r"redis\.url: Redis is not available"):
                await call


# fail-over -----------------------------------------------------------------------------------------------------------


class Pair:
    """A master and its replica behind one address, which a Service or a proxy would be: here, a link to a socket."""

    def __init__(self, found: Program, path: Path) -> None:
        ports, options = free_ports(2), (*EVERY_SECOND, "--repl-diskless-sync-delay", "0")
        self.master, self.replica = (Server(found, path / str(port), *options, port=port) for port in ports)
        self._link = path / "redis.sock"
        self.url = f"unix://{self._link}"
        self._point(self.master)

    def follow(self) -> None:
        """The replica begins to follow; returns when it has all."""
        self.replica.ask("REPLICAOF", "127.0.0.1", self.master.port)
        self.wait()

    def wait(self) -> None:
        """Return when the replica has all that the master has."""
        eventually(lambda: self._offset(self.replica) == self._offset(self.master))

    def promote(self) -> None:
        """The replica becomes a master; whatever the other takes from now on is lost."""
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def hand_over(self) -> None:
        """The address is the other's from now on."""
        self.master, self.replica = self.replica, self.master
        self._point(self.master)

    def _point(self, server: Server) -> None:
        new = self._link.with_suffix(".new")
        new.symlink_to(server.socket)
        new.replace(self._link)

    def _offset(self, server: Server) -> int:
        with redis.Redis.from_url(server.url) as client:
            found = client.info("replication")
        is_complete = found["role"] == "master" or found["master_link_status"] == "up"
        return int(found["master_repl_offset"]) if is_complete else -1


@contextmanager
def replicated(name: str, path: Path) -> Iterator[Pair]:
    """A master that a replica follows."""
    pair = Pair(program(name), path)
    with running(pair.master, pair.replica):
        pair.follow()
        yield pair


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_replica_takes_over_from_a_killed_master(name: str, path: Path, experiment_name: str) -> None:
    with replicated(name, path) as pair:
        async with run_on(pair.url, experiment_name) as run:
            await run.begin()
            await run.go_on(1)
            await run.prepare(await run.batch())
            before = await run.ledger.state()
            pair.wait()
            pair.master.end()
            pair.promote()
            pair.hand_over()
            assert await run.ledger.state() == before
            await run.go_on(3)
            await run.require_balance(3)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_master_that_became_a_replica_is_left_for_the_new_one(
    name: str, path: Path, experiment_name: str
) -> None:
    with replicated(name, path) as pair:
        async with run_on(pair.url, experiment_name) as run:
            await run.begin()
            await run.go_on(1)
            pair.wait()
            pair.promote()
            pair.master.ask("REPLICAOF", "127.0.0.1", pair.replica.port)
            writing = asyncio.create_task(run.go_on(3))
            await asyncio.to_thread(pair.hand_over)
            await writing
            await run.require_balance(3)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_fail_over_that_loses_acknowledged_writes_is_noticed(
    name: str, path: Path, experiment_name: str
) -> None:
    with replicated(name, path) as pair:
        async with run_on(pair.url, experiment_name) as run:
            await run.begin()
            await run.go_on(1)
            batch = await run.batch()
            pair.wait()
            pair.promote()  # but everyone still talks to the old master
            await run.prepare(batch)
            await run.train(1)
            lost = await run.batch()
            assert (lost.batch, (await run.ledger.state())["durable_steps"]) == (2, 2)
            pair.master.end()
            pair.hand_over()

            with pytest.raises(LeaseLostError, match="only 1 steps"):
                await run.ledger.lease_train_batch(2, run.incarnation)
            with pytest.raises(LeaseLostError):
                await run.prepare(lost)
            await run.begin()
            again = await run.batch()
            assert (again.batch, again.sample_ids) == (1, batch.sample_ids)
            await run.prepare(again)
            await run.train(1)
            new = await run.batch()
            assert new.batch == lost.batch
            assert not {*new.sample_ids} & {*lost.sample_ids}  # other samples have other names
            await run.prepare(new)
            await run.go_on(4)
            await run.require_balance(4)


async def test_a_master_that_takes_over_again_gives_no_id_that_it_gave_before(path: Path, experiment_name: str) -> None:
    with replicated("redis-6.2", path) as pair:
        async with run_on(pair.url, experiment_name) as run:
            await run.begin()
            await run.go_on(1)
            pair.wait()
            pair.promote()  # but everyone still talks to the old master
            lost = await run.batch()
            pair.hand_over()
            await asyncio.to_thread(pair.follow)
            pair.promote()
            pair.hand_over()
            new = await run.batch()
            assert new.batch == lost.batch
            assert not {*new.sample_ids} & {*lost.sample_ids}


# what is said of a wrong URL -----------------------------------------------------------------------------------------


async def test_who_is_not_let_in_is_told_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(server := Server(program("redis-6.2"), path)):
        server.ask("ACL", "SETUSER", "nexrl", "on", f">{PASSWORD}", "~nexrl:*", "+@all", "-info")
        with pytest.raises(FailedPreconditionError, match="NEXRL_REDIS_PASSWORD"):
            await connect_redis(f"unix://nexrl:{PASSWORD}-@{server.socket}")
        monkeypatch.setenv("NEXRL_REDIS_PASSWORD", PASSWORD)
        with pytest.raises(FailedPreconditionError, match=r"'info' command.*; docs/how-to/redis\.md"):
            await connect_redis(f"unix://nexrl@{server.socket}")


async def test_a_server_that_would_delete_samples_when_it_is_full_is_refused(path: Path) -> None:
    with running(server := Server(program("redis-6.2"), path, "--maxmemory-policy", "allkeys-lru")):
        async with aclosing(await connect_redis(server.url)):  # it never is
            server.ask("CONFIG", "SET", "maxmemory", "100mb")
        with pytest.raises(FailedPreconditionError, match="set noeviction"):
            await connect_redis(server.url)


async def test_a_cluster_and_a_server_are_not_mistaken_for_each_other(path: Path) -> None:
    found, ports = program("redis-6.2"), free_cluster_ports(2)
    node = Server(found, path / "node", "--cluster-enabled", "yes", port=ports[0])
    server = Server(found, path / "server", port=ports[1])
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


async def test_a_service_that_starts_waits_for_a_server_that_starts(path: Path) -> None:
    server = Server(program("redis-6.2"), path)
    connecting = asyncio.create_task(connect_redis(server.url, wait_seconds=START_SECONDS))
    await asyncio.sleep(0.5)  # it has found nobody, more than once
    with running(server):
        async with aclosing(await connecting) as redis:
            assert await redis.ping()


# how long keys stay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cluster", [False, True])
async def test_the_keys_of_an_experiment_end_and_are_kept_when_it_goes_on(is_cluster: bool, path: Path) -> None:
    found = program("redis-6.2")
    with ExitStack() as stack:
        if is_cluster:
            url = f"redis+cluster://127.0.0.1:{stack.enter_context(running_cluster(found, path))[0].port}"
        else:
            stack.enter_context(running(server := Server(found, path)))
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
