"""The ledger against a small model: random histories with repeated requests, lost leases, killed trainers, and a Redis
that loses its last writes while everybody else remembers them.

After every move: the books balance, also when they are audited record by record, the credit holds, no sample is in two
batches, and the weights are made of the ledger's batches, each once. At the end of every history the run is brought to
its end, which must come: everything granted was trained once or dropped, and nothing but history is left in Redis.
"""

import asyncio
import copy
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nexrl.errors import FailedPreconditionError, LeaseLostError
from nexrl.store import connect_redis, key_prefix
from nexrl_trajectory_pool.ledger import SCRIPT, Grant, GrantedBatch, Ledger, ProducedSample
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
seldom = st.integers(0, 5).map(lambda n: n == 5)
"""What throws a history back: often enough to happen, seldom enough to let it get somewhere."""


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
    sample_ids: tuple[str, ...]
    attempt: int
    deadline: float
    worker: str
    state: str = "leased"

    def is_leased_to(self, worker: str) -> bool:
        """True while `worker` holds it."""
        return (self.state, self.worker) == ("leased", worker)


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
        sample = self.samples.get(sample_id)
        if sample is None or sample.attempt != attempt or sample.state in ("open", "dropped"):
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
        self._saved: list[tuple[dict[bytes, Any], Model]] = []
        self._lives = 0
        self.model = Model()
        # The trainer's side, which no Redis can make forget: the samples of each step that its weights contain.
        self._weights: list[tuple[str, ...]] = []
        self._in_hand: tuple[str, ...] | None = None
        self._checkpoints: dict[int, list[tuple[str, ...]]] = {0: []}

    @initialize(
        grouping=st.sampled_from(sorted(GROUPINGS)),
        readiness=st.sampled_from(sorted(READINESS)),
        staleness=st.integers(0, 2),
        positions=st.integers(1, 40),
        max_attempts=st.integers(1, 2),
        max_queued=st.integers(1, 3),
        release_incomplete=flags,
        total_steps=st.sampled_from([3, 1000]),
    )
    def begin(self, grouping: str, readiness: str, **limits: Any) -> None:
        self._grouping = grouping
        self._rules = rules(batch_size=BATCH_SIZE, **GROUPINGS[grouping], **READINESS[readiness], **limits)
        self._ledger = Ledger(self._redis, self._prefix, self._rules, lambda: self._now)
        self._ledger._script = self._redis.register_script(_with_server(SCRIPT, self._prefix + "test-server"))
        self._become_server("first")
        assert self._run(self._ledger.resume("", 0, 0)) == (1, 0)
        self._incarnation = 1
        self.save()

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
            sample = self.model.samples.get(sample_id)
            if sample and (sample.state, sample.attempt) == ("leased", attempt):
                group, k = (int(part.partition("-")[0]) for part in sample_id.split("."))
                self.put(which, COLOURS[(group + k) % 2], k * (group % 3), fails and k == 1, twice=False)

    @rule(which=pick, renews=flags, twice=flags)
    def renew_or_return(self, which: int, renews: bool, twice: bool) -> None:
        if not (held := [s for g in self._grants for t in g.tasks for s in t.samples]):
            return
        lease = held[which % len(held)]
        sample = self.model.samples.get(lease[0]) or Sample(0, 0.0, state="unknown")
        is_held = sample.state == "leased" and sample.attempt == lease[1]
        if renews:
            lost = self._run(self._ledger.renew([lease], LEASE_SECONDS))
            assert lost == (() if is_held else (lease[0],))
            sample.deadline = self._now + LEASE_SECONDS if is_held else sample.deadline
        else:
            assert self._request(lambda r: self._ledger.return_samples(r, [lease]), twice=twice) == int(is_held)
            sample.state = "open" if is_held else sample.state

    # processors

    @rule(worker=st.sampled_from(["", "a", "b"]), twice=flags)
    def lease_batch(self, worker: str, twice: bool) -> None:
        self.model.expire(self._now, self._rules.max_attempts)
        granted, exhausted = self._request(
            lambda r: self._ledger.lease_batch(r, LEASE_SECONDS, worker=worker), twice=twice
        )
        to_this = [b for b, batch in self.model.batches.items() if worker and batch.is_leased_to(worker)]
        if granted is None:
            assert not to_this
            assert not any(batch.state == "formed" for batch in self.model.batches.values())
            assert not exhausted or self._is_used_up()
            return
        self._leases.append(granted)
        samples = tuple(payload for _, payloads in granted.groups for payload in payloads)
        assert tuple(sample.decode() for sample in samples) == granted.sample_ids
        known = self.model.batches.get(granted.batch)
        if known is None:
            assert granted.batch == len(self.model.batches), "batches are numbered without a gap"
            taken = {sample for batch in self.model.batches.values() for sample in batch.samples}
            assert not taken & set(samples), "no sample is in two batches"
            assert all(self.model.samples[sample.decode()].state == "produced" for sample in samples)
        else:
            assert known.samples == samples, "a batch stays as it was formed"
            assert known.state == "formed" or granted.batch in to_this
        assert not to_this or granted.batch in to_this, "a worker gets first what it is known to have"
        assert granted.attempt == (known.attempt + 1 if known else 1)
        self.model.batches[granted.batch] = Batch(
            samples, granted.sample_ids, granted.attempt, self._now + LEASE_SECONDS, worker
        )

    @rule(which=pick, gives_back=flags, twice=flags)
    def put_train_batch(self, which: int, gives_back: bool, twice: bool) -> None:
        if not self._leases:
            return
        lease = self._leases[which % len(self._leases)]
        batch = self.model.batches.get(lease.batch)
        is_owner = batch is not None and batch.attempt == lease.attempt
        is_same = batch is not None and (gives_back or batch.sample_ids == lease.sample_ids)
        train_batch = "|".join(lease.sample_ids).encode()

        def act(request_id: str) -> Awaitable[None]:
            if gives_back:
                return self._ledger.return_batch(request_id, lease.batch, lease.attempt)
            return self._ledger.put_train_batch(request_id, lease.batch, lease.attempt, lease.sample_ids, train_batch)

        if batch is not None and batch.state == "leased" and is_owner and is_same:
            self._request(act, twice=twice)
            batch.state = "formed" if gives_back else "acked"
        elif not gives_back and batch is not None and batch.state == "acked" and is_owner and is_same:
            if lease.batch >= self.model.durable_steps:
                self._request(act, twice=twice)  # stored already, which is what was wanted
        else:
            with pytest.raises(LeaseLostError):
                self._request(act, twice=False)

    @rule(ends=flags, commits=flags)
    def make_a_step(self, ends: bool, commits: bool) -> None:
        """Everybody in turn, so that a history gets anywhere."""
        self.make_a_train_batch()
        self.begin_step()
        if ends:
            self.end_step(twice=False, commits=commits)

    @rule()
    def make_a_train_batch(self) -> None:
        self.lease_tasks(6, twice=False)
        self.put_all_that_is_held(fails=False)
        self.lease_batch(worker="", twice=False)
        if self._leases:
            self.put_train_batch(len(self._leases) - 1, gives_back=False, twice=False)

    # the trainer

    @rule()
    def begin_step(self) -> None:
        """The trainer has what it trains on in hand until it has acknowledged it, whatever Redis forgets meanwhile."""
        step = len(self._weights)
        try:
            payload, exhausted = self._run(self._ledger.lease_train_batch(step, self._incarnation))
        except LeaseLostError:
            assert (step, self._incarnation) != (self.model.trained_steps, self.model.incarnation)
            return self.restart_trainer(newest=True, twice=False)
        if payload is None:
            batch = self.model.batches.get(step)
            assert batch is None or batch.state != "acked"
            assert not exhausted or self._is_used_up()
            return None
        self._in_hand = tuple(payload.decode().split("|"))
        assert self._in_hand == self.model.batches[step].sample_ids, (
            "a step is trained on its batch, also when replayed"
        )
        return None

    @rule(twice=flags, commits=flags)
    def end_step(self, twice: bool, commits: bool) -> None:
        if self._in_hand is None:
            return None
        step, samples, self._in_hand = len(self._weights), self._in_hand, None
        try:
            for _ in range(1 + twice):
                self._run(self._ledger.ack_train_batch(step, self._incarnation, samples))
        except LeaseLostError:
            assert self._lives, "a ledger that forgets nothing agrees with its trainer"
            return self.restart_trainer(newest=True, twice=twice)
        self._weights.append(samples)
        self.model.trained_steps += 1
        if commits:
            self._commit_version(self.model.trained_steps)
        return None

    @rule(version=st.integers(0, 100))
    def commit_version(self, version: int) -> None:
        self._commit_version(min(version, self.model.trained_steps))

    @rule(commits=flags, twice=flags)
    def checkpoint(self, commits: bool, twice: bool) -> None:
        steps = len(self._weights)
        self._checkpoints[steps] = list(self._weights)
        if not commits or (steps, self._incarnation) != (self.model.trained_steps, self.model.incarnation):
            return  # killed before it could tell, or another that will be told so
        for _ in range(1 + twice):
            self._run(self._ledger.commit_checkpoint(steps, self._incarnation))
        self.model.durable_steps = steps

    @rule(newest=flags, twice=flags, happens=seldom)
    def restart_trainer(self, newest: bool, twice: bool, happens: bool = True) -> None:
        """From the newest checkpoint that the ledger can follow; those ahead of it are put aside."""
        if not happens:
            return
        at_hand = sorted(self._checkpoints, reverse=True) if newest else sorted(self._checkpoints)
        for steps in at_hand:
            try:
                answer = self._request(lambda r, n=steps: self._ledger.resume(r, n, 0), twice=twice)  # type: ignore[misc]
            except FailedPreconditionError:
                assert not self.model.durable_steps <= steps <= self.model.trained_steps
                continue
            break
        assert answer[0] == self.model.incarnation + 1 or (self._lives and answer[0] > self.model.incarnation)
        assert answer[1] == self.model.trained_steps - steps
        self._in_hand = None
        self._weights = list(self._checkpoints[steps])
        self._checkpoints = {n: made for n, made in self._checkpoints.items() if n <= steps}
        self._incarnation, self.model.incarnation, self.model.trained_steps = answer[0], answer[0], steps
        for batch in self.model.batches.values():
            batch.state = "formed" if batch.state == "leased" else batch.state
        with pytest.raises(LeaseLostError):
            self._run(self._ledger.ack_train_batch(steps, answer[0] - 1, ()))

    # Redis

    @rule()
    def save(self) -> None:
        """What Redis would have if it lost everything from here on."""
        dumps = {key: self._run(self._redis.dump(key)) for key in self._keys() if b":req:" not in key}
        self._saved.append((dumps, copy.deepcopy(self.model)))

    @rule(which=pick, happens=seldom)
    def lose_writes(self, which: int, happens: bool) -> None:
        """Redis is as it was, in a new process; workers, processors and the trainer remember what it has forgotten."""
        if not happens:
            return
        dumps, model = self._saved[which % len(self._saved)]
        self._run(self._redis.delete(*self._keys()))
        for key, dump in dumps.items():
            self._run(self._redis.restore(key, 0, dump))
        self._lives += 1
        self._become_server(f"life{self._lives}x")
        self.model = copy.deepcopy(model)
        self._requests.clear()

    def _become_server(self, name: str) -> None:
        self._run(self._redis.set(self._prefix + "test-server", name))

    def _keys(self) -> list[bytes]:
        keys: Any = self._run(self._redis.keys(self._prefix.replace("{", "[{]").replace("/", "[/]") + "*"))
        return list(keys)

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
        assert not self._run(self._ledger.audit()).findings

    @invariant()
    def the_weights_are_made_of_the_ledgers_batches_each_once(self) -> None:
        trained = [sample for samples in self._weights for sample in samples]
        assert len(trained) == len(set(trained)), "no sample is in the weights twice"
        if len(self._weights) == self.model.trained_steps:
            assert self._weights == [self.model.batches[step].sample_ids for step in range(len(self._weights))]

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
            self._commit_version(self.model.trained_steps)  # weight sync says it again and again
            self.make_a_train_batch()
            self.begin_step()
            self.end_step(twice=False, commits=True)
            if self.model.trained_steps >= self._rules.total_steps:
                return  # what is left over is nobody's
            if self._run(self._ledger.lease_train_batch(self.model.trained_steps, self.model.incarnation))[1]:
                break
        self.checkpoint(commits=True, twice=False)
        state = self._run(self._ledger.state())
        assert state.exhausted, f"stuck: {state}"
        assert (state.in_flight, state.imbalance, state["durable"]) == (0, 0, state["trained"])
        assert state["granted"] == len(self.model.samples)
        assert state["trained"] + sum(state.dropped.values()) == len(self.model.samples)
        left = {key.decode().removeprefix(self._prefix).split(":")[0] for key in self._keys()}
        assert left <= {"meta", "req", "done", "sizes", "lives", "test-server"}

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


