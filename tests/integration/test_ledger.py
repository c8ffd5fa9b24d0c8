"""The ledger's guarantees for tasks, samples and memory, each on a real Redis with a clock that the test moves."""

from dataclasses import replace

import pytest

from nexrl.errors import ResourceExhaustedError
from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import FailedAttempt, Ledger, ProducedSample
from tests.support.clock import Clock
from tests.support.ledger import Make, fill_batch, produced, rules


@pytest.mark.guide("E4", "H13", "H14", "L13")
async def test_credit_limits_what_is_granted_to_one_batch_when_strictly_on_policy(make: Make) -> None:
    ledger = make()
    first = await ledger.lease_tasks("", 64, 60)
    assert [len(task.samples) for task in first.tasks] == [2, 2]
    second = await ledger.lease_tasks("", 64, 60)
    assert (second.tasks, second.waiting_on) == ((), "credit")
    assert await ledger.set_version(1) == 1
    assert len((await ledger.lease_tasks("", 64, 60)).tasks) == 2


@pytest.mark.guide("L3", "L15")
async def test_workers_run_ahead_by_the_staleness_threshold_and_then_wait(make: Make) -> None:
    ledger = make(staleness=2)
    assert sum(len(task.samples) for task in (await ledger.lease_tasks("", 64, 60)).tasks) == 3 * 4
    assert (await ledger.lease_tasks("", 64, 60)).waiting_on == "credit"
    await ledger.set_version(1)
    assert sum(len(task.samples) for task in (await ledger.lease_tasks("", 64, 60)).tasks) == 4


async def test_nothing_is_granted_that_no_step_would_train(make: Make) -> None:
    ledger = make(staleness=8, total_steps=2)
    granted = await ledger.lease_tasks("", 64, 60)
    assert sum(len(task.samples) for task in granted.tasks) == 2 * 4


async def test_a_repeated_lease_request_gets_the_first_answer(make: Make) -> None:
    ledger = make()
    first = await ledger.lease_tasks("same", 2, 60)
    assert await ledger.lease_tasks("same", 2, 60) == first
    assert (await ledger.state())["granted"] == 2


async def test_an_empty_answer_is_not_remembered(make: Make) -> None:
    ledger = make()
    await ledger.lease_tasks("", 64, 60)
    assert (await ledger.lease_tasks("again", 64, 60)).tasks == ()
    await ledger.set_version(1)
    assert (await ledger.lease_tasks("again", 64, 60)).tasks != ()


@pytest.mark.guide("A6", "H12")
async def test_a_lost_lease_is_granted_again_and_the_late_write_is_fenced_off(make: Make, clock: Clock) -> None:
    ledger = make()
    late = await ledger.lease_tasks("", 4, 10)
    clock.now += 11
    again = await ledger.lease_tasks("", 4, 10)
    assert [s for t in again.tasks for s in t.samples] == [(f"{g}.{k}", 2) for g in (0, 1) for k in (0, 1)]
    assert await ledger.put_samples("", produced(late)) == ("FENCED",) * 4
    assert await ledger.put_samples("", produced(again)) == ("ACCEPTED",) * 4
    assert await ledger.put_samples("", produced(again)) == ("DUPLICATE",) * 4


async def test_a_renewed_lease_is_kept(make: Make, clock: Clock) -> None:
    ledger = make()
    grant = await ledger.lease_tasks("", 2, 10)
    clock.now += 9
    assert await ledger.renew(grant.tasks[0].samples, 10) == ()
    clock.now += 9
    await ledger.expire()
    assert await ledger.put_samples("", produced(grant)) == ("ACCEPTED",) * 2


async def test_a_sample_that_fails_for_good_leaves_a_smaller_group_in_the_batch(make: Make) -> None:
    ledger = make(max_attempts=1)
    grant = await ledger.lease_tasks("", 4, 60)
    good = produced(grant)
    results = [ProducedSample("0.0", 1, failure="env_error"), *good[1:]]
    assert await ledger.put_samples("", results) == ("ACCEPTED",) * 4
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    assert [len(payloads) for _, payloads in batch.groups] == [2, 1] or [len(p) for _, p in batch.groups] == [1, 2]
    state = await ledger.state()
    assert state.dropped == {"env_error": 1}
    assert state.imbalance == 0


async def test_a_group_that_is_lost_whole_is_replaced_by_a_new_one(make: Make) -> None:
    ledger = make(max_attempts=1)
    grant = await ledger.lease_tasks("", 4, 60)
    results = [ProducedSample(s, a, failure="timeout") for s, a in grant.tasks[0].samples]
    await ledger.put_samples("", [*results, *produced(grant)[2:]])
    assert (await ledger.lease_batch("", 60))[0] is None
    refill = await ledger.lease_tasks("", 64, 60)
    assert [task.task for task in refill.tasks] == ["2"]
    await ledger.put_samples("", produced(refill))
    assert (await ledger.lease_batch("", 60))[0] is not None


async def test_incomplete_groups_are_dropped_and_refilled_when_the_policy_says_so(make: Make) -> None:
    ledger = make(max_attempts=1, release_incomplete=False)
    grant = await ledger.lease_tasks("", 4, 60)
    good = produced(grant)
    await ledger.put_samples("", [ProducedSample("0.0", 1, failure="env_error"), *good[1:]])
    assert (await ledger.lease_batch("", 60))[0] is None
    state = await ledger.state()
    assert state.dropped == {"env_error": 1, "incomplete_group": 1}
    assert (state.credit, state.imbalance) == (2, 0)


@pytest.mark.guide("H12")
async def test_a_failed_sample_is_retried_up_to_its_limit(make: Make) -> None:
    ledger = make(max_attempts=2)
    await ledger.lease_tasks("", 2, 60)
    assert await ledger.put_samples("", [ProducedSample("0.0", 1, failure="env_error")]) == ("RETRIED",)
    again = await ledger.lease_tasks("", 1, 60)
    assert again.tasks[0].samples == (("0.0", 2),)
    assert await ledger.put_samples("", [ProducedSample("0.0", 2, failure="env_error")]) == ("ACCEPTED",)


async def test_every_attempt_that_finished_is_counted_once_and_the_newest_failure_is_kept(
    make: Make, clock: Clock
) -> None:
    ledger = make(max_attempts=3)
    late = await ledger.lease_tasks("", 4, 10)
    clock.now += 11
    grant = await ledger.lease_tasks("", 4, 10)  # a lost lease is no attempt that finished
    good = produced(grant)
    results = [
        *produced(late),  # fenced off
        ProducedSample("0.0", 2, failure="reward_error", error="first"),
        ProducedSample("0.1", 2, failure="timeout", error="second"),
        ProducedSample("1.0", 2, failure="cancelled_stale", error="called off"),
        good[3],
        good[3],  # a duplicate
    ]
    for _ in range(2):
        await ledger.put_samples("repeated", results, "rollout-0")
    state = await make().state()  # another process
    assert (state["finished_attempts"], state["failed_attempts"]) == (3, 2)
    assert state.last_failure == FailedAttempt("0.1", "rollout-0", "timeout", "second")


async def test_a_ledger_without_failures_names_none(make: Make) -> None:
    ledger = make()
    await fill_batch(ledger)
    state = await ledger.state()
    assert (state["finished_attempts"], state["failed_attempts"], state.last_failure) == (4, 0, None)


@pytest.mark.guide("L3")
async def test_a_stale_group_is_dropped_and_refilled_before_a_batch_is_formed(make: Make) -> None:
    ledger = make(staleness=1, max_queued=8)
    await fill_batch(ledger)  # two batches' worth, all of version 0
    for step in range(2):
        batch, _ = await ledger.lease_batch("", 60)
        assert batch is not None
        await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, b"train")
        assert step == batch.batch
    await ledger.set_version(1)
    await fill_batch(ledger, version=0)  # a worker that still samples with version 0: too old for batch 2
    assert (await ledger.lease_batch("", 60))[0] is None
    state = await ledger.state()
    assert state.dropped == {"stale": 4}
    assert (state.credit, state.imbalance) == (4, 0)


@pytest.mark.guide("J3")
async def test_the_model_tag_decides_whose_samples_and_train_batches_these_are(
    make: Make, redis: Redis, experiment_name: str, clock: Clock
) -> None:
    default, other = make(), Ledger(redis, key_prefix(experiment_name, "other"), rules(), clock)
    await fill_batch(default)
    batch, _ = await default.lease_batch("", 60)
    assert batch is not None
    await default.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, b"train")
    assert (await other.lease_batch("", 60))[0] is None
    assert (await other.lease_train_batch(0, 0))[0] is None
    assert len((await other.lease_tasks("", 64, 60)).tasks) == 2  # its credit is its own
    assert (await default.lease_train_batch(0, 0))[0] == b"train"


@pytest.mark.guide("E8", "E9", "E10")
async def test_tasks_added_by_hand_come_before_the_data_front_first(make: Make) -> None:
    ledger = make(staleness=3)
    await ledger.add_task("", b'{"id": "b"}', front=False)
    await ledger.add_task("", b'{"id": "a"}', front=True)
    grant = await ledger.lease_tasks("", 6, 60)
    assert [task.item for task in grant.tasks] == [b'{"id": "a"}', b'{"id": "b"}', b""]


