"""The ledger against a small model: random histories with repeated requests, lost leases, killed trainers, and a Redis
that loses its last writes while everybody else remembers them.

After every move: the books balance, also when they are audited record by record, the credit holds, no sample is in two
batches, and the weights are made of the ledger's batches, each once. At the end of every history the run is brought to
its end, which must come: everything granted was trained once or dropped, and nothing but history is left in Redis.
"""

import copy
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from nexrl.errors import LeaseLostError
from nexrl_trajectory_pool.ledger import SCRIPT, Ledger
from tests.support.ledger import rules
from tests.support.ledger_model import BATCH_SIZE, GROUPINGS, LEASE_SECONDS, READINESS, REFILLS_ALL, flags, pick, seldom
from tests.support.ledger_rules import TrainerRules, WorkerRules

HISTORIES = int(os.environ.get("NEXRL_LEDGER_HISTORIES", "30"))
LONGEST_END = 500
"""Rounds in which any history must come to its end."""


class LedgerMachine(WorkerRules, TrainerRules):
    """Everyone together, on a Redis that may lose its last writes."""

    @initialize(
        grouping=st.sampled_from(sorted(GROUPINGS)),
        readiness=st.sampled_from(sorted(READINESS)),
        staleness=st.integers(0, 2),
        is_bounded_by_staleness=flags,
        positions=st.integers(1, 40),
        max_attempts=st.integers(1, 2),
        max_queued=st.integers(1, 3),
        release_incomplete=flags,
        total_steps=st.sampled_from([3, 1000]),
        max_refilled=st.sampled_from([0, 2, REFILLS_ALL]),
    )
    def begin(self, grouping: str, readiness: str, **limits: Any) -> None:
        self.grouping = grouping
        self.limits = rules(batch_size=BATCH_SIZE, **GROUPINGS[grouping], **READINESS[readiness], **limits)
        self.ledger = Ledger(self.redis, self.prefix, self.limits, lambda: self.now)
        self.ledger._script = self.redis.register_script(_with_server(SCRIPT, self.prefix + "test-server"))
        self.become_server("first")
        assert self.run(self.ledger.resume("", 0, 0)) == (1, 0)
        self.incarnation = 1
        self.save()

    @rule(ends=flags, commits=flags)
    def make_a_step(self, ends: bool, commits: bool) -> None:
        """Everybody in turn, so that a history gets anywhere."""
        self.make_a_train_batch()
        self.begin_step()
        if ends:
            self.end_step(twice=False, commits=commits)

    @rule(times=st.integers(1, 3), ends=flags)
    def fail_to_make_a_step(self, times: int, ends: bool) -> None:
        """Let training fail that many times, then train the batch that the pool has for the step."""
        self.make_a_train_batch()
        for _ in range(times):
            self.begin_step()
            self.fail_step(twice=False)
        self.begin_step()
        if ends:
            self.end_step(twice=False, commits=True)

    @rule()
    def make_a_train_batch(self) -> None:
        self.lease_tasks(6, twice=False)
        self.put_all_that_is_held(fails=False)
        self.lease_batch(worker="", twice=False)
        if self.leases:
            self.put_train_batch(len(self.leases) - 1, gives_back=False, twice=False)

    @rule()
    def save(self) -> None:
        """What Redis would have if it lost everything from here on."""
        dumps = {key: self.run(self.redis.dump(key)) for key in self.keys() if b":request:" not in key}
        self.saved.append((dumps, copy.deepcopy(self.model)))

    @rule(which=pick, happens=seldom)
    def lose_writes(self, which: int, happens: bool) -> None:
        """Redis is as it was, in a new process; workers, processors and the trainer remember what it has forgotten."""
        if not happens:
            return
        dumps, model = self.saved[which % len(self.saved)]
        self.run(self.redis.delete(*self.keys()))
        for key, dump in dumps.items():
            self.run(self.redis.restore(key, 0, dump))
        self.lives += 1
        self.become_server(f"life{self.lives}x")
        self.model = copy.deepcopy(model)
        self.requests.clear()

    def become_server(self, name: str) -> None:
        self.run(self.redis.set(self.prefix + "test-server", name))

    def keys(self) -> list[bytes]:
        keys: Any = self.run(self.redis.keys(self.prefix.replace("{", "[{]").replace("/", "[/]") + "*"))
        return list(keys)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]), tells=flags)
    def pass_time(self, seconds: float, tells: bool) -> None:
        self.now += seconds
        if tells:
            self.run(self.ledger.expire())
            self.model.expire(self.now, self.limits.max_attempts)

    @rule(which=pick)
    def repeat_an_old_request(self, which: int) -> None:
        if not self.requests:
            return
        act, answer = self.requests[which % len(self.requests)]
        try:
            assert self.run(act()) == answer
        except LeaseLostError:  # a batch whose samples are gone by now
            assert isinstance(answer, tuple)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "ledger"):
            return
        state = self.run(self.ledger.state())
        assert state.imbalance == 0
        assert all(value >= 0 for value in state.counters.values())
        used = state["granted"] - state["refunded"]
        if self.limits.is_bounded_by_staleness:
            assert used <= (self.limits.staleness + self.model.version + 1) * BATCH_SIZE
        assert used - state["taken"] <= (self.limits.total_steps - state["next_batch"]) * BATCH_SIZE
        assert (state["trained_steps"], state["durable_steps"]) == (self.model.trained_steps, self.model.durable_steps)
        steps = [self.model.batches[step] for step in range(self.model.trained_steps)]
        assert state["trained"] == sum(len(batch.trained_ids) for batch in steps)
        assert not self.run(self.ledger.audit()).findings

    @invariant()
    def the_weights_are_made_of_the_ledgers_batches_each_once(self) -> None:
        trained = [sample for samples in self.weights for sample in samples]
        assert len(trained) == len(set(trained)), "no sample is in the weights twice"
        if len(self.weights) == self.model.trained_steps:
            assert self.weights == [self.model.batches[step].trained_ids for step in range(len(self.weights))]

    def teardown(self) -> None:
        try:
            if hasattr(self, "ledger"):
                self._come_to_the_end()
        finally:
            self.runner.run(self.redis.aclose())
            self.runner.close()

    def _come_to_the_end(self) -> None:
        """Everyone does their work from here on: the history must end, with everything accounted for."""
        for _ in range(LONGEST_END):
            self.now += 2 * LEASE_SECONDS
            self.tell_version(self.model.trained_steps)  # weight sync says it again and again
            self.make_a_train_batch()
            self.begin_step()
            self.end_step(twice=False, commits=True)
            if self.model.trained_steps >= self.limits.total_steps:
                return  # what is left over is nobody's
            if self.run(self.ledger.lease_train_batch(self.model.trained_steps, self.model.incarnation))[1]:
                break
        self.checkpoint(commits=True, twice=False)
        state = self.run(self.ledger.state())
        assert state.exhausted, f"stuck: {state}"
        assert (state.in_flight, state.imbalance, state["durable"]) == (0, 0, state["trained"])
        assert state["granted"] == len(self.model.samples)
        assert state["trained"] + sum(state.dropped.values()) == len(self.model.samples)
        left = {key.decode().removeprefix(self.prefix).split(":")[0] for key in self.keys()}
        kept = {"meta", "request", "history", "batch_sizes", "dropped_batches", "lives", "last_failure", "task_rewards"}
        assert left <= {*kept, "test-server"}


def _with_server(script: str, name: str) -> str:
    """The script, as if Redis were the process whose id is in the key `name`."""
    asked = 'redis.call("INFO", "replication"):match("master_replid:(%x+)")'
    assert asked in script
    return script.replace(asked, f'redis.call("GET", "{name}")')


@pytest.mark.timeout(max(600, 10 * HISTORIES))
@pytest.mark.guide("H7", "H15", "H16", "H17")
def test_any_history_is_accounted_for_and_comes_to_an_end(redis_url: str) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(redis_url),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=HISTORIES,
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