def _with_server(script: str, name: str) -> str:
    """The script, as if Redis were the process whose id is in the key `name`."""
    asked = 'redis.call("INFO", "replication"):match("master_replid:(%x+)")'
    assert asked in script
    return script.replace(asked, f'redis.call("GET", "{name}")')


def _is_empty(answer: object) -> bool:
    """An empty answer is not remembered: the request may be repeated until there is something."""
    if isinstance(answer, Grant):
        return not answer.tasks
    return isinstance(answer, tuple) and answer[0] is None


@pytest.mark.timeout(300)
@pytest.mark.guide("B3", "H1", "H7", "H15", "H16", "H17")
def test_any_history_is_accounted_for_and_comes_to_an_end(redis_url: str) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(redis_url),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=80,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_a_step_in_hand_while_redis_forgets_its_batch_and_forms_another_is_not_in_the_weights(redis_url: str) -> None:
    history = LedgerMachine(redis_url)  # a history that chance seldom finds
    history.begin(
        grouping="by task",
        readiness="batch_size",
        staleness=0,
        positions=24,
        max_attempts=2,
        max_queued=2,
        release_incomplete=True,
        total_steps=1000,
    )
    history.make_a_step(ends=False, commits=False)
    history.lose_writes(which=0, happens=True)
    history.make_a_train_batch()
    history.end_step(twice=False, commits=True)
    history.the_books_balance()
    history.the_weights_are_made_of_the_ledgers_batches_each_once()
    history.teardown()