@pytest.mark.guide("E9", "G13")
async def test_samples_given_back_are_granted_next_without_a_failure(make: Make) -> None:
    ledger = make(max_attempts=1)
    grant = await ledger.lease_tasks("", 2, 60)
    assert await ledger.return_samples("", grant.tasks[0].samples) == 2
    again = await ledger.lease_tasks("", 2, 60)
    assert sorted(again.tasks[0].samples) == [("0.0", 2), ("0.1", 2)]


async def test_a_hold_stops_training_grants_until_it_is_lifted(make: Make) -> None:
    ledger = make()
    await ledger.hold(3, 60)
    assert (await ledger.lease_tasks("", 2, 60)).waiting_on == "validation"
    await ledger.unhold(3)
    assert (await ledger.lease_tasks("", 2, 60)).tasks


@pytest.mark.guide("H15")
async def test_a_hold_that_nobody_lifts_ends_by_itself(make: Make, clock: Clock) -> None:
    ledger = make()
    await ledger.hold(3, 60)
    clock.now += 61
    assert (await ledger.lease_tasks("", 2, 60)).tasks


async def test_an_id_that_is_none_changes_nothing(make: Make) -> None:
    ledger = make()
    grant = await ledger.lease_tasks("", 2, 60)
    assert await ledger.return_samples("", [*grant.tasks[0].samples, ("garbage", 1)]) == 2
    assert await ledger.renew([("garbage", 1)], 60) == ("garbage",)
    state = await ledger.state()
    assert (state["open"], state["leased"], state.imbalance) == (2, 0, 0)


async def test_ungrouped_samples_are_ready_one_by_one(make: Make) -> None:
    ledger = make(group_size=1, scoped=False, samples_per_task=3)
    grant = await ledger.lease_tasks("", 3, 60)
    for sample in produced(grant):
        await ledger.put_samples("", [ProducedSample(sample.sample_id, 1, None, sample.sample_id, 0, b"x")])
    assert (await ledger.state())["ready"] == 3
    rest = await ledger.lease_tasks("", 9, 60)
    assert sum(len(task.samples) for task in rest.tasks) == 1


async def test_payloads_beyond_the_limit_are_refused_whole_until_some_are_used_up(make: Make) -> None:
    ledger = make(staleness=9, max_payload_bytes=100)
    incarnation, _ = await ledger.resume("", 0, 0)
    grant = await ledger.lease_tasks("", 8, 60)
    results = [replace(result, payload=b"x" * 20) for result in produced(grant)]
    await ledger.put_samples("", results[:4])
    for _ in range(2):  # a refusal is not remembered as the answer
        with pytest.raises(ResourceExhaustedError, match="at most 100 may be") as refused:
            await ledger.put_samples("late", results[4:6])
    assert refused.value.retry_after_seconds == 1
    assert await ledger.put_samples("", results[:4]) == ("DUPLICATE",) * 4
    assert await ledger.put_samples("", [replace(results[7], failure="env_error", payload=b"")]) == ("RETRIED",)
    state = await ledger.state()
    assert (state["payload_bytes"], state["leased"], state.imbalance) == (80, 3, 0)
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    await ledger.put_train_batch("", 0, 1, batch.sample_ids, b"y" * 90)  # the way out is never closed
    assert (await ledger.state())["payload_bytes"] == 90
    assert await ledger.ack_train_batch(0, incarnation, batch.sample_ids), "only a checkpoint makes room"
    await ledger.commit_checkpoint(1, incarnation)
    assert (await ledger.state())["payload_bytes"] == 0
    assert await ledger.put_samples("late", results[4:6]) == ("ACCEPTED", "ACCEPTED")


async def test_a_limit_below_one_batch_does_not_stop_the_run(make: Make) -> None:
    ledger = make(max_payload_bytes=10)
    for result in produced(await ledger.lease_tasks("", 4, 60)):
        assert await ledger.put_samples("", [result]) == ("ACCEPTED",)
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None


async def test_what_is_dropped_or_granted_is_not_held_any_more(make: Make) -> None:
    ledger = make(staleness=9, max_attempts=1, release_incomplete=False, max_payload_bytes=100)
    await ledger.add_task("", b'{"id": "a"}', front=False)
    with pytest.raises(ResourceExhaustedError, match="task: 200 bytes"):
        await ledger.add_task("", b"z" * 200, front=False)
    good, bad = produced(await ledger.lease_tasks("", 2, 60))
    assert (await ledger.state())["payload_bytes"] == 0
    await ledger.put_samples("", [good])
    assert (await ledger.state())["payload_bytes"] == len(good.payload)
    await ledger.put_samples("", [replace(bad, failure="env_error", payload=b"")])
    assert (await ledger.state())["payload_bytes"] == 0
