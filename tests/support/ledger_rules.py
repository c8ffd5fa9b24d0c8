"""Actions of workers, processors and trainers on a ledger. Each rule acts, then compares the ledger with the model."""

from collections.abc import Awaitable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from nexrl.errors import FailedPreconditionError, LeaseLostError
from nexrl_trajectory_pool.ledger import Drawn, GrantedBatch, ProducedSample
from nexrl_trajectory_pool.ledger.names import MAX_TRAININGS
from tests.support.ledger_model import (
    COLOURS,
    LEASE_SECONDS,
    REFILLS_ALL,
    Batch,
    InHand,
    LedgerHistory,
    Sample,
    flags,
    pick,
    seldom,
)


class WorkerRules(LedgerHistory):
    """Workers that make any calls in any order."""

    @rule(samples=st.integers(1, 6), twice=flags, leaves_out=st.none() | st.lists(flags, max_size=4))
    def lease_tasks(self, samples: int, twice: bool, leaves_out: list[bool] | None = None) -> None:
        drawn = None
        if leaves_out is not None:
            cursor = self.run(self.ledger.cursor())
            ahead = leaves_out[: self.limits.positions - cursor]  # a sampler draws no task that is not in the data
            drawn = Drawn(cursor, [False if out else "a task" for out in ahead])
        self.model.expire(self.now, self.limits.max_attempts)
        known = dict(self.model.samples)
        grant = self.request(lambda r: self.ledger.lease_tasks(r, samples, LEASE_SECONDS, drawn), twice=twice)
        self.grants.append(grant)
        granted = [sample for task in grant.tasks for sample in task.samples]
        assert len(granted) <= samples
        for sample_id, attempt in granted:
            before = known.get(sample_id)
            assert attempt == (before.attempt + 1 if before else 1)
            assert before is None or before.state == "open"
            failures = before.failures if before else 0
            self.model.samples[sample_id] = Sample(attempt, self.now + LEASE_SECONDS, failures)

    @rule(
        which=pick,
        colour=st.sampled_from(COLOURS),
        age=st.integers(0, 2),
        reward=st.sampled_from(["0.0", "1.0"]),
        fails=flags,
        twice=flags,
    )
    def put(self, which: int, colour: str, age: int, reward: str, fails: bool, twice: bool) -> None:
        if not (held := [(g, t, s) for g in self.grants for t in g.tasks for s in t.samples]):
            return
        _, task, (sample_id, attempt) = held[which % len(held)]
        group = {
            "by task": task.task,
            "by task and colour": f"{task.task}/{colour}",
            "by colour, across tasks": colour,
            "none": sample_id,
        }[self.grouping]
        result = ProducedSample(
            sample_id,
            attempt,
            "env_error" if fails else None,
            group,
            max(0, self.model.version - age),
            sample_id.encode(),
            reward=reward,
        )
        (outcome,) = self.request(lambda r: self.ledger.put_samples(r, [result]), twice=twice)
        expected = self.model.outcome(sample_id, attempt)
        if expected == "DUPLICATE":  # the ledger deletes the sample's row when its batch is trained
            assert outcome in ("DUPLICATE", "FENCED")
            return
        if expected == "new":
            sample = self.model.samples[sample_id]
            expected = self.model.fail(sample, self.limits.max_attempts) if fails else "ACCEPTED"
            sample.state, sample.reward = (sample.state, "") if fails else ("produced", reward)
        assert outcome == expected

    @rule(fails=flags)
    def put_all_that_is_held(self, fails: bool) -> None:
        """Put all leased samples. Groups stay incomplete, are stale, or have equal rewards, each some of them."""
        held = [sample for grant in self.grants for task in grant.tasks for sample in task.samples]
        for which, (sample_id, attempt) in enumerate(held):
            sample = self.model.samples.get(sample_id)
            if sample and (sample.state, sample.attempt) == ("leased", attempt):
                group, k = (int(part.partition("-")[0]) for part in sample_id.split("."))
                reward = "1.0" if k and group % 4 else "0.0"
                self.put(which, COLOURS[(group + k) % 2], k * (group % 3), reward, fails and k == 1, twice=False)

    @rule(which=pick, renews=flags, twice=flags)
    def renew_or_return(self, which: int, renews: bool, twice: bool) -> None:
        if not (held := [s for g in self.grants for t in g.tasks for s in t.samples]):
            return
        lease = held[which % len(held)]
        sample = self.model.samples.get(lease[0]) or Sample(0, 0.0, state="unknown")
        is_held = sample.state == "leased" and sample.attempt == lease[1]
        if renews:
            lost = self.run(self.ledger.renew([lease], LEASE_SECONDS))
            assert lost == (() if is_held else (lease[0],))
            sample.deadline = self.now + LEASE_SECONDS if is_held else sample.deadline
        else:
            assert self.request(lambda r: self.ledger.return_samples(r, [lease]), twice=twice) == int(is_held)
            sample.state = "open" if is_held else sample.state


