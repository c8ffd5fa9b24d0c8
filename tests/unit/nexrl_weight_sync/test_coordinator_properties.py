"""The coordinator under any order of events: replicas that come, lie dead, return, answer late or wrongly, and crashes.

The truth is kept beside it: `held` says what the process at each address really serves. A claim may arrive late, after
newer ones. Two moments at which a late claim could not be told from a fresh one are left out: a claim is not delivered
after a crash of weight sync (its connection is gone), nor after an answer to CommitWeights was lost; the next renewal
puts right what it would do.
"""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nexrl.errors import FailedPreconditionError, LeaseLostError
from nexrl_weight_sync.coordinator import Coordinator
from nexrl_weight_sync.records import NO_VERSION, Cause, Replica, Rules, State, Sync, Weights

RULES = Rules(
    max_lag_steps=0,
    lease_seconds=10,
    sync_seconds=50,
    hold_seconds=100,
    is_due=lambda policy_version: policy_version % 2 == 0,
)
IDS = st.sampled_from(["a", "b", "c"])


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.coordinator = Coordinator(RULES, State(), self.now)
        self.held: dict[str, Weights] = {}
        self.addresses: dict[str, str] = {}
        self.late: list[Replica] = []
        self.requests = 0
        self.highest = (NO_VERSION, 0)

    def claim(self, replica_id: str) -> Replica:
        address = self.addresses[replica_id]
        return Replica(replica_id, address, "", self.held[address])

    @rule(replica_id=IDS)
    def a_replica_starts_or_starts_again(self, replica_id: str) -> None:
        self.addresses[replica_id] = f"host:{len(self.held)}"
        self.held[self.addresses[replica_id]] = Weights()

    @rule(replica_id=IDS)
    def a_replica_is_there(self, replica_id: str) -> None:
        if replica_id not in self.addresses:
            self.a_replica_starts_or_starts_again(replica_id)
        self.coordinator.register(self.claim(replica_id), self.now)

    @precondition(lambda self: self.addresses)
    @rule(data=st.data())
    def a_replica_registers(self, data: st.DataObject) -> None:
        self.coordinator.register(self.claim(data.draw(st.sampled_from(sorted(self.addresses)))), self.now)

    @precondition(lambda self: self.addresses)
    @rule(data=st.data())
    def a_registration_is_under_way(self, data: st.DataObject) -> None:
        self.late.append(self.claim(data.draw(st.sampled_from(sorted(self.addresses)))))

    @precondition(lambda self: self.late)
    @rule()
    def a_late_registration_arrives(self) -> None:
        self.coordinator.register(self.late.pop(0), self.now)

    @rule(replica_id=IDS)
    def a_replica_leaves(self, replica_id: str) -> None:
        self.coordinator.remove(replica_id, "it left")

    @rule(seconds=st.sampled_from([1.0, 9.0, 11.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.expire(self.now)

    @rule(delta=st.integers(-1, 2), digest=st.sampled_from("xy"), is_open=st.booleans())
    def the_trainer_begins_a_sync(self, delta: int, digest: str, is_open: bool) -> None:
        weights = Weights(max(0, self.coordinator.committed.policy_version + delta), digest)
        if weights.policy_version < self.coordinator.committed.policy_version:
            with pytest.raises(LeaseLostError):
                self.coordinator.offer(weights)
            return
        self.coordinator.offer(weights)
        self.requests += 1
        request_id, open_epoch = str(self.requests), self.coordinator.state.epoch if is_open else 0
        if self.coordinator.waiting_on(weights):
            with pytest.raises(FailedPreconditionError):
                self.coordinator.begin(request_id, weights, open_epoch, self.now)
            return
        sync = self.coordinator.begin(request_id, weights, open_epoch, self.now)
        assert sync.members == self.coordinator.members
        assert self.coordinator.begin(request_id, weights, open_epoch, self.now) == sync

    @rule(replica_id=IDS, digest=st.sampled_from("xy"), delta=st.integers(0, 1))
    def a_sync_goes_well(self, replica_id: str, digest: str, delta: int) -> None:
        self.a_replica_is_there(replica_id)
        committed_version = self.coordinator.committed.policy_version
        weights = Weights(max(0, committed_version + delta), digest)
        if not self.coordinator.waiting_on(weights):
            self.requests += 1
            sync = self.coordinator.begin(str(self.requests), weights, self.coordinator.state.epoch, self.now)
            self.coordinator.start_verifying(sync.sync_id, self.now)
            holders = self.coordinator.verify(sync.sync_id, {m.replica_id: digest for m in sync.members})
            assert holders == sync.members
            self.held.update({member.replica.address: weights for member in holders})
            served = [member.replica_id for member in holders]
            assert self.coordinator.commit(sync.sync_id, served, self.now).committed
            if weights.policy_version > committed_version:
                assert (self.coordinator.held_version == weights.policy_version) == RULES.is_due(weights.policy_version)
            assert all(map(self.coordinator.is_ready, self.coordinator.members))

    @precondition(lambda self: self.coordinator.sync)
    @rule()
    def the_broadcast_fails(self) -> None:
        sync = self.sync()
        outcome = self.coordinator.abort(sync.sync_id, Cause.BROADCAST_FAILED, "it failed")
        assert self.coordinator.outcome(sync.sync_id) == outcome
        assert not outcome.committed

    @precondition(lambda self: self.coordinator.sync or self.coordinator.members)
    @rule(data=st.data())
    def the_broadcast_ends(self, data: st.DataObject) -> None:
        if self.coordinator.sync is None:
            self.the_trainer_begins_a_sync(data.draw(st.integers(0, 1)), "x", is_open=True)
        if self.coordinator.sync is None:
            return
        sync = self.sync()
        names = [member.replica_id for member in sync.members]
        answers = st.sampled_from([sync.weights.digest, sync.weights.digest, "wrong", ""])
        self.coordinator.start_verifying(sync.sync_id, self.now)
        digests = {name: data.draw(answers) for name in names}
        self.meanwhile(data)
        holders = self.coordinator.verify(sync.sync_id, digests)
        assert all(digests[member.replica_id] == sync.weights.digest for member in holders)
        fates = {member: data.draw(st.sampled_from(["serves", "serves", "answer lost", "fails"])) for member in holders}
        for member, fate in fates.items():
            if fate != "fails":
                self.held[member.replica.address] = sync.weights
            if fate == "answer lost":
                self.late = [claim for claim in self.late if claim.address != member.replica.address]
        self.meanwhile(data)
        if data.draw(st.booleans(), label="weight sync survives"):
            served = [member.replica_id for member, fate in fates.items() if fate == "serves"]
            outcome = self.coordinator.commit(sync.sync_id, served, self.now)
            assert self.coordinator.outcome(sync.sync_id) == outcome
            assert outcome.committed <= bool(served)
        else:
            self.weight_sync_crashes()

    def meanwhile(self, data: st.DataObject) -> None:
        """What may happen while weight sync waits for the replicas."""
        event = data.draw(st.sampled_from(["nothing", "nothing", "restart", "leave", "late"]))
        name = data.draw(IDS)
        if event == "restart":
            self.a_replica_starts_or_starts_again(name)
            self.coordinator.register(self.claim(name), self.now)
        elif event == "leave":
            self.coordinator.remove(name, "it left")
        elif event == "late" and self.late:
            self.a_late_registration_arrives()

    @rule()
    def weight_sync_crashes(self) -> None:
        self.coordinator = Coordinator(RULES, self.coordinator.state, self.now)
        self.late.clear()

    @rule(policy_version=st.integers(-1, 6))
    def a_validation_ends(self, policy_version: int) -> None:
        held_version = self.coordinator.held_version
        assert self.coordinator.end_hold(policy_version) == (held_version == policy_version != NO_VERSION)

    def sync(self) -> Sync:
        sync = self.coordinator.sync
        assert sync is not None
        return sync

    @invariant()
    def who_is_ready_serves_the_committed_weights(self) -> None:
        for member in self.coordinator.members:
            if self.coordinator.is_ready(member):
                assert self.held[member.replica.address] == self.coordinator.committed

    @invariant()
    def version_and_epoch_never_go_back(self) -> None:
        found = (self.coordinator.committed.policy_version, self.coordinator.state.epoch)
        assert found[0] >= self.highest[0]
        assert found[1] >= self.highest[1]
        self.highest = found

    @invariant()
    def rollouts_go_on_only_with_a_ready_replica(self) -> None:
        if not self.coordinator.gate():
            assert any(map(self.coordinator.is_ready, self.coordinator.members))

    @invariant()
    def everything_that_others_wait_for_has_a_deadline(self) -> None:
        later = copy.deepcopy(self.coordinator)
        for _ in range(10):
            deadline = later.next_deadline()
            if deadline is None:
                break
            assert later.expire(deadline)
        assert (later.next_deadline(), later.sync, later.held_version, later.members) == (None, None, NO_VERSION, ())


CoordinatorMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCoordinator = CoordinatorMachine.TestCase
