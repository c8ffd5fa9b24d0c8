"""A move that raises leaves Redis as it was: an error is injected at every command of every move.

Redis refuses a command of a script for a passing reason (memory, replicas, its role) only before the script's first
write. So errors are injected at every read and at the first write, and after that a move must send writes only.
"""

import re
import string
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import SCRIPT, Drawn, Grant, Ledger, ProducedSample
from tests.support.ledger import fill_batch, produced, rules

Act = Callable[["Scene"], Awaitable[object]]

READS = (
    *("GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HSTRLEN", "INFO", "LLEN", "LRANGE", "SMEMBERS", "TIME"),
    *("ZCARD", "ZRANGE", "ZRANGEBYSCORE"),
)
SCAFFOLD = string.Template("""
local call, calls, is_written = redis.call, 0, false
local fail_at = tonumber(call("GET", KEYS[1] .. "test-fail-at") or 0)
local reads = {$reads}
local redis = { call = function(command, ...)
  calls = calls + 1
  local is_read = reads[command]
  if is_read and is_written then error("reads after its first write: " .. command) end
  if calls == fail_at and not is_written then error("injected at " .. command) end
  is_written = is_written or not is_read
  return call(command, ...)
end }
""").substitute(reads=", ".join(f"{name} = true" for name in READS))


class Scene:
    """A training and a validation ledger with samples in every state, and what their clients hold."""

    def __init__(self, redis: Redis, prefix: str, **changes: object) -> None:
        self._redis, self.prefix, self._now = redis, prefix, 1000.0
        values = {"staleness": 9, "max_queued": 9, "max_attempts": 1, "release_incomplete": False}
        self.rules = rules(**(values | changes))
        self.ledger = Ledger(redis, prefix, self.rules, lambda: self._now)
        validation = rules(unlimited=True, scoped=False)
        self.round = Ledger(redis, prefix + "val:", validation, lambda: self._now)
        self.next_round = Ledger(redis, prefix + "next:", validation, lambda: self._now)

    async def prepare(self) -> "Scene":
        """Batch 0 is durable, 1 trained, 2 a train batch, 3 leased; others are ready, grouping, leased and open."""
        ledger = self.ledger
        self.incarnation, _ = await ledger.resume("", 0, 0)
        for batch in range(4):
            for _ in range(2):
                await ledger.put_samples("", produced(await ledger.lease_tasks("", 2, 600)))
            self.batch, _ = await ledger.lease_batch("", 600)
            assert self.batch is not None
            if batch < 3:
                await ledger.put_train_batch("", batch, 1, self.batch.sample_ids, b"train", f"put-{batch}")
                self.step_samples = self.batch.sample_ids
            if batch < 2:
                await ledger.ack_train_batch(batch, self.incarnation, self.batch.sample_ids, f"put-{batch}")
        await ledger.commit_checkpoint(1, self.incarnation)
        for _ in range(2):
            await ledger.put_samples("", produced(await ledger.lease_tasks("", 2, 600)))
        self.partly = await ledger.lease_tasks("", 2, 600)
        await ledger.put_samples("", produced(self.partly)[:1])
        await ledger.add_task("", b'{"id": "added"}', front=False)
        self.held = await ledger.lease_tasks("", 4, 600)
        await ledger.return_samples("", self.held.tasks[1].samples)
        await ledger.hold(3, -100)
        await self.round.begin_round(3)
        self.validated = await self.round.lease_tasks("", 2, 600)
        return self

    def pass_time(self) -> "Scene":
        """Let every lease run out."""
        self._now += 700
        return self

    async def inject(self, call_number: int) -> None:
        """Have the script fail at that command; 0 for none."""
        for ledger in (self.ledger, self.round, self.next_round):
            script = SCRIPT.replace("local prefix = KEYS[1]\n", SCAFFOLD + "local prefix = KEYS[1]\n", 1)
            ledger._script = self._redis.register_script(script)
            await self._redis.set(ledger._prefix + "test-fail-at", call_number)

    async def everything(self) -> dict[bytes, Any]:
        """All that Redis holds of the ledgers."""
        pattern = self.prefix.replace("{", "[{]").replace("/", "[/]") + "*"
        keys: list[bytes] = sorted([key async for key in self._redis.scan_iter(match=pattern)])
        return {key: await self._redis.dump(key) for key in keys if b"test-fail-at" not in key}


def failures(grant: Grant) -> list[ProducedSample]:
    return [replace(result, failure="env_error", payload=b"") for result in produced(grant)]