class ProcessorRules(LedgerHistory):
    """Algorithm processors that make any calls in any order."""

    @rule(worker=st.sampled_from(["", "a", "b"]), twice=flags)
    def lease_batch(self, worker: str, twice: bool) -> None:
        self.model.expire(self.now, self.limits.max_attempts)
        granted, exhausted = self.request(
            lambda r: self.ledger.lease_batch(r, LEASE_SECONDS, worker=worker), twice=twice
        )
        to_this = [b for b, batch in self.model.batches.items() if worker and batch.is_leased_to(worker)]
        if granted is None:
            assert not to_this
            assert not any(batch.state == "formed" for batch in self.model.batches.values())
            assert not exhausted or self.is_used_up()
            return
        self.leases.append(granted)
        samples = tuple(payload for _, payloads in granted.groups for payload in payloads)
        assert tuple(sample.decode() for sample in samples) == granted.sample_ids
        known = self.model.batches.get(granted.batch)
        if known is None:
            assert granted.batch == len(self.model.batches), "batches are numbered without a gap"
            taken = {sample for batch in self.model.batches.values() for sample in batch.samples}
            assert not taken & set(samples), "no sample is in two batches"
            assert all(self.model.samples[sample.decode()].state == "produced" for sample in samples)
            self.check_rewards(granted)
        else:
            assert known.samples == samples, "a batch stays as it was formed"
            assert known.state == "formed" or granted.batch in to_this
        assert not to_this or granted.batch in to_this, "a worker gets first what it is known to have"
        assert granted.attempt == (known.attempt + 1 if known else 1)
        self.model.batches[granted.batch] = Batch(
            samples, granted.sample_ids, granted.attempt, self.now + LEASE_SECONDS, worker
        )

    @rule(which=pick, gives_back=flags, twice=flags)
    def put_train_batch(self, which: int, gives_back: bool, twice: bool) -> None:
        if not self.leases:
            return
        lease = self.leases[which % len(self.leases)]
        batch = self.model.batches.get(lease.batch)
        is_owner = batch is not None and batch.attempt == lease.attempt
        is_same = batch is not None and (gives_back or batch.sample_ids == lease.sample_ids)
        train_batch = InHand(lease.sample_ids).payload

        def act(request_id: str) -> Awaitable[None]:
            if gives_back:
                return self.ledger.return_batch(request_id, lease.batch, lease.attempt)
            return self.ledger.put_train_batch(request_id, lease.batch, lease.attempt, lease.sample_ids, train_batch)

        if batch is not None and batch.state == "leased" and is_owner and is_same:
            self.request(act, twice=twice)
            batch.state = "formed" if gives_back else "acked"
        elif not gives_back and batch is not None and batch.state == "acked" and is_owner and is_same:
            if lease.batch >= self.model.durable_steps:
                self.request(act, twice=twice)  # the same train batch is already stored: the put succeeds
        else:
            with pytest.raises(LeaseLostError):
                self.request(act, twice=False)

    def check_rewards(self, batch: GrantedBatch) -> None:
        """Check that a new batch has no group of equal rewards if as many as there can be are refilled."""
        assert batch.refilled_groups <= self.limits.max_refilled
        # Groups that a smaller limit keeps may go into a later batch. Those of one task are refilled together or not.
        if self.limits.max_refilled < REFILLS_ALL or self.grouping == "by task and colour":
            return
        for _, payloads in batch.groups:
            assert len({self.model.samples[sample.decode()].reward for sample in payloads}) > 1

    def is_used_up(self) -> bool:
        batched = {sample.decode() for batch in self.model.batches.values() for sample in batch.samples}
        waiting = [s for s, sample in self.model.samples.items() if sample.state == "produced" and s not in batched]
        state = self.run(self.ledger.state())
        busy = [s for s in self.model.samples.values() if s.state in ("open", "leased")]
        # At the end, a produced sample that is in no batch was dropped with its group.
        dropped = sum(state.dropped.get(reason, 0) for reason in ("stale", "incomplete_group", "equal_rewards"))
        return not busy and len(waiting) == dropped and state["cursor"] == self.limits.positions


