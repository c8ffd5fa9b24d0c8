"""Groups whose rewards are all equal are dropped before a batch is formed, and others are granted in their place."""

from dataclasses import replace

import pytest

from nexrl_trajectory_pool.ledger import GrantedBatch, Ledger, ProducedSample
from tests.support.clock import Clock
from tests.support.ledger import Make, fill_batch, produced, train
from tests.support.pool import Deploy, grouped

EQUAL = {"0.0": "1.0", "0.1": "1.0"}
"""The first task's rewards."""


async def lease_batch(ledger: Ledger) -> GrantedBatch:
    batch, _ = await ledger.lease_batch("", 60)
    assert batch is not None
    return batch


async def put_all(ledger: Ledger, rewards: dict[str, str], version: int = 0) -> None:
    """Lease and produce what the credit allows now, once."""
    await ledger.put_samples("", produced(await ledger.lease_tasks("", 64, 60), version, rewards))


@pytest.mark.guide("I1")
async def test_a_batch_waits_for_a_group_that_takes_the_place_of_one_of_equal_rewards(make: Make) -> None:
    ledger = make(max_refilled=9)
    await put_all(ledger, EQUAL)
    state = await ledger.state()
    assert (state.dropped, state["ready"], state.credit, state.imbalance) == ({"equal_rewards": 2}, 2, 2, 0)
    assert (await ledger.lease_batch("", 60))[0] is None
    await put_all(ledger, {})
    batch = await lease_batch(ledger)
    assert (batch.sample_ids, batch.refilled_groups) == (("1.0", "1.1", "2.0", "2.1"), 1)
    assert not (await ledger.audit()).findings
    assert (await ledger.sample("0.1"))[0].drop_reason == "equal_rewards"


async def test_without_a_limit_above_0_every_group_is_released(make: Make) -> None:
    ledger = make()
    await put_all(ledger, EQUAL)
    assert (await lease_batch(ledger)).sample_ids == ("0.0", "0.1", "1.0", "1.1")


async def test_beyond_the_limit_groups_of_equal_rewards_fill_the_batch_and_the_next_may_refill_again(
    make: Make,
) -> None:
    ledger = make(max_refilled=1, max_queued=9)
    rewards = {f"{task}.{k}": "0.0" for task in range(6) for k in (0, 1)}
    for version, kept in ((0, ("1.0", "1.1", "2.0", "2.1")), (1, ("4.0", "4.1", "5.0", "5.1"))):
        await ledger.set_version(version)
        await put_all(ledger, rewards, version)
        await put_all(ledger, rewards, version)
        batch = await lease_batch(ledger)
        assert (batch.sample_ids, batch.refilled_groups) == (kept, 1)


async def test_the_credit_of_a_dropped_group_is_returned_once(make: Make, clock: Clock) -> None:
    ledger = make(max_refilled=9)
    grant = await ledger.lease_tasks("", 2, 60)
    results = produced(grant, rewards=EQUAL)
    assert await ledger.put_samples("first", results[:1]) == ("ACCEPTED",)
    for _ in range(2):
        assert await ledger.put_samples("second", results[1:]) == ("ACCEPTED",)
    assert await ledger.put_samples("", results) == ("FENCED", "FENCED")
    clock.now += 61
    await ledger.expire()
    state = await ledger.state()
    assert (state["refunded"], state["refilled"], state.credit, state["payload_bytes"]) == (2, 1, 4, 0)
    assert (state.dropped, state.in_flight, state.imbalance) == ({"equal_rewards": 2}, 0, 0)


async def test_a_group_that_failures_left_with_equal_rewards_or_one_sample_gives_its_whole_credit_back(
    make: Make,
) -> None:
    ledger = make(max_refilled=9, max_attempts=1)
    grant = await ledger.lease_tasks("", 2, 60)
    await ledger.put_samples("", [*produced(grant)[:1], ProducedSample("0.1", 1, failure="timeout")])
    state = await ledger.state()
    assert (state.dropped, state.credit) == ({"equal_rewards": 1, "timeout": 1}, 4)