async def put_all(scene: Scene) -> object:
    """Results that are good, that fail for good, and that complete a group and end a task."""
    good, bad = produced(scene.held)[:1], failures(scene.held)[1:2]
    return await scene.ledger.put_samples("id", [*good, *bad, *produced(scene.partly)[1:]])


def batch_id(scene: Scene) -> tuple[int, int]:
    assert scene.batch is not None
    return scene.batch.batch, scene.batch.attempt


def fail_train_batch(scene: Scene) -> Awaitable[object]:
    return scene.ledger.fail_train_batch("id", 2, scene.incarnation, scene.step_samples, "put-2", b"nothing")


MOVES: dict[str, list[Act]] = {
    "lease_tasks": [
        lambda s: s.ledger.lease_tasks("id", 9, 60),
        lambda s: s.pass_time().ledger.lease_tasks("id", 9, 60),
    ],
    "renew": [lambda s: s.ledger.renew(s.held.tasks[0].samples, 60)],
    "return_samples": [lambda s: s.ledger.return_samples("id", s.held.tasks[0].samples)],
    "add_task": [
        lambda s: s.ledger.add_task("id", b"{}", front=True),
        lambda s: s.ledger.add_task("", b"{}", front=False),
    ],
    "reset": [lambda s: s.ledger.reset("id")],
    "put_samples": [put_all, lambda s: s.round.put_samples("id", produced(s.validated))],
    "lease_batch": [
        lambda s: s.ledger.lease_batch("id", 60),
        lambda s: s.ledger.lease_batch("id", 60, worker="another"),
        lambda s: s.pass_time().ledger.lease_batch("id", 60),
    ],
    "return_batch": [lambda s: s.ledger.return_batch("id", *batch_id(s))],
    "put_train_batch": [
        lambda s: s.ledger.put_train_batch("id", *batch_id(s), s.batch.sample_ids if s.batch else (), b"train", "put")
    ],
    "lease_train_batch": [lambda s: s.ledger.lease_train_batch(2, s.incarnation)],
    "ack_train_batch": [lambda s: s.ledger.ack_train_batch(2, s.incarnation, s.step_samples, "put-2")],
    "fail_train_batch": [fail_train_batch],
    "commit_checkpoint": [lambda s: s.ledger.commit_checkpoint(2, s.incarnation)],
    "resume": [lambda s: s.ledger.resume("id", 1, 0)],
    "set_version": [lambda s: s.ledger.set_version(2)],
    "hold": [lambda s: s.ledger.hold(4, 60)],
    "unhold": [lambda s: s.ledger.unhold(3)],
    "begin_round": [lambda s: s.next_round.begin_round(4)],
    "end_round": [lambda s: s.round.end_round(3)],
    "expire": [lambda s: s.pass_time().ledger.expire()],
    "state": [lambda s: s.ledger.state()],
    "task_ids": [lambda s: s.ledger.samples(0, 10)],
    "snapshot": [lambda s: s.ledger.audit()],
}


async def fail_at_every_command(scene: Scene, act: Act) -> tuple[int, bool]:
    """Repeat `act` until it succeeds, with an error at one command after another.

    Returns how many errors were injected, and whether the success has changed anything.
    """
    before = await scene.everything()
    for call_number in range(1, 1000):
        await scene.inject(call_number)
        error = await error_of(act(scene))
        after = await scene.everything()
        if not error:
            return call_number - 1, after != before
        assert "injected" in error
        assert after == before, f"half written after an error at command {call_number}: {error}"
    raise AssertionError("it never ends")


async def error_of(work: Awaitable[object]) -> str:
    """The error that Redis answers with; empty if it answers with none."""
    try:
        await work
    except ResponseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MOVES)
async def test_a_move_that_raises_leaves_redis_as_it_was(redis: Redis, experiment_name: str, name: str) -> None:
    reads_only = {"lease_train_batch", "state", "task_ids", "snapshot"}
    for number, act in enumerate(MOVES[name]):
        prefix = key_prefix(f"{experiment_name}-{number}", "default")
        scene = await Scene(redis, prefix).prepare()
        injected, is_changed = await fail_at_every_command(scene, act)
        assert injected >= 1
        assert is_changed == (name not in reads_only)


