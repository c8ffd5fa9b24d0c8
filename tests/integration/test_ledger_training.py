"""The ledger's guarantees for batches, train batches and steps."""

from dataclasses import replace

import pytest

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, LeaseLostError
from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import Ledger, names
from tests.support.clock import Clock
from tests.support.ledger import Make, fill_batch, produced, train


async def test_a_lost_batch_is_leased_again_and_its_late_train_batch_refused(make: Make, clock: Clock) -> None:
    ledger = make()
    await fill_batch(ledger)
    late, _ = await ledger.lease_batch("", 10)
    clock.now += 11
    again, _ = await ledger.lease_batch("", 10)
    assert late is not None
    assert again is not None
    assert (again.batch, again.attempt, again.groups) == (late.batch, 2, late.groups)
    with pytest.raises(LeaseLostError):
        await ledger.put_train_batch("", late.batch, late.attempt, late.sample_ids, b"late")
    await ledger.put_train_batch("", again.batch, again.attempt, again.sample_ids, b"good")
    await ledger.put_train_batch("", again.batch, again.attempt, again.sample_ids, b"good")


@pytest.mark.guide("J3", "J14")
async def test_a_killed_trainer_replays_the_steps_that_no_checkpoint_contains(make: Make) -> None:
    ledger = make()
    first, _ = await ledger.resume("", 0, 0)
    lived = await train(ledger, first, range(4))
    await ledger.commit_checkpoint(2, first)
    second, replayed = await ledger.resume("", 2, 0)
    assert replayed == 2
    with pytest.raises(LeaseLostError):
        await ledger.ack_train_batch(2, first, ("4.0", "4.1", "5.0", "5.1"))
    assert (await ledger.state())["trained"] == 8
    assert await train(ledger, second, range(2, 6)) == [*lived[2:], "train-4", "train-5"]
    state = await ledger.state()
    assert (state["trained"], state["durable"], state.imbalance) == (24, 8, 0)


async def test_a_checkpoint_older_than_the_ledger_is_refused(make: Make) -> None:
    ledger = make()
    first, _ = await ledger.resume("", 0, 0)
    await train(ledger, first, range(3))
    await ledger.commit_checkpoint(3, first)
    with pytest.raises(FailedPreconditionError, match="from 3 to 3"):
        await ledger.resume("", 1, 0)


async def test_a_fresh_ledger_goes_on_where_a_checkpoint_of_another_run_ended(make: Make) -> None:
    ledger = make()
    incarnation, replayed = await ledger.resume("", 7, 21)
    assert replayed == 0
    grant = await ledger.lease_tasks("", 64, 60)
    assert [task.position for task in grant.tasks] == [21, 22]
    await ledger.put_samples("", produced(grant, 7))
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    assert (batch.batch, batch.data_cursor) == (7, 23)
    assert incarnation == 1


@pytest.mark.guide("E5")
async def test_the_last_batch_of_finite_data_may_be_smaller_and_then_the_data_is_exhausted(make: Make) -> None:
    ledger = make(positions=3, staleness=1)
    await fill_batch(ledger)
    sizes = []
    while True:
        batch, exhausted = await ledger.lease_batch("", 60)
        if batch is None:
            break
        sizes.append(sum(len(payloads) for _, payloads in batch.groups))
        await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, b"train")
        await ledger.ack_train_batch(batch.batch, 0, batch.sample_ids)
    assert (sizes, exhausted) == ([4, 2], True)
    assert (await ledger.lease_train_batch(2, 0)) == (None, True)


