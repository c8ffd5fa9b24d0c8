"""The audit names every record that contradicts the rows of the samples."""

import json
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ResponseError

from nexrl.errors import NotFoundError
from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import Ledger, ProducedSample, SampleRecord
from tests.support.ledger import produced, rules

Tamper = Callable[[Redis, str], Awaitable[object]]


@pytest.fixture
async def ledger(redis: Redis, experiment_name: str) -> Ledger:
    """Every state at once: batch 0 durable, 1 trained, 2 a train batch, 3 leased; samples that are ready, grouping,
    leased and open; and a group that was dropped."""
    prefix = key_prefix(experiment_name, "default")
    ledger = Ledger(redis, prefix, rules(staleness=9, max_queued=9, max_attempts=1, release_incomplete=False))
    incarnation, _ = await ledger.resume("", 0, 0)
    for batch in range(4):
        for _ in range(2):
            await ledger.put_samples("", produced(await ledger.lease_tasks("", 2, 60)))
        leased, _ = await ledger.lease_batch("", 60)
        assert leased is not None
        if batch < 3:
            await ledger.put_train_batch("", batch, 1, leased.sample_ids, b"train")
        if batch < 2:
            await ledger.ack_train_batch(batch, incarnation, leased.sample_ids)
    await ledger.commit_checkpoint(1, incarnation)
    await ledger.put_samples("", produced(await ledger.lease_tasks("", 2, 60)))  # 8: ready
    failing = produced(await ledger.lease_tasks("", 2, 60))  # 9: dropped
    await ledger.put_samples("", [ProducedSample(s.sample_id, s.attempt, "env_error") for s in failing])
    await ledger.put_samples("", produced(await ledger.lease_tasks("", 2, 60))[:1])  # 10: grouping, and leased
    await ledger.lease_tasks("", 1, 60)  # 11: leased, and open
    return ledger


async def test_a_ledger_with_samples_in_every_state_is_balanced(ledger: Ledger) -> None:
    audit = await ledger.audit()
    assert audit.findings == ()
    assert audit.samples == {
        "granted": 24,
        "open": 1,
        "leased": 2,
        "grouping": 1,
        "ready": 2,
        "batched": 8,
        "trained": 8,
        "durable": 4,
    }
    assert audit.dropped == {"env_error": 2}


def _set_row(sample: str, row: str) -> Tamper:
    task, _, k = sample.partition(".")
    return lambda redis, prefix: redis.hset(f"{prefix}task:{task}", f"s{k}", row)


TAMPERINGS: dict[str, tuple[str, Tamper]] = {
    "an open sample that nobody can be given": ("11.1", lambda r, p: r.lrem(p + "open", 0, "11.1")),
    "a sample that is open twice": ("11.1", lambda r, p: r.rpush(p + "open", "11.1")),
    "a lease without its deadline": ("11.0", lambda r, p: r.zrem(p + "leases", "11.0")),
    "a sample that waits for no group": ("10.0", lambda r, p: r.delete(p + "group:10")),
    "a sample whose trajectories are gone": ("10.0", lambda r, p: r.hdel(p + "payloads:10", "0")),
    "a ready group that is gone": ("8.0", lambda r, p: r.delete(p + "ready")),
    "a trained sample that is ready again": (
        "4.0",
        lambda r, p: r.rpush(
            p + "ready", json.dumps({"groups": [{"name": "x", "samples": ["4.0"]}], "oldest": 0, "credit": 1})
        ),
    ),
    "a batch that lacks a sample": ("6.0", lambda r, p: r.hset(p + "batch:3", "ids", "6.1 7.0 7.1")),
    "a sample in two batches": ("6.0", lambda r, p: r.hset(p + "batch:2", "ids", "4.0 4.1 5.0 5.1 6.0")),
    "a sample that says another batch": ("batch 3", _set_row("6.0", "b2:1:0")),
    "a row that is no state": ("11.0", _set_row("11.0", "trained:1:0")),
    "a sample from nowhere": ("99.0", lambda r, p: r.rpush(p + "open", "99.0")),
    "a row that is gone": ("11.0", lambda r, p: r.hdel(p + "task:11", "s0")),
    "a task that is gone": ("task 11", lambda r, p: r.delete(p + "task:11")),
    "history that is gone": ("task 0", lambda r, p: r.hdel(p + "history:0", "0")),
    "history that says another batch": ("batch 0", lambda r, p: r.hset(p + "history:0", "0", "2*b1")),
    "a durable batch of another size": ("batch 0", lambda r, p: r.hset(p + "batch_sizes", "0", 3)),
    "a train batch that is gone before a checkpoint has it": ("batch 1", lambda r, p: r.delete(p + "train_batch:1")),
    "a train batch that nobody is told of": ("batch 2", lambda r, p: r.hdel(p + "train_batches", "2")),
    "a step counted as trained that was not": ("batch 2", lambda r, p: r.hset(p + "train_batches", "2", "trained")),
    "a counter that is off": ("leased", lambda r, p: r.hincrby(p + "meta", "leased", 1)),
    "a grant that was never made": ("granted", lambda r, p: r.hincrby(p + "meta", "granted", 1)),
    "a drop that was never made": ("dropped:stale", lambda r, p: r.hincrby(p + "meta", "dropped:stale", 1)),
}