async def test_groups_across_tasks_and_stale_groups_are_no_exception(redis: Redis, experiment_name: str) -> None:
    across = Scene(redis, key_prefix(f"{experiment_name}-across", "default"), scoped=False, positions=3)
    await across.ledger.resume("", 0, 0)
    for number, sample in enumerate(produced(await across.ledger.lease_tasks("", 9, 60))):
        await across.ledger.put_samples("", [replace(sample, group="red" if number < 3 else f"alone-{number}")])
    injected, is_changed = await fail_at_every_command(across, lambda scene: scene.ledger.lease_batch("id", 60))
    assert is_changed
    assert injected > 10

    stale = Scene(redis, key_prefix(f"{experiment_name}-stale", "default"), staleness=1)
    await stale.ledger.resume("", 0, 0)
    await fill_batch(stale.ledger)
    for batch in range(2):
        leased, _ = await stale.ledger.lease_batch("", 60)
        assert leased is not None
        await stale.ledger.put_train_batch("", batch, 1, leased.sample_ids, b"train")
    await stale.ledger.set_version(1)
    await fill_batch(stale.ledger)  # of version 0: too old for batch 2
    injected, is_changed = await fail_at_every_command(stale, lambda scene: scene.ledger.lease_batch("id", 60))
    assert is_changed
    assert injected > 10


@pytest.mark.parametrize("scoped", [True, False])
async def test_groups_that_are_refilled_are_no_exception(redis: Redis, experiment_name: str, scoped: bool) -> None:
    scene = Scene(redis, key_prefix(f"{experiment_name}-{scoped}", "default"), scoped=scoped, max_refilled=9)
    await scene.ledger.resume("", 0, 0)
    results = produced(await scene.ledger.lease_tasks("", 2, 60), rewards={"0.0": "1.0", "0.1": "1.0"})
    await scene.ledger.put_samples("", results[:1])
    injected, is_changed = await fail_at_every_command(scene, lambda s: s.ledger.put_samples("id", results[1:]))
    assert is_changed
    assert injected >= 3
    await scene.inject(0)
    assert (await scene.ledger.state()).dropped == {"equal_rewards": 2}


async def test_tasks_that_are_left_out_and_their_rewards_are_no_exception(redis: Redis, experiment_name: str) -> None:
    scene = Scene(redis, key_prefix(experiment_name, "default"), positions=3)
    await scene.ledger.resume("", 0, 0)
    drawn = Drawn(0, (False, "b", False))
    injected, is_changed = await fail_at_every_command(scene, lambda s: s.ledger.lease_tasks("id", 2, 60, drawn))
    assert is_changed
    assert injected >= 3
    await scene.inject(0)
    results = produced(await scene.ledger.lease_tasks("id", 2, 60, drawn))
    injected, is_changed = await fail_at_every_command(scene, lambda s: s.ledger.put_samples("id", results))
    assert is_changed
    assert injected >= 3


async def test_the_second_failure_of_a_train_batch_and_a_ledger_that_was_lost_are_no_exception(
    redis: Redis, experiment_name: str
) -> None:
    scene = await Scene(redis, key_prefix(f"{experiment_name}-fails", "default")).prepare()
    await scene.ledger.fail_train_batch("first", 2, scene.incarnation, scene.step_samples, "put-2", b"nothing")
    injected, is_changed = await fail_at_every_command(scene, fail_train_batch)
    assert is_changed
    assert injected >= 4
    lost = Scene(redis, key_prefix(f"{experiment_name}-lost", "default"))
    await fill_batch(lost.ledger)  # workers came before the trainer
    await lost.ledger.lease_batch("", 60)
    injected, is_changed = await fail_at_every_command(lost, lambda scene: scene.ledger.resume("id", 7, 21))
    assert is_changed
    assert injected > 10


def test_no_move_is_left_out() -> None:
    assert set(MOVES) == set(re.findall(r"^function moves\.(\w+)", SCRIPT, re.MULTILINE))


async def test_a_command_that_redis_cannot_take_is_found_before_the_first_is_sent(
    redis: Redis, experiment_name: str
) -> None:
    scene = await Scene(redis, key_prefix(experiment_name, "default")).prepare()
    right = "set(K.batch_sizes, name, #ids)"
    assert SCRIPT.count(right) == 1
    scene.ledger._script = redis.register_script(SCRIPT.replace(right, "set(K.batch_sizes, name, true)"))
    before = await scene.everything()
    error = await error_of(scene.ledger.lease_batch("id", 60))
    is_unchanged = await scene.everything() == before
    assert is_unchanged, "half written"
    assert "of HSET is a boolean" in error
