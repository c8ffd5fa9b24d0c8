"""The ledger's guarantees, each on a real Redis with a clock that the test moves."""

import re
from dataclasses import replace

import pytest

from nexrl.errors import FailedPreconditionError, LeaseLostError, ResourceExhaustedError
from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool import ledger as ledger_module
from nexrl_trajectory_pool.ledger import Ledger, LedgerRules, ProducedSample
from tests.support.ledger import fill_batch, produced, rules


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(redis: Redis, experiment_name: str, clock: Clock) -> "Make":
    return Make(redis, experiment_name, clock)


class Make:
    """Builds ledgers over the same keys."""

    def __init__(self, redis: Redis, name: str, clock: Clock) -> None:
        self._redis, self._prefix, self._clock = redis, key_prefix(name, "default"), clock

    def __call__(self, **changes: object) -> Ledger:
        return Ledger(self._redis, self._prefix, self.rules(**changes), self._clock)

    def rules(self, **changes: object) -> LedgerRules:
        return rules(**changes)


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
    assert [task.group for task in refill.tasks] == ["2"]
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


async def _train(ledger: Ledger, incarnation: int, steps: range) -> list[str]:
    seen = []
    for step in steps:
        await ledger.set_version(step)
        await fill_batch(ledger, version=step)
        batch, _ = await ledger.lease_batch("", 60)
        if batch is not None:
            content = " ".join([f"train-{batch.batch}", *batch.sample_ids]).encode()
            await ledger.put_train_batch("", batch.batch, batch.attempt, batch.sample_ids, content)
        found, _ = await ledger.lease_train_batch(step, incarnation)
        assert found is not None
        payload, *sample_ids = found.decode().split()
        await ledger.ack_train_batch(step, incarnation, sample_ids)
        await ledger.ack_train_batch(step, incarnation, sample_ids)
        seen.append(payload)
    return seen


@pytest.mark.guide("B1", "J1", "J3")
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


@pytest.mark.guide("J3", "J14")
async def test_a_killed_trainer_replays_the_steps_that_no_checkpoint_contains(make: Make) -> None:
    ledger = make()
    first, _ = await ledger.resume("", 0, 0)
    lived = await _train(ledger, first, range(4))
    await ledger.commit_checkpoint(2, first)
    second, replayed = await ledger.resume("", 2, 0)
    assert replayed == 2
    with pytest.raises(LeaseLostError):
        await ledger.ack_train_batch(2, first, ("4.0", "4.1", "5.0", "5.1"))
    assert (await ledger.state())["trained"] == 8
    assert await _train(ledger, second, range(2, 6)) == [*lived[2:], "train-4", "train-5"]
    state = await ledger.state()
    assert (state["trained"], state["durable"], state.imbalance) == (24, 8, 0)


async def test_a_checkpoint_older_than_the_ledger_is_refused(make: Make) -> None:
    ledger = make()
    first, _ = await ledger.resume("", 0, 0)
    await _train(ledger, first, range(3))
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
    ledger = make(leaf_size=1, scoped=False, samples_per_task=3)
    grant = await ledger.lease_tasks("", 3, 60)
    for sample in produced(grant):
        await ledger.put_samples("", [ProducedSample(sample.sample_id, 1, None, sample.sample_id, 0, b"x")])
    assert (await ledger.state())["ready"] == 3
    rest = await ledger.lease_tasks("", 9, 60)
    assert sum(len(task.samples) for task in rest.tasks) == 1


async def test_rows_are_deleted_once_their_samples_are_in_a_train_batch(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger = make()
    incarnation, _ = await ledger.resume("", 0, 0)
    await _train(ledger, incarnation, range(2))
    await ledger.commit_checkpoint(2, incarnation)
    prefix = key_prefix(experiment_name, "default")
    keys = [bytes(key).decode() async for key in redis.scan_iter(match=f"*{experiment_name}*")]
    left = {key.removeprefix(prefix).split(":")[0] for key in keys}
    assert left <= {"meta", "req", "done", "sizes", "lives"}


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


# what a Redis that lost its last writes must not make anyone do


async def _become_another_server(redis: Redis, prefix: str) -> None:
    """As a Redis that was started again finds its ledger: last written by another process."""
    await redis.hset(prefix + "lives", "life", "another")


async def test_no_group_id_is_used_twice_however_far_back_redis_was_set(
    make: Make, redis: Redis, experiment_name: str
) -> None:
    ledger, prefix = make(staleness=9), key_prefix(experiment_name, "default")
    seen = set()
    for _ in range(2):
        (task,) = (await ledger.lease_tasks("", 2, 60)).tasks
        await redis.hset(prefix + "meta", "next_group", 0)  # it forgets that it granted anything
        await _become_another_server(redis, prefix)
        seen.add(task.group)
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
    assert task.group.startswith("0-")
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


async def test_a_version_from_the_future_grows_stale_like_the_newest_there_is(make: Make) -> None:
    ledger = make()
    await fill_batch(ledger, version=1_000_000)
    await ledger.lease_batch("", 60)  # batch 0, of the same two groups
    await ledger.set_version(1)
    await fill_batch(ledger, version=1_000_000)
    await ledger.set_version(2)
    formed, _ = await ledger.lease_batch("", 60)  # batch 1 is trained by step 1: fresh
    assert formed is not None
    await fill_batch(ledger, version=1_000_000)
    assert (await ledger.state())["ready"] == 4


async def test_a_batch_ends_before_it_is_too_large_to_be_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_BATCH_BYTES", 25)
    ledger = make()
    for result in produced(await ledger.lease_tasks("", 4, 60)):
        await ledger.put_samples("", [replace(result, payload=b"x" * 10)])
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    assert batch.sample_ids == ("0.0", "0.1")
    assert (await ledger.audit()).findings == ()


async def test_a_trainer_ahead_of_the_ledger_is_told_so(make: Make) -> None:
    ledger = make()
    with pytest.raises(LeaseLostError, match="only 0 steps are acknowledged"):
        await ledger.lease_train_batch(1, 0)
    with pytest.raises(LeaseLostError):
        await ledger.ack_train_batch(1, 0, ())
    await ledger.resume("", 0, 0)
    with pytest.raises(FailedPreconditionError, match="from 0 to 0"):
        await ledger.resume("", 1, 0)


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
    ledger = make(batch_size=6, leaf_size=3, samples_per_task=3)
    grants = [await ledger.lease_tasks("", 3, 60) for _ in range(2)]
    for result in reversed([result for grant in grants for result in produced(grant)]):
        await ledger.put_samples("", [result])
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    assert batch.sample_ids == ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2")


# memory


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
