"""What the coordinator decides, case by case."""

import pytest

from nexrl.errors import LeaseLostError, NotFoundError
from nexrl_weight_sync.coordinator import Coordinator
from nexrl_weight_sync.records import NO_VERSION, Cause, Outcome, Replica, State, Weights
from tests.support.weights import LEASE_SECONDS, rules

NOW = 100.0


def replica(replica_id: str = "a", holds: Weights | None = None, address: str = "") -> Replica:
    return Replica(replica_id, address or f"{replica_id}:1", "", holds or Weights())


def coordinator(*replica_ids: str, state: State | None = None, **changes: object) -> Coordinator:
    made = Coordinator(rules(**changes), state or State(), NOW)
    for replica_id in replica_ids:
        made.register(replica(replica_id), NOW)
    return made


def synced(made: Coordinator, policy_version: int, *, request_id: str = "", open_epoch: int | None = None) -> Outcome:
    weights = Weights(policy_version, f"d{policy_version}")
    made.offer(weights)
    epoch = made.state.epoch if open_epoch is None else open_epoch
    sync = made.begin(request_id or f"r{policy_version}", weights, epoch, NOW)
    made.start_verifying(sync.sync_id, NOW)
    holders = made.verify(sync.sync_id, {member.replica_id: weights.digest for member in sync.members})
    return made.commit(sync.sync_id, [member.replica_id for member in holders], NOW)


def ready_ids(made: Coordinator) -> list[str]:
    return [member.replica_id for member in made.members if made.is_ready(member)]


def test_a_replica_that_holds_the_committed_weights_is_ready_at_once() -> None:
    made = coordinator("a")
    synced(made, 3)
    made.register(replica("b", Weights(3, "d3")), NOW)
    made.register(replica("c", Weights(3, "other")), NOW)
    made.register(replica("d", Weights(2, "d2")), NOW)
    assert ready_ids(made) == ["a", "b"]


def test_an_epoch_lasts_while_the_membership_does() -> None:
    made = coordinator("a", "b")
    synced(made, 0)
    synced(made, 1)
    assert made.state.epoch == 1
    made.register(replica("c"), NOW)
    synced(made, 2)
    assert made.state.epoch == 2
    made.remove("c", "it left")
    synced(made, 3)
    assert made.state.epoch == 3


def test_a_trainer_without_an_open_group_gets_a_new_epoch() -> None:
    made = coordinator("a")
    synced(made, 0)
    synced(made, 1, open_epoch=0)
    assert made.state.epoch == 2


def test_a_version_that_the_trainers_ledger_has_lost_is_forgotten() -> None:
    made = coordinator("a", is_due=lambda policy_version: policy_version == 5)
    synced(made, 5)
    assert made.held_version == 5
    assert not made.forget_above(5)
    assert made.forget_above(4)
    assert (made.committed, made.held_version, ready_ids(made)) == (Weights(), NO_VERSION, [])
    assert synced(made, 3).committed
    assert ready_ids(made) == ["a"]


def test_a_transfer_of_what_is_forgotten_ends() -> None:
    made = coordinator("a")
    synced(made, 5)
    sync = made.begin("r", Weights(6, "d6"), made.state.epoch, NOW)
    made.forget_above(4)
    outcome = made.outcome(sync.sync_id)
    assert outcome is not None
    assert outcome.cause is Cause.SUPERSEDED


def test_an_epoch_that_was_forgotten_is_not_used_again() -> None:
    made = coordinator("a", state=State(Weights(2, "d2"), epoch=4))
    synced(made, 3, open_epoch=5)
    assert made.state.epoch == 6


def test_a_failed_transfer_is_followed_by_a_new_epoch_with_the_same_members() -> None:
    made = coordinator("a")
    synced(made, 0)
    sync = made.begin("r", Weights(1, "d1"), 1, NOW)
    assert not made.abort(sync.sync_id, Cause.BROADCAST_FAILED, "").committed
    assert ready_ids(made) == ["a"]
    assert made.begin("s", Weights(1, "d1"), 1, NOW).epoch == 2


def test_a_member_that_goes_ends_the_transfer() -> None:
    made = coordinator("a", "b")
    sync = made.begin("r", Weights(0, "d0"), 0, NOW)
    made.remove("b", "connection refused")
    assert made.sync is None
    outcome = made.outcome(sync.sync_id)
    assert outcome == Outcome(sync.sync_id, Cause.REPLICA_LEFT, "replica b: connection refused", ("b",))


def test_a_replica_that_joins_does_not_disturb_a_transfer() -> None:
    made = coordinator("a")
    sync = made.begin("r", Weights(0, "d0"), 0, NOW)
    made.register(replica("b"), NOW)
    assert made.sync == sync


def test_a_member_with_another_digest_is_put_out_and_the_others_commit() -> None:
    made = coordinator("a", "b", "c")
    sync = made.begin("r", Weights(0, "d0"), 0, NOW)
    made.start_verifying(sync.sync_id, NOW)
    holders = made.verify(sync.sync_id, {"a": "d0", "b": "flipped", "c": ""})
    assert [member.replica_id for member in holders] == ["a"]
    outcome = made.commit(sync.sync_id, ["a"], NOW)
    assert (outcome.committed, outcome.evicted) == (True, ("b", "c"))
    assert [member.replica_id for member in made.members] == ["a"]


