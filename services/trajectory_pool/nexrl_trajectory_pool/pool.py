"""The pools of one model tag: its training ledger, its validation ledger, its data, and the waits on them."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from nexrl.datasets import Task, TaskSource
from nexrl.errors import InvalidArgumentError, NotFoundError, UnavailableError
from nexrl.spec import ExperimentSpec
from nexrl.spec.experiment import ModelSpec
from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import UNLIMITED, Grant, GrantedBatch, GrantedTask, Ledger, LedgerRules
from nexrl_trajectory_pool.wakeups import WakeUps

MAX_SLEEP_SECONDS = 1.0
BATCH_LEASE_SECONDS = 3600.0
"""Long, since preparing a batch may be: what a dead trainer held is taken back when it resumes, not by a deadline."""
HOLD_MARGIN_SECONDS = 60.0
"""Time in which a validation may be ended after its own limit, before training goes on without being told."""
MAX_LEASE_SECONDS = 86_400.0


@dataclass(frozen=True)
class Lease:
    """A granted task with its item (JSON)."""

    task_id: str
    item_json: str
    granted: GrantedTask
    is_validation: bool


@dataclass(frozen=True)
class LeasedTasks:
    """Answer to Pool.lease_tasks; `deadline` in Unix seconds."""

    leases: tuple[Lease, ...]
    deadline: float
    waiting_on: str
    exhausted: bool


class Pool:
    """The pools of one model tag. Holds no state of its own: any number of processes may serve the same one."""

    def __init__(
        self,
        redis: Redis,
        experiment: str,
        spec: ExperimentSpec,
        train: TaskSource,
        validation: TaskSource | None,
        room_bytes: int,
    ) -> None:
        self.tag = spec.model.tag
        self.spec = spec
        prefix = key_prefix(experiment, self.tag)
        rules = training_rules(spec, train)
        rules = replace(rules, max_payload_bytes=min(rules.max_payload_bytes, room_bytes))
        self.training = Ledger(redis, prefix, rules)
        self.validation = Ledger(redis, prefix + "val:", validation_rules(spec, validation))
        self.wakeups = WakeUps(redis, [self.training.wake_channel, self.validation.wake_channel])
        self.vocabulary_size = vocabulary_size(spec.model)
        self.validation_seconds = spec.validation.timeout_seconds if spec.validation else 0.0
        self._train = train
        self._validation = validation

    def source(self, is_validation: bool) -> TaskSource:
        """The data of one purpose. Raises NotFoundError when the experiment has no validation."""
        if not is_validation:
            return self._train
        if self._validation is None:
            raise NotFoundError("purpose: VALIDATION: the experiment has no section validation")
        return self._validation

    def ledger(self, is_validation: bool) -> Ledger:
        """The ledger of one purpose."""
        return self.validation if is_validation else self.training

    def lease_seconds(self, asked: float) -> float:
        """The length of a lease; 0 asks for the experiment's setting. Raises InvalidArgumentError out of bounds."""
        if not 0 <= asked <= MAX_LEASE_SECONDS:
            raise InvalidArgumentError(
                f"lease_seconds: {asked}; 0 to {MAX_LEASE_SECONDS:.0f}, 0 for the experiment's setting"
            )
        return asked or self.spec.rollout.lease_seconds

    async def lease_tasks(
        self, request_id: str, max_samples: int, lease_seconds: float, wait_seconds: float
    ) -> LeasedTasks:
        """Grant samples, those of a running validation round before all others; waits while there are none."""
        seconds = self.lease_seconds(lease_seconds)

        async def attempt() -> tuple[LeasedTasks, bool]:
            grant = await self.training.lease_tasks(request_id, max_samples, seconds)
            if grant.waiting_on != "validation":
                return self._with_items(grant, is_validation=False), bool(grant.tasks) or grant.exhausted
            grant = await self.validation.lease_tasks(request_id, max_samples, seconds)
            return self._with_items(replace(grant, exhausted=False), is_validation=True), bool(grant.tasks)

        return await self.wakeups.until("tasks", attempt, wait_seconds)

    async def lease_batch(
        self, request_id: str, batch_size: int, lease_seconds: float, wait_seconds: float, worker: str = ""
    ) -> tuple[GrantedBatch | None, bool]:
        """Lease a batch, waiting until one is ready; also tells whether none can come any more."""
        if batch_size < 0:
            raise InvalidArgumentError(f"batch_size: {batch_size}; 0 for the experiment's setting, or more")
        seconds = self.lease_seconds(lease_seconds) if lease_seconds else BATCH_LEASE_SECONDS

        async def attempt() -> tuple[tuple[GrantedBatch | None, bool], bool]:
            batch, exhausted = await self.training.lease_batch(request_id, seconds, batch_size, worker)
            return (batch, exhausted), batch is not None or exhausted

        return await self.wakeups.until("batch", attempt, wait_seconds, kind=batch_size)

    async def lease_train_batch(self, step: int, incarnation: int, wait_seconds: float) -> tuple[bytes | None, bool]:
        """The train batch of `step`, waiting until it is there; also tells whether none can come any more."""

        async def attempt() -> tuple[tuple[bytes | None, bool], bool]:
            payload, exhausted = await self.training.lease_train_batch(step, incarnation)
            return (payload, exhausted), payload is not None or exhausted

        return await self.wakeups.until("train", attempt, wait_seconds, kind=(step, incarnation))

    async def start_validation(self, version: int) -> int:
        """Begin a round; gives its number of samples. Raises FailedPreconditionError while another round runs."""
        samples = len(self.source(True)) * self.validation.rules.samples_per_task
        await self.validation.begin_round(version)
        await self.training.hold(version, self.validation_seconds + HOLD_MARGIN_SECONDS)
        return samples

    async def wait_validation(self, version: int, wait_seconds: float) -> tuple[bool, list[bytes], int]:
        """Wait until every sample of the round has ended; gives (complete, payloads of produced samples, failed)."""

        async def attempt() -> tuple[tuple[bool, list[bytes], int], bool]:
            state = await self.validation.state()
            if state.round != version:
                raise NotFoundError(f"policy_version: {version} is not being validated")
            if not state.exhausted:
                return (False, [], 0), False
            return (True, await self.validation.produced(), sum(state.dropped.values())), True

        return await self.wakeups.until("ended", attempt, wait_seconds, kind=version)

    async def end_validation(self, version: int) -> None:
        """End the round and grant training samples again."""
        await self.validation.end_round(version)
        await self.training.unhold(version)

    async def expire_leases(self) -> None:
        """Take back leases as they run out, for as long as the task lives."""
        while True:
            due: list[float | None] = []
            with suppress(UnavailableError):  # a Redis that is away expires nothing, and comes back
                due = [await self.training.expire(), await self.validation.expire()]
            # A lease may be granted while this sleeps, and may be short: hence the bound.
            await asyncio.sleep(min([MAX_SLEEP_SECONDS, *(d for d in due if d is not None)]))

    def task(self, is_validation: bool, position: int) -> Task:
        """The item at `position` of the sequence of all epochs."""
        source = self.source(is_validation)
        return source.task(*source.locate(position))

    def _with_items(self, grant: Grant, *, is_validation: bool) -> LeasedTasks:
        leases = []
        for granted in grant.tasks:
            task = json.loads(granted.item) if granted.item else self.task(is_validation, granted.position)
            leases.append(Lease(str(task["id"]), json.dumps(task), granted, is_validation))
        return LeasedTasks(tuple(leases), grant.deadline, grant.waiting_on, grant.exhausted)


def vocabulary_size(model: ModelSpec) -> int | None:
    """Token ids are below it; None where only the model's own library can tell (a GGUF file)."""
    if model.scratch is not None:
        return model.scratch.vocabulary_size
    config = Path(model.path or "") / "config.json"
    size: int | None = json.loads(config.read_text()).get("vocab_size") if config.is_file() else None
    return size


def training_rules(spec: ExperimentSpec, source: TaskSource) -> LedgerRules:
    """What the experiment asks of the training ledger."""
    pool = spec.trajectory_pool
    return LedgerRules(
        batch_size=pool.batch_size,
        leaf_size=pool.group_size if pool.key_list else 1,
        samples_per_task=pool.group_size,
        positions=UNLIMITED if source.total is None else source.total,
        staleness=spec.weight_sync.staleness_threshold,
        scoped="task_id" in pool.key_list,
        release_incomplete=pool.incomplete_groups == "release",
        max_attempts=spec.rollout.max_attempts,
        max_queued=spec.train_batch_pool.max_queued,
        max_payload_bytes=pool.max_payload_bytes,
        total_steps=spec.trainer.steps,
        needs_size=pool.readiness != "loaded_batch_finished",
        needs_idle=pool.readiness != "batch_size",
    )


def validation_rules(spec: ExperimentSpec, source: TaskSource | None) -> LedgerRules:
    """The validation ledger: every task once, no groups, no credit."""
    samples = spec.validation.samples_per_task if spec.validation else 1
    return replace(
        training_rules(spec, source) if source else LedgerRules(1, 1, 1, 0, 0, False, False, 1, 1),
        leaf_size=1,
        samples_per_task=samples,
        scoped=False,
        unlimited=True,
    )


def group_key(key_list: Sequence[str], sample_id: str, metadata: Mapping[str, str]) -> str:
    """Name of the leaf group of a sample: the values of the key list, or the sample itself when the list is empty.

    `task_id` stands for the task as it was granted, so that two epochs never share a group. Raises KeyError when a
    trajectory lacks a key.
    """
    if not key_list:
        return sample_id
    group = sample_id.partition(".")[0]
    return "/".join(group if key == "task_id" else f"{key}={quote(metadata[key], safe='')}" for key in key_list)
