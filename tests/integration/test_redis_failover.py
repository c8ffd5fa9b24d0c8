"""A replica takes over from a master: what is kept, and what happens to acknowledged writes that are lost."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from nexrl.errors import LeaseLostError
from nexrl.local.components import free_ports
from tests.support.ledger_run import EVERY_SECOND, PROGRAMS, program, run_on
from tests.support.patience import eventually_blocking
from tests.support.redis_servers import (
    Program,
    Server,
    running,
)


class Pair:
    """A master and its replica behind one address, which a Service or a proxy would be: here, a link to a socket."""

    def __init__(self, found: Program, redis_folder: Path) -> None:
        ports, options = free_ports(2), (*EVERY_SECOND, "--repl-diskless-sync-delay", "0")
        self.master, self.replica = (Server(found, redis_folder / str(port), *options, port=port) for port in ports)
        self._link = redis_folder / "redis.sock"
        self.url = f"unix://{self._link}"
        self._point(self.master)

    def follow(self) -> None:
        """The replica begins to follow; returns when it has all."""
        self.replica.ask("REPLICAOF", "127.0.0.1", self.master.port)
        self.wait()

    def wait(self) -> None:
        """Return when the replica has all that the master has."""
        eventually_blocking(lambda: self._offset(self.replica) == self._offset(self.master))

    def promote(self) -> None:
        """Promote the replica to master. Later writes to the old master are lost."""
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
def replicated(name: str, redis_folder: Path) -> Iterator[Pair]:
    """A master that a replica follows."""
    pair = Pair(program(name), redis_folder)
    with running(pair.master, pair.replica):
        pair.follow()
        yield pair


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_replica_takes_over_from_a_killed_master(name: str, redis_folder: Path, experiment_name: str) -> None:
    with replicated(name, redis_folder) as pair:
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
    name: str, redis_folder: Path, experiment_name: str
) -> None:
    with replicated(name, redis_folder) as pair:
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
    name: str, redis_folder: Path, experiment_name: str
) -> None:
    with replicated(name, redis_folder) as pair:
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


async def test_a_master_that_takes_over_again_gives_no_id_that_it_gave_before(
    redis_folder: Path, experiment_name: str
) -> None:
    with replicated("redis-6.2", redis_folder) as pair:
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
