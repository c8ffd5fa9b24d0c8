"""The ledger against a small model: random histories with repeated requests, lost leases and killed trainers.

After every move: the books balance, the credit holds, no sample is in two batches. At the end of every history the run
is brought to its end, which must come: everything granted was trained once or dropped, and nothing is left in Redis.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nexrl.errors import LeaseLostError
from nexrl.store import connect_redis, key_prefix
from nexrl_trajectory_pool.ledger import Grant, GrantedBatch, Ledger, ProducedSample
from tests.support.ledger import rules

ResultT = TypeVar("ResultT")
BATCH_SIZE = 4
LEASE_SECONDS = 60.0
COLOURS = ("blue", "red")
GROUPINGS = {
    "by task": {"leaf_size": 2, "scoped": True},
    "by task and colour": {"leaf_size": 2, "scoped": True},
    "by colour, across tasks": {"leaf_size": 2, "scoped": False},
    "none": {"leaf_size": 1, "scoped": False},
}
READINESS = {
    "batch_size": {"needs_size": True, "needs_idle": False},
    "loaded_batch_finished": {"needs_size": False, "needs_idle": True},
    "both": {"needs_size": True, "needs_idle": True},
}
LONGEST_END = 500
"""Rounds in which any history must come to its end."""

pick = st.integers(0, 10_000)
flags = st.booleans()


@dataclass
class Sample:
    """What the model knows of a sample."""

    attempt: int
    deadline: float
    failures: int = 0
    state: str = "leased"


@dataclass
class Batch:
    """What the model knows of a batch: once formed, its samples never change."""

    samples: tuple[bytes, ...]
    attempt: int
    deadline: float
    state: str = "leased"


@dataclass
class Model:
    """What a perfect ledger would say."""

    samples: dict[str, Sample] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    version: int = 0
    trained_steps: int = 0
    durable_steps: int = 0
    incarnation: int = 1

    def outcome(self, sample_id: str, attempt: int) -> str:
        """What a put of that attempt is worth; 'new' when it is the one that counts."""
        sample = self.samples[sample_id]
        if sample.attempt != attempt or sample.state in ("open", "dropped"):
            return "FENCED"
        return "DUPLICATE" if sample.state == "produced" else "new"

    def expire(self, now: float, max_attempts: int) -> None:
        """Leases that ran out are lost."""
        for sample in self.samples.values():
            if sample.state == "leased" and sample.deadline <= now:
                self.fail(sample, max_attempts)
        for batch in self.batches.values():
            if batch.state == "leased" and batch.deadline <= now:
                batch.state = "formed"

    def fail(self, sample: Sample, max_attempts: int) -> str:
        """An attempt failed."""
        sample.failures += 1
        sample.state = "open" if sample.failures < max_attempts else "dropped"
        return "RETRIED" if sample.state == "open" else "ACCEPTED"


class LedgerMachine(RuleBasedStateMachine):
    """Workers, processors and trainers that do anything in any order."""

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._redis = self._runner.run(connect_redis(redis_url))
        self._prefix = key_prefix(f"property-{uuid.uuid4().hex[:12]}", "default")
        self._now = 1000.0
        self._requests: list[tuple[Callable[[], Awaitable[Any]], Any]] = []
        self._grants: list[Grant] = []
        self._leases: list[GrantedBatch] = []
        self.model = Model()

    @initialize(
        grouping=st.sampled_from(sorted(GROUPINGS)),
        readiness=st.sampled_from(sorted(READINESS)),
        staleness=st.integers(0, 2),
        positions=st.integers(1, 24),
        max_attempts=st.integers(1, 2),
        max_queued=st.integers(1, 3),
        release_incomplete=flags,
        total_steps=st.sampled_from([3, 1000]),
    )
    def begin(self, grouping: str, readiness: str, **limits: Any) -> None:
        self._grouping = grouping
        self._rules = rules(batch_size=BATCH_SIZE, **GROUPINGS[grouping], **READINESS[readiness], **limits)
        self._ledger = Ledger(self._redis, self._prefix, self._rules, lambda: self._now)
        assert self._run(self._ledger.resume("", 0, 0)) == (1, 0)

    # workers

    @rule(samples=st.integers(1, 6), twice=flags)
    def lease_tasks(self, samples: int, twice: bool) -> None:
        self.model.expire(self._now, self._rules.max_attempts)
        known = dict(self.model.samples)
        grant = self._request(lambda r: self._ledger.lease_tasks(r, samples, LEASE_SECONDS), twice=twice)
        self._grants.append(grant)
        granted = [sample for task in grant.tasks for sample in task.samples]
        assert len(granted) <= samples
        for sample_id, attempt in granted:
            before = known.get(sample_id)
            assert attempt == (before.attempt + 1 if before else 1)
            assert before is None or before.state == "open"
            failures = before.failures if before else 0
            self.model.samples[sample_id] = Sample(attempt, self._now + LEASE_SECONDS, failures)

    @rule(which=pick, colour=st.sampled_from(COLOURS), age=st.integers(0, 2), fails=flags, twice=flags)
    def put(self, which: int, colour: str, age: int, fails: bool, twice: bool) -> None:
        if not (held := [(g, t, s) for g in self._grants for t in g.tasks for s in t.samples]):
            return
        _, task, (sample_id, attempt) = held[which % len(held)]
        leaf = {
            "by task": task.group,
            "by task and colour": f"{task.group}/{colour}",
            "by colour, across tasks": colour,
            "none": sample_id,
        }[self._grouping]
        result = ProducedSample(
            sample_id,
            attempt,
            "env_error" if fails else None,
            leaf,
            max(0, self.model.version - age),
            sample_id.encode(),
        )
        (outcome,) = self._request(lambda r: self._ledger.put_samples(r, [result]), twice=twice)
        expected = self.model.outcome(sample_id, attempt)
        if expected == "DUPLICATE":  # its row is gone once its batch is trained
            assert outcome in ("DUPLICATE", "FENCED")
            return
        if expected == "new":
            sample = self.model.samples[sample_id]
            expected = self.model.fail(sample, self._rules.max_attempts) if fails else "ACCEPTED"
            sample.state = "produced" if not fails else sample.state
        assert outcome == expected

    @rule(fails=flags)
    def put_all_that_is_held(self, fails: bool) -> None:
        """Colours and ages differ from sample to sample: groups stay incomplete, and some are stale."""
        held = [sample for grant in self._grants for task in grant.tasks for sample in task.samples]
        for which, (sample_id, attempt) in enumerate(held):
            sample = self.model.samples[sample_id]
            if (sample.state, sample.attempt) == ("leased", attempt):
                group, k = map(int, sample_id.split("."))
                self.put(which, COLOURS[(group + k) % 2], k * (group % 3), fails and k == 1, twice=False)

    @rule(which=pick, renews=flags, twice=flags)
    def renew_or_return(self, which: int, renews: bool, twice: bool) -> None:
        if not (held := [s for g in self._grants for t in g.tasks for s in t.samples]):
            return
        lease = held[which % len(held)]
        sample = self.model.samples[lease[0]]
        is_held = sample.state == "leased" and sample.attempt == lease[1]
        if renews:
            lost = self._run(self._ledger.renew([lease], LEASE_SECONDS))
            assert lost == (() if is_held else (lease[0],))
            sample.deadline = self._now + LEASE_SECONDS if is_held else sample.deadline
        else:
            assert self._request(lambda r: self._ledger.return_samples(r, [lease]), twice=twice) == int(is_held)
            sample.state = "open" if is_held else sample.state

    # processors

    @rule(twice=flags)
    def lease_batch(self, twice: bool) -> None:
        self.model.expire(self._now, self._rules.max_attempts)
        granted, exhausted = self._request(lambda r: self._ledger.lease_batch(r, LEASE_SECONDS), twice=twice)
        if granted is None:
            assert not any(batch.state == "formed" for batch in self.model.batches.values())
            assert not exhausted or self._is_used_up()
            return
        self._leases.append(granted)
        samples = tuple(payload for _, payloads in granted.groups for payload in payloads)
        known = self.model.batches.get(granted.batch)
        if known is None:
            assert granted.batch == len(self.model.batches), "batches are numbered without a gap"
            taken = {sample for batch in self.model.batches.values() for sample in batch.samples}
            assert not taken & set(samples), "no sample is in two batches"
            assert all(self.model.samples[sample.decode()].state == "produced" for sample in samples)
        else:
            assert (known.state, known.samples) == ("formed", samples), "a batch stays as it was formed"
        assert granted.attempt == (known.attempt + 1 if known else 1)
        self.model.batches[granted.batch] = Batch(samples, granted.attempt, self._now + LEASE_SECONDS)

    @rule(which=pick, gives_back=flags, twice=flags)
    def put_train_batch(self, which: int, gives_back: bool, twice: bool) -> None:
        if not self._leases:
            return
        lease = self._leases[which % len(self._leases)]
        batch = self.model.batches[lease.batch]
        is_owner = batch.attempt == lease.attempt

        def act(request_id: str) -> Awaitable[None]:
            if gives_back:
                return self._ledger.return_batch(request_id, lease.batch, lease.attempt)
            return self._ledger.put_train_batch(request_id, lease.batch, lease.attempt, b"|".join(batch.samples))

        if batch.state == "leased" and is_owner:
            self._request(act, twice=twice)
            batch.state = "formed" if gives_back else "acked"
        elif not gives_back and batch.state == "acked" and is_owner and lease.batch >= self.model.durable_steps:
            self._request(act, twice=twice)  # stored already, which is what was wanted
        else:
            with pytest.raises(LeaseLostError):
                self._request(act, twice=False)

    # trainers

    @rule(twice=flags, commits=flags)
    def train(self, twice: bool, commits: bool) -> None:
        step, incarnation = self.model.trained_steps, self.model.incarnation
        payload, exhausted = self._run(self._ledger.lease_train_batch(step, incarnation))
        batch = self.model.batches.get(step)
        if batch is None or batch.state != "acked":
            assert payload is None
            assert not exhausted or self._is_used_up()
            return
        assert payload == b"|".join(batch.samples), "a step is trained on its batch, also when it is replayed"
        for _ in range(1 + twice):
            self._run(self._ledger.ack_train_batch(step, incarnation))
        self.model.trained_steps += 1
        if commits:
            self._commit_version(self.model.trained_steps)

    @rule(version=st.integers(0, 100))
    def commit_version(self, version: int) -> None:
        self._commit_version(min(version, self.model.trained_steps))

    @rule(twice=flags)
    def checkpoint(self, twice: bool) -> None:
        for _ in range(1 + twice):
            self._run(self._ledger.commit_checkpoint(self.model.trained_steps, self.model.incarnation))
        self.model.durable_steps = self.model.trained_steps

    @rule(newest=flags, twice=flags)
    def restart_trainer(self, newest: bool, twice: bool) -> None:
        steps = self.model.trained_steps if newest else self.model.durable_steps
        answer = self._request(lambda r: self._ledger.resume(r, steps, 0), twice=twice)
        assert answer == (self.model.incarnation + 1, self.model.trained_steps - steps)
        self.model.incarnation, self.model.trained_steps = answer[0], steps
        for batch in self.model.batches.values():
            batch.state = "formed" if batch.state == "leased" else batch.state
        with pytest.raises(LeaseLostError):
            self._run(self._ledger.ack_train_batch(steps, answer[0] - 1))

    # everyone

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]), tells=flags)
    def pass_time(self, seconds: float, tells: bool) -> None:
        self._now += seconds
        if tells:
            self._run(self._ledger.expire())
            self.model.expire(self._now, self._rules.max_attempts)

    @rule(which=pick)
    def repeat_an_old_request(self, which: int) -> None:
        if not self._requests:
            return
        act, answer = self._requests[which % len(self._requests)]
        try:
            assert self._run(act()) == answer
        except LeaseLostError:  # a batch whose samples are gone by now
            assert isinstance(answer, tuple)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "_ledger"):
            return
        state = self._run(self._ledger.state())
        assert state.imbalance == 0
        assert all(value >= 0 for value in state.counters.values())
        used = state["granted"] - state["refunded"]
        assert used <= (self._rules.staleness + self.model.version + 1) * BATCH_SIZE
        assert used - state["taken"] <= (self._rules.total_steps - state["next_batch"]) * BATCH_SIZE
        assert (state["trained_steps"], state["durable_steps"]) == (self.model.trained_steps, self.model.durable_steps)
        steps = [self.model.batches[step] for step in range(self.model.trained_steps)]
        assert state["trained"] == sum(len(batch.samples) for batch in steps)

    def teardown(self) -> None:
        try:
            if hasattr(self, "_ledger"):
                self._come_to_the_end()
        finally:
            self._runner.run(self._redis.aclose())
            self._runner.close()

    def _come_to_the_end(self) -> None:
        """Everyone does their work from here on: the history must end, with everything accounted for."""
        for _ in range(LONGEST_END):
            self._now += 2 * LEASE_SECONDS
            self.lease_tasks(6, twice=False)
            self.put_all_that_is_held(fails=False)
            self.lease_batch(twice=False)
            if self._leases:
                self.put_train_batch(len(self._leases) - 1, gives_back=False, twice=False)
            self.train(twice=False, commits=True)
            if self.model.trained_steps >= self._rules.total_steps:
                return  # what is left over is nobody's
            if self._run(self._ledger.lease_train_batch(self.model.trained_steps, self.model.incarnation))[1]:
                break
        self.checkpoint(twice=False)
        state = self._run(self._ledger.state())
        assert state.exhausted, f"stuck: {state}"
        assert (state.in_flight, state.imbalance, state["durable"]) == (0, 0, state["trained"])
        assert state["granted"] == len(self.model.samples)
        assert state["trained"] + sum(state.dropped.values()) == len(self.model.samples)
        pattern = self._prefix.replace("{", "[{]").replace("/", "[/]") + "*"
        keys = [bytes(key).decode() for key in self._run(self._redis.keys(pattern)) if isinstance(key, bytes)]
        left = {key.removeprefix(self._prefix).split(":")[0] for key in keys}
        assert left <= {"meta", "req"}

    def _is_used_up(self) -> bool:
        batched = {sample.decode() for batch in self.model.batches.values() for sample in batch.samples}
        waiting = [s for s, sample in self.model.samples.items() if sample.state == "produced" and s not in batched]
        state = self._run(self._ledger.state())
        busy = [s for s in self.model.samples.values() if s.state in ("open", "leased")]
        # What waits and is in no batch was dropped with its group.
        dropped = state.dropped.get("stale", 0) + state.dropped.get("incomplete_group", 0)
        return not busy and len(waiting) == dropped and state["cursor"] == self._rules.positions

    def _commit_version(self, version: int) -> None:
        self.model.version = max(self.model.version, version)
        assert self._run(self._ledger.set_version(version)) == self.model.version

    def _request(self, act: Callable[[str], Awaitable[ResultT]], *, twice: bool) -> ResultT:
        request_id = uuid.uuid4().hex
        answer = self._run(act(request_id))
        if not _is_empty(answer):
            self._requests.append((lambda: act(request_id), answer))
            if twice:
                assert self._run(act(request_id)) == answer
        return answer

    def _run(self, work: Awaitable[ResultT]) -> ResultT:
        async def wait() -> ResultT:
            return await work

        return self._runner.run(wait())


def _is_empty(answer: object) -> bool:
    """An empty answer is not remembered: the request may be repeated until there is something."""
    if isinstance(answer, Grant):
        return not answer.tasks
    return isinstance(answer, tuple) and answer[0] is None


@pytest.mark.timeout(120)
@pytest.mark.guide("B3", "H1", "H7", "H15", "H16", "H17")
def test_any_history_is_accounted_for_and_comes_to_an_end(redis_url: str) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(redis_url),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