def test_nothing_is_committed_when_no_replica_serves_it() -> None:
    made = coordinator("a")
    sync = made.begin("r", Weights(0, "d0"), 0, NOW)
    made.start_verifying(sync.sync_id, NOW)
    made.verify(sync.sync_id, {"a": "d0"})
    assert made.commit(sync.sync_id, [], NOW).cause == Cause.NOT_TAKEN
    assert made.committed == Weights()


def test_a_member_that_was_restarted_during_the_sync_is_not_taken_for_the_old_one() -> None:
    made = coordinator("a", "b")
    sync = made.begin("r", Weights(0, "d0"), 0, NOW)
    made.start_verifying(sync.sync_id, NOW)
    made.register(replica("b", address="b:2"), NOW)
    made.verify(sync.sync_id, {"a": "d0", "b": "d0"})
    made.commit(sync.sync_id, ["a", "b"], NOW)
    assert ready_ids(made) == ["a"]


def test_a_late_registration_does_not_undo_a_commit() -> None:
    made = coordinator("a")
    synced(made, 0)
    synced(made, 1)
    assert not made.register(replica("a", Weights(0, "d0")), NOW)
    assert ready_ids(made) == ["a"]


def test_a_replica_that_lost_its_weights_is_not_ready() -> None:
    made = coordinator("a")
    synced(made, 0)
    assert made.register(replica("a"), NOW)
    assert ready_ids(made) == []


def test_an_older_version_is_refused_and_the_same_may_be_published_again() -> None:
    made = coordinator("a")
    synced(made, 5)
    with pytest.raises(LeaseLostError, match="older than the committed version 5"):
        made.offer(Weights(4, "d4"))
    made.register(replica("b"), NOW)
    synced(made, 5, request_id="again")
    assert ready_ids(made) == ["a", "b"]


def test_leases_syncs_and_holds_end_at_their_deadlines() -> None:
    made = coordinator("a", is_due=lambda policy_version: True, hold_seconds=1.0, lease_seconds=5.0, sync_seconds=2.0)
    synced(made, 0)
    assert made.held_version == 0
    made.end_hold(0)
    sync = made.begin("r", Weights(1, "d1"), 1, NOW)
    assert made.expire(NOW + 2.0) == (f"sync {sync.sync_id} took too long",)
    assert made.expire(NOW + 5.0) == ("replica a is silent",)
    assert made.next_deadline() is None


def test_a_silent_replica_is_put_out_and_one_that_speaks_is_not() -> None:
    made = coordinator("a", "b")
    made.register(replica("a"), NOW + LEASE_SECONDS - 1)
    made.expire(NOW + LEASE_SECONDS)
    assert [member.replica_id for member in made.members] == ["a"]


@pytest.mark.guide("L6")
@pytest.mark.parametrize(("max_lag_steps", "blocks"), [(0, True), (1, False), (None, False)])
def test_the_gate_closes_when_the_committed_version_lags_too_far(max_lag_steps: int | None, blocks: bool) -> None:
    made = coordinator("a", max_lag_steps=max_lag_steps)
    assert made.gate() == "no policy version has been committed yet"
    synced(made, 0)
    assert made.gate() == ""
    made.offer(Weights(1, "d1"))
    assert bool(made.gate()) == blocks
    synced(made, 1)
    assert made.gate() == ""
    made.remove("a", "it left")
    assert made.gate() == ("" if max_lag_steps is None else "no replica serves the committed version 1")


@pytest.mark.guide("L11", "L12")
def test_a_validation_holds_later_versions_but_neither_rollouts_nor_a_replica_that_returns() -> None:
    made = coordinator("a", is_due=lambda policy_version: policy_version == 2)
    synced(made, 2)
    assert made.held_version == 2
    made.offer(Weights(3, "d3"))
    assert made.waiting_on(Weights(3, "d3")) == "validation"
    assert made.gate() == ""
    made.register(replica("b"), NOW)
    synced(made, 2, request_id="again")
    assert ready_ids(made) == ["a", "b"]
    assert made.held_version == 2
    assert not made.end_hold(1)
    assert made.end_hold(2)
    assert made.waiting_on(Weights(3, "d3")) == ""
    assert synced(made, 2, request_id="once more").committed
    assert made.held_version == -1  # a version is validated once


def test_after_a_restart_replicas_are_known_but_not_ready_until_they_speak() -> None:
    made = coordinator("a")
    synced(made, 4)
    restarted = coordinator(state=made.state)
    assert restarted.committed == Weights(4, "d4")
    assert [member.replica_id for member in restarted.members] == ["a"]
    assert ready_ids(restarted) == []
    restarted.register(replica("a", Weights(4, "d4")), NOW)
    assert ready_ids(restarted) == ["a"]
    assert restarted.begin("r", Weights(5, "d5"), 1, NOW).epoch == 2


def test_a_sync_that_is_neither_on_nor_the_last_is_unknown() -> None:
    made = coordinator("a")
    with pytest.raises(NotFoundError, match="'x' is not running"):
        made.outcome("x")