async def test_rows_are_deleted_once_their_samples_are_in_a_train_batch(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger = make()
    incarnation, _ = await ledger.resume("", 0, 0)
    await train(ledger, incarnation, range(2))
    await ledger.commit_checkpoint(2, incarnation)
    prefix = key_prefix(experiment_name, "default")
    keys = [bytes(key).decode() async for key in redis.scan_iter(match=f"*{experiment_name}*")]
    left = {key.removeprefix(prefix).split(":")[0] for key in keys}
    assert left <= {"meta", "request", "history", "batch_sizes", "lives"}


async def test_steps_are_acknowledged_one_by_one(make: Make) -> None:
    ledger = make(staleness=1)
    incarnation, _ = await ledger.resume("", 0, 0)
    await fill_batch(ledger)
    batches = []
    for _ in range(2):
        batch, _ = await ledger.lease_batch("", 60)
        assert batch is not None
        await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, b"train")
        batches.append(batch)
    with pytest.raises(LeaseLostError, match="step 0 comes next"):
        await ledger.ack_train_batch(1, incarnation, batches[1].sample_ids)
    for batch in batches:
        await ledger.ack_train_batch(batch.batch, incarnation, batch.sample_ids)
    assert (await ledger.state())["trained"] == 8


async def _train_batch(ledger: Ledger, put_id: str = "first") -> tuple[int, tuple[str, ...]]:
    """Make the train batch of step 0; return the trainer's incarnation and the batch's samples."""
    incarnation, _ = await ledger.resume("", 0, 0)
    await fill_batch(ledger)
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    await ledger.put_train_batch("", 0, 1, batch.sample_ids, b"train", put_id)
    return incarnation, batch.sample_ids


async def test_a_train_batch_that_fails_twice_is_dropped_and_its_step_still_counts(make: Make) -> None:
    ledger = make()
    incarnation, samples = await _train_batch(ledger)
    assert await ledger.fail_train_batch("once", 0, incarnation, samples, "first", b"") is False
    assert (await ledger.lease_train_batch(0, incarnation))[0] == b"train"
    for _ in range(2):  # a repeated request counts once
        assert await ledger.fail_train_batch("once", 0, incarnation, samples, "first", b"") is False
    for _ in range(2):  # without a train batch in its place, none is dropped
        assert await ledger.fail_train_batch("twice", 0, incarnation, samples, "first", b"") is None
    assert await ledger.fail_train_batch("twice", 0, incarnation, samples, "first", b"nothing")
    assert (await ledger.lease_train_batch(0, incarnation))[0] == b"nothing"
    with pytest.raises(LeaseLostError, match="put_id"):
        await ledger.ack_train_batch(0, incarnation, samples, "first")
    await ledger.ack_train_batch(0, incarnation, samples, "twice")
    state = await ledger.state()
    assert state.dropped == {"training_failed": 4}
    assert (state["trained_steps"], state["trained"], state["batched"], state.imbalance) == (1, 0, 0, 0)
    assert (await ledger.audit()).findings == ()


async def test_a_failure_before_a_step_was_trained_does_not_count_when_the_step_is_replayed(make: Make) -> None:
    ledger = make()
    incarnation, samples = await _train_batch(ledger)
    assert not await ledger.fail_train_batch("once", 0, incarnation, samples, "first", b"")
    await ledger.ack_train_batch(0, incarnation, samples, "first")
    incarnation, _ = await ledger.resume("", 0, 0)
    assert not await ledger.fail_train_batch("again", 0, incarnation, samples, "first", b"nothing")
    assert (await ledger.lease_train_batch(0, incarnation))[0] == b"train"
    assert await ledger.fail_train_batch("twice", 0, incarnation, samples, "first", b"nothing")


async def test_a_dropped_train_batch_stays_dropped_when_its_step_is_replayed_and_in_a_checkpoint(make: Make) -> None:
    ledger = make()
    incarnation, samples = await _train_batch(ledger)
    for request in ("once", "twice"):
        await ledger.fail_train_batch(request, 0, incarnation, samples, "first", b"nothing")
    await ledger.ack_train_batch(0, incarnation, samples, "twice")
    incarnation, replayed = await ledger.resume("", 0, 0)
    assert replayed == 1
    assert (await ledger.lease_train_batch(0, incarnation))[0] == b"nothing"
    await ledger.ack_train_batch(0, incarnation, samples, "twice")
    await ledger.commit_checkpoint(1, incarnation)
    state, audit = await ledger.state(), await ledger.audit()
    assert (state["trained"], state["durable"], state["payload_bytes"], state.imbalance) == (0, 0, 0, 0)
    assert (audit.findings, audit.dropped) == ((), {"training_failed": 4})
    records, _ = await ledger.samples(0, 10)
    assert {(r.state, r.drop_reason, r.batch) for r in records} == {("dropped", "training_failed", 0)}


