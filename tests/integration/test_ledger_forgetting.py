"""What a Redis that lost its last writes must not make anyone do."""

import re
from dataclasses import replace

import pytest

from nexrl.errors import FailedPreconditionError, LeaseLostError, UnavailableError
from nexrl.store import Redis, key_prefix
from tests.support.ledger import Make, fill_batch, produced


async def _become_another_server(redis: Redis, prefix: str) -> None:
    """As a Redis that was started again finds its ledger: last written by another process."""
    await redis.hset(prefix + "lives", mapping={"life": "another", "version": "another"})


async def test_no_group_id_is_used_twice_however_far_back_redis_was_set(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger, prefix = make(staleness=9), key_prefix(experiment_name, "default")
    seen = set()
    for _ in range(2):
        (task,) = (await ledger.lease_tasks("", 2, 60)).tasks
        await redis.hset(prefix + "meta", "next_task", 0)  # it forgets that it granted anything
        await _become_another_server(redis, prefix)
        seen.add(task.task)
    assert len(seen) == 2
    first, second = sorted(seen)
    assert first == "0"
    assert re.fullmatch(r"0-[0-9a-f]{6}", second)


async def test_a_late_write_of_a_ledger_that_is_gone_is_fenced_off(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger = make()
    late = produced(await ledger.lease_tasks("", 2, 60))
    await redis.delete(*[key async for key in redis.scan_iter(match=f"*{experiment_name}*")])
    await ledger.resume("", 3, 0)  # from a checkpoint that outlived it
    (task,) = (await ledger.lease_tasks("", 2, 60)).tasks
    assert task.task.startswith("0-")
    assert await ledger.put_samples("", late) == ("FENCED", "FENCED")


async def test_a_train_batch_of_other_samples_than_the_ledgers_is_refused(make: Make) -> None:
    ledger = make()
    await fill_batch(ledger)
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    for others in (batch.sample_ids[:-1], (*batch.sample_ids, "9.0"), ("9.0", *batch.sample_ids[1:]), ()):
        with pytest.raises(LeaseLostError, match="sample_ids"):
            await ledger.put_train_batch("", batch.batch, batch.attempt, others, b"train")
    assert (await ledger.lease_train_batch(0, 0))[0] is None
    await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, b"train")


async def test_a_step_made_of_other_samples_than_the_ledgers_is_not_acknowledged(make: Make) -> None:
    ledger = make()
    await fill_batch(ledger)
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, b"train")
    with pytest.raises(LeaseLostError, match="sample_ids"):
        await ledger.ack_train_batch(0, 0, ["7.0", "7.1", "8.0", "8.1"])
    assert (await ledger.state())["trained"] == 0


async def test_a_train_batch_that_redis_forgot_is_not_the_one_made_of_the_same_samples_later(make: Make) -> None:
    ledger = make()
    incarnation, _ = await ledger.resume("", 0, 0)
    await fill_batch(ledger)
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    await ledger.put_train_batch("", 0, 1, batch.sample_ids, b"train", put_id="second")
    with pytest.raises(LeaseLostError, match="put_id"):
        await ledger.ack_train_batch(0, incarnation, batch.sample_ids, put_id="first")
    await ledger.ack_train_batch(0, incarnation, batch.sample_ids, put_id="second")


async def test_an_incarnation_that_was_given_and_forgotten_is_not_given_again(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger, prefix = make(), key_prefix(experiment_name, "default")
    await ledger.resume("", 0, 0)
    before = await redis.dump(prefix + "meta")
    forgotten, _ = await ledger.resume("", 0, 0)
    await redis.restore(prefix + "meta", 0, before or b"", replace=True)
    await _become_another_server(redis, prefix)
    await ledger.lease_tasks("", 2, 60)
    assert (await ledger.resume("", 0, 0))[0] > forgotten


async def test_a_version_that_redis_may_have_forgotten_is_accepted_once_it_is_reported_again(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger = make(staleness=1)
    await ledger.set_version(2)
    await _become_another_server(redis, key_prefix(experiment_name, "default"))
    results = [replace(result, newest_version=20) for result in produced(await ledger.lease_tasks("", 2, 60))]
    with pytest.raises(UnavailableError, match=r"policy_version: 20 was never committed.*Redis lost"):
        await ledger.put_samples("put", results)
    assert (await ledger.state())["leased"] == 2
    await ledger.set_version(20)
    assert await ledger.put_samples("put", results) == ("ACCEPTED",) * 2


async def test_a_trainer_ahead_of_the_ledger_is_told_so(make: Make) -> None:
    ledger = make()
    with pytest.raises(LeaseLostError, match="only 0 steps are acknowledged"):
        await ledger.lease_train_batch(1, 0)
    with pytest.raises(LeaseLostError):
        await ledger.ack_train_batch(1, 0, ())
    await ledger.resume("", 0, 0)
    with pytest.raises(FailedPreconditionError, match="from 0 to 0"):
        await ledger.resume("", 1, 0)