class TrainerRules(ProcessorRules):
    """Trainers that make any calls in any order."""

    @rule()
    def begin_step(self) -> None:
        """Lease the next train batch. The trainer keeps it until `end_step`, even if Redis loses data meanwhile."""
        step = len(self.weights)
        try:
            payload, exhausted = self.run(self.ledger.lease_train_batch(step, self.incarnation))
        except LeaseLostError:
            assert (step, self.incarnation) != (self.model.trained_steps, self.model.incarnation)
            return self.restart_trainer(newest=True, twice=False)
        if payload is None:
            batch = self.model.batches.get(step)
            assert batch is None or batch.state != "acked"
            assert not exhausted or self.is_used_up()
            return None
        self.in_hand, batch = InHand.read(payload), self.model.batches[step]
        assert self.in_hand.sample_ids == batch.sample_ids, "a step is trained on its batch, also when replayed"
        assert bool(self.in_hand.dropped_as) == batch.is_dropped
        return None

    @rule(twice=flags, commits=flags)
    def end_step(self, twice: bool, commits: bool) -> None:
        if self.in_hand is None:
            return None
        step, made, self.in_hand = len(self.weights), self.in_hand, None
        try:
            for _ in range(1 + twice):
                self.run(self.ledger.ack_train_batch(step, self.incarnation, made.sample_ids, made.dropped_as))
        except LeaseLostError:
            assert self.lives, "a ledger that forgets nothing agrees with its trainer"
            return self.restart_trainer(newest=True, twice=twice)
        self.weights.append(() if made.dropped_as else made.sample_ids)
        self.model.batches[step].failures = 0
        self.model.trained_steps += 1
        if commits:
            self.tell_version(self.model.trained_steps)
        return None

    @rule(version=st.integers(0, 100))
    def commit_version(self, version: int) -> None:
        self.tell_version(min(version, self.model.trained_steps))

    @rule(commits=flags, twice=flags)
    def checkpoint(self, commits: bool, twice: bool) -> None:
        steps = len(self.weights)
        self.checkpoints[steps] = list(self.weights)
        if not commits or (steps, self.incarnation) != (self.model.trained_steps, self.model.incarnation):
            return  # killed before the commit, or a trainer whose commit the ledger would refuse
        for _ in range(1 + twice):
            self.run(self.ledger.commit_checkpoint(steps, self.incarnation))
        self.model.durable_steps = steps

    @rule(newest=flags, twice=flags, happens=seldom)
    def restart_trainer(self, newest: bool, twice: bool, happens: bool = True) -> None:
        """Resume from the newest checkpoint that the ledger accepts. Newer checkpoints are put aside."""
        if not happens:
            return
        at_hand = sorted(self.checkpoints, reverse=True) if newest else sorted(self.checkpoints)
        for steps in at_hand:
            try:
                answer = self.request(lambda r, n=steps: self.ledger.resume(r, n, 0), twice=twice)  # type: ignore[misc]
            except FailedPreconditionError:
                assert not self.model.durable_steps <= steps <= self.model.trained_steps
                continue
            break
        assert answer[0] == self.model.incarnation + 1 or (self.lives and answer[0] > self.model.incarnation)
        assert answer[1] == self.model.trained_steps - steps
        self.in_hand = None
        self.weights = list(self.checkpoints[steps])
        self.checkpoints = {n: made for n, made in self.checkpoints.items() if n <= steps}
        self.incarnation, self.model.incarnation, self.model.trained_steps = answer[0], answer[0], steps
        for batch in self.model.batches.values():
            batch.state = "formed" if batch.state == "leased" else batch.state
        with pytest.raises(LeaseLostError):
            self.run(self.ledger.ack_train_batch(steps, answer[0] - 1, ()))

    @rule(twice=flags)
    def fail_step(self, twice: bool) -> None:
        """Report a failed training. The batch is leased again after the first failure, and dropped after the second."""
        if self.in_hand is None or self.in_hand.dropped_as:
            return None
        step, samples, self.in_hand = len(self.weights), self.in_hand.sample_ids, None

        def act(request_id: str) -> Awaitable[bool | None]:
            emptied = InHand(samples, request_id).payload
            return self.ledger.fail_train_batch(request_id, step, self.incarnation, samples, "", emptied)

        try:
            is_dropped = self.request(act, twice=twice)
        except LeaseLostError:
            assert self.lives, "a ledger that forgets nothing agrees with its trainer"
            return self.restart_trainer(newest=True, twice=twice)
        batch = self.model.batches[step]
        batch.failures += 1
        batch.is_dropped = bool(is_dropped)
        assert is_dropped == (batch.failures >= MAX_TRAININGS)
        return None

    def tell_version(self, version: int) -> None:
        self.model.version = max(self.model.version, version)
        assert self.run(self.ledger.set_version(version)) == self.model.version