async def test_only_the_trainer_that_has_the_ledgers_train_batch_can_report_its_failure(make: Make) -> None:
    ledger = make()
    incarnation, samples = await _train_batch(ledger)
    for step, who, ids, put_id, message in (
        (0, incarnation - 1, samples, "first", "taken over"),
        (1, incarnation, samples, "first", "no such train batch"),
        (0, incarnation, samples[1:], "first", "sample_ids"),
        (0, incarnation, samples, "other", "put_id"),
    ):
        with pytest.raises(LeaseLostError, match=message):
            await ledger.fail_train_batch("", step, who, ids, put_id, b"")
    await ledger.ack_train_batch(0, incarnation, samples, "first")
    with pytest.raises(LeaseLostError, match="step 1 comes next"):
        await ledger.fail_train_batch("", 0, incarnation, samples, "first", b"")


async def test_a_version_that_was_never_committed_is_refused_by_its_field(make: Make) -> None:
    ledger = make(staleness=1)
    await ledger.set_version(2)
    results = [replace(result, newest_version=3) for result in produced(await ledger.lease_tasks("", 2, 60))]
    for _ in range(2):  # a refusal is not remembered as the answer
        with pytest.raises(InvalidArgumentError, match=r"results\[1\]\..*policy_version: 3 was never committed"):
            await ledger.put_samples("put", [replace(results[0], newest_version=0), results[1]])
    assert (await ledger.state())["leased"] == 2
    await ledger.set_version(3)
    assert await ledger.put_samples("put", results) == ("ACCEPTED",) * 2


async def test_a_version_is_known_from_its_step_on_also_when_the_step_is_replayed(make: Make) -> None:
    ledger = make(staleness=1)
    incarnation, _ = await ledger.resume("", 0, 0)
    grant = await ledger.lease_tasks("", 2, 60)
    await train(ledger, incarnation, range(1))  # engines serve version 1 before the ledger has its commit
    await ledger.resume("", 0, 0)
    results = [replace(result, newest_version=1) for result in produced(grant)]
    assert await ledger.put_samples("", results) == ("ACCEPTED",) * 2


async def test_a_batch_ends_before_it_is_too_large_to_be_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_BATCH_BYTES", 25)
    ledger = make()
    for result in produced(await ledger.lease_tasks("", 4, 60)):
        await ledger.put_samples("", [replace(result, payload=b"x" * 10)])
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    assert batch.sample_ids == ("0.0", "0.1")
    assert (await ledger.audit()).findings == ()


async def test_a_batch_is_leased_again_to_the_worker_that_is_known_to_have_it(make: Make) -> None:
    ledger = make(staleness=1)
    await fill_batch(ledger)
    first, _ = await ledger.lease_batch("", 60, worker="trainer-0")
    assert first is not None
    other, _ = await ledger.lease_batch("", 60, worker="trainer-1")
    again, _ = await ledger.lease_batch("", 60, worker="trainer-0")
    assert again is not None
    assert other is not None
    assert (again.batch, again.attempt, again.sample_ids) == (first.batch, 2, first.sample_ids)
    assert other.batch != first.batch
    with pytest.raises(LeaseLostError):
        await ledger.put_train_batch("", first.batch, first.attempt, first.sample_ids, b"late")


async def test_a_batch_is_in_the_order_of_its_grants_whoever_was_first(make: Make) -> None:
    ledger = make(batch_size=6, group_size=3, samples_per_task=3)
    grants = [await ledger.lease_tasks("", 3, 60) for _ in range(2)]
    for result in reversed([result for grant in grants for result in produced(grant)]):
        await ledger.put_samples("", [result])
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    assert batch.sample_ids == ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2")