@pytest.mark.parametrize("name", TAMPERINGS)
async def test_what_is_tampered_with_is_named(ledger: Ledger, redis: Redis, experiment_name: str, name: str) -> None:
    subject, tamper = TAMPERINGS[name]
    await tamper(redis, key_prefix(experiment_name, "default"))
    audit = await ledger.audit()
    assert subject in [finding.subject for finding in audit.findings]


async def test_a_sample_that_was_trained_cannot_enter_another_batch(
    ledger: Ledger, redis: Redis, experiment_name: str
) -> None:
    entry = {"groups": [{"name": "x", "samples": ["0.0", "0.1", "1.0", "1.1"]}], "oldest": 0, "credit": 4}
    await redis.lpush(key_prefix(experiment_name, "default") + "ready", json.dumps(entry))
    await redis.hincrby(key_prefix(experiment_name, "default") + "meta", "ready_credit", 4)
    with pytest.raises(ResponseError, match=r"sample 0.0 enters batch 4 as unknown"):
        await ledger.lease_batch("", 60)


async def test_every_sample_ever_granted_is_listed_with_where_it_went(ledger: Ledger) -> None:
    records, following = await ledger.samples(0, 1000)
    assert following is None
    assert [record.sample_id for record in records] == [f"{group}.{k}" for group in range(12) for k in (0, 1)]
    assert [record.state for record in records[::2]] == [
        *["durable"] * 2, *["trained"] * 2, *["batched"] * 4, "produced", "dropped", "produced", "leased",
    ]  # fmt: skip
    assert [record.batch for record in records[:16:2]] == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_a_sample_is_found_with_its_trajectories_while_they_are_held(ledger: Ledger) -> None:
    assert await ledger.sample("0.1") == (SampleRecord("0.1", "durable", batch=0), None)
    assert await ledger.sample("6.1") == (SampleRecord("6.1", "batched", 1, batch=3), b"payload-6.1")
    assert await ledger.sample("9.0") == (SampleRecord("9.0", "dropped", drop_reason="env_error"), None)
    assert await ledger.sample("11.1") == (SampleRecord("11.1", "open"), None)
    for missing in ("99.0", "0.7", "nonsense", "x.0"):
        with pytest.raises(NotFoundError):
            await ledger.sample(missing)


async def test_pages_hold_whole_groups_and_go_on_where_the_last_ended(ledger: Ledger) -> None:
    first, following = await ledger.samples(0, 5)
    assert (len(first), following) == (6, 3)
    assert following is not None
    second, _ = await ledger.samples(following, 1000)
    assert [*first, *second] == (await ledger.samples(0, 1000))[0]