@pytest.mark.parametrize(("blue", "ready", "dropped"), [("0.0", 0, {"equal_rewards": 4}), ("0.5", 4, {})])
async def test_groups_of_one_task_are_refilled_together_or_not_at_all(
    make: Make, blue: str, ready: int, dropped: dict[str, int]
) -> None:
    ledger = make(max_refilled=9, samples_per_task=4, group_size=4)
    grant = await ledger.lease_tasks("", 4, 60)
    colours = [("red", "1.0"), ("red", "1.0"), ("blue", "0.0"), ("blue", blue)]
    results = [
        replace(result, group=colour, reward=reward)
        for result, (colour, reward) in zip(produced(grant), colours, strict=True)
    ]
    await ledger.put_samples("", results)
    state = await ledger.state()
    assert (state["ready"], state.dropped, state["refunded"], state.imbalance) == (ready, dropped, 4 - ready, 0)


async def test_groups_that_span_tasks_are_refilled(make: Make) -> None:
    ledger = make(max_refilled=9, scoped=False)
    grant = await ledger.lease_tasks("", 4, 60)
    names = {"0.0": "even", "0.1": "odd", "1.0": "even", "1.1": "odd"}
    rewards = {"0.0": "1.0", "1.0": "1.0"}
    results = [replace(result, group=names[result.sample_id]) for result in produced(grant, rewards=rewards)]
    await ledger.put_samples("", results[:3])
    state = await ledger.state()
    assert (state.dropped, state.credit, state["grouping"]) == ({"equal_rewards": 2}, 2, 1)
    await ledger.put_samples("", results[3:])
    state = await ledger.state()
    assert (state["ready"], state.imbalance) == (2, 0)
    assert not (await ledger.audit()).findings


async def test_an_unknown_reward_equals_none(make: Make) -> None:
    before = make()  # put before the experiment said refill
    grant = await before.lease_tasks("", 2, 60)
    results = produced(grant, rewards=EQUAL)
    await before.put_samples("", results[:1])
    after = make(max_refilled=9)
    await after.put_samples("", results[1:])
    assert (await after.state())["ready"] == 2


async def test_samples_of_a_validation_are_all_kept(make: Make) -> None:
    ledger = make(unlimited=True, scoped=False, group_size=1, max_refilled=9, positions=1)
    await ledger.begin_round(0)
    grant = await ledger.lease_tasks("", 2, 60)
    results = [ProducedSample(s, a, None, None, 0, b"x", reward="1.0") for s, a in grant.tasks[0].samples]
    await ledger.put_samples("", results)
    assert await ledger.produced() == [b"x", b"x"]


async def test_a_run_ends_when_its_data_ends_in_groups_of_equal_rewards(make: Make) -> None:
    ledger = make(max_refilled=9, positions=1)
    await put_all(ledger, EQUAL)
    assert await ledger.lease_batch("", 60) == (None, True)


async def test_a_replayed_step_is_made_of_the_same_groups(make: Make) -> None:
    ledger = make(max_refilled=9)
    incarnation, _ = await ledger.resume("", 0, 0)
    await put_all(ledger, EQUAL)
    seen = await train(ledger, incarnation, range(2))
    again, replayed = await ledger.resume("", 0, 0)
    assert replayed == 2
    assert await train(ledger, again, range(2)) == seen
    await fill_batch(ledger)
    assert not (await ledger.audit()).findings


@pytest.mark.guide("I1")
async def test_groups_of_equal_rewards_are_refilled_up_to_the_limit_that_the_experiment_names(deploy: Deploy) -> None:
    pool = await deploy(algorithm={"zeroVarianceGroups": "refill", "refillLimit": 1})
    await pool.fill()  # all rewards are 1
    assert dict((await pool.state()).dropped) == {"equal_rewards": 4}  # the limit: as many groups as a batch has
    batch = (await pool.lease_batch()).lease
    assert (batch.refilled_groups, list(grouped(batch))) == (2, ["2", "3"])


@pytest.mark.guide("I1")
async def test_groups_of_equal_rewards_are_not_refilled_unless_the_experiment_says_so(deploy: Deploy) -> None:
    pool = await deploy()
    await pool.fill()
    assert (await pool.lease_batch()).lease.refilled_groups == 0
    assert not (await pool.state()).dropped
