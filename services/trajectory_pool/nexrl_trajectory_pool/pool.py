"""The pools of one model tag: its training ledger, its validation ledger, their data, and the waits on them."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from nexrl.errors import InvalidArgumentError, NotFoundError, UnavailableError
from nexrl.spec import ExperimentSpec
from nexrl.spec.model import ModelSpec
from nexrl.store import Redis, key_prefix
from nexrl_trajectory_pool.ledger import UNLIMITED, Grant, GrantedBatch, GrantedTask, Ledger, LedgerRules
from nexrl_trajectory_pool.sampling import SamplingParameters
from nexrl_trajectory_pool.task_reader import TaskReader
from nexrl_trajectory_pool.task_sampler import TaskSampler
from nexrl_trajectory_pool.wakeups import WakeUps

MAX_SLEEP_SECONDS = 1.0
BATCH_LEASE_SECONDS = 3600.0
"""Long, because it may take long to prepare a batch. A trainer that resumes requeues the batches of its predecessor."""
HOLD_MARGIN_SECONDS = 60.0
"""Time after the limit of a validation in which it may still be ended. After that, training continues without it."""
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


class Data(NamedTuple):
    """Where the tasks come from. Without a sampler all of them are granted."""

    train: TaskReader
    validation: TaskReader | None
    sampler: TaskSampler | None


class Pool:
    """The pools of one model tag. Holds no state of its own: any number of processes may serve the same one."""

    def __init__(
        self,
        redis: Redis,
        experiment: str,
        spec: ExperimentSpec,
        data: Data,
        room_bytes: int,
    ) -> None:
        self.tag = spec.model.tag
        self.spec = spec
        prefix = key_prefix(experiment, self.tag)
        rules = training_rules(spec, data.train.total)
        rules = replace(rules, max_payload_bytes=min(rules.max_payload_bytes, room_bytes))
        self.training = Ledger(redis, prefix, rules)
        self.validation = Ledger(
            redis, prefix + "val:", validation_rules(spec, data.validation.total if data.validation else None)
        )
        self.wakeups = WakeUps(redis, [self.training.wake_channel, self.validation.wake_channel])
        rollout = spec.rollout
        self.sampling = SamplingParameters(rollout.temperature, rollout.top_p, rollout.top_k)
        self.vocabulary_size = vocabulary_size(spec.model)
        self.validation_seconds = spec.validation.timeout_seconds if spec.validation else 0.0
        self._data = data

    def source(self, is_validation: bool) -> TaskReader:
        """Return the data of one purpose. Raises NotFoundError if the experiment has no validation."""
        if not is_validation:
            return self._data.train
        if self._data.validation is None:
            raise NotFoundError("purpose: VALIDATION: the experiment has no section validation")
        return self._data.validation

    def ledger(self, is_validation: bool) -> Ledger:
        """Return the ledger of one purpose."""
        return self.validation if is_validation else self.training

    def lease_seconds(self, asked: float) -> float:
        """Return the length of a lease; 0 asks for the experiment's setting. Raises InvalidArgumentError."""
        if not 0 <= asked <= MAX_LEASE_SECONDS:
            raise InvalidArgumentError(
                f"lease_seconds: {asked}; 0 to {MAX_LEASE_SECONDS:.0f}, 0 for the experiment's setting"
            )
        return asked or self.spec.rollout.lease_seconds

    async def lease_tasks(
        self, request_id: str, max_samples: int, lease_seconds: float, wait_seconds: float
    ) -> LeasedTasks:
        """Grant samples, those of a running validation round before all others. Waits while there are none."""
        seconds = self.lease_seconds(lease_seconds)
        await self.source(False).check()

        async def attempt() -> tuple[tuple[Grant, bool], bool]:
            grant = await self._grant(request_id, max_samples, seconds)
            if grant.waiting_on != "validation":
                return (grant, False), bool(grant.tasks) or grant.exhausted
            grant = await self.validation.lease_tasks(request_id, max_samples, seconds)
            return (replace(grant, exhausted=False), True), bool(grant.tasks)

        grant, is_validation = await self.wakeups.until("tasks", attempt, wait_seconds)
        # Read after the grant: if this fails, the repeated request gets the same grant and reads again.
        return await self._with_items(grant, is_validation=is_validation)

    async def lease_batch(
        self, request_id: str, batch_size: int, lease_seconds: float, wait_seconds: float, worker: str = ""
    ) -> tuple[GrantedBatch | None, bool]:
        """Lease a batch. Waits until one is ready. Also returns True if no further batch can follow."""
        if batch_size < 0:
            raise InvalidArgumentError(f"batch_size: {batch_size}; 0 for the experiment's setting, or more")
        seconds = self.lease_seconds(lease_seconds) if lease_seconds else BATCH_LEASE_SECONDS

        async def attempt() -> tuple[tuple[GrantedBatch | None, bool], bool]:
            batch, exhausted = await self.training.lease_batch(request_id, seconds, batch_size, worker)
            return (batch, exhausted), batch is not None or exhausted

        return await self.wakeups.until("batch", attempt, wait_seconds, kind=batch_size)

    async def lease_train_batch(self, step: int, incarnation: int, wait_seconds: float) -> tuple[bytes | None, bool]:
        """Return the train batch of `step`. Waits until it exists. Also returns True if no further one can follow."""

        async def attempt() -> tuple[tuple[bytes | None, bool], bool]:
            payload, exhausted = await self.training.lease_train_batch(step, incarnation)
            return (payload, exhausted), payload is not None or exhausted

        return await self.wakeups.until("train", attempt, wait_seconds, kind=(step, incarnation))

    async def start_validation(self, version: int) -> int:
        """Begin a round; return its number of samples. Raises FailedPreconditionError while another round runs."""
        samples = self.source(True).items * self.validation.rules.samples_per_task
        await self.validation.begin_round(version)
        await self.training.hold(version, self.validation_seconds + HOLD_MARGIN_SECONDS)
        return samples

    async def wait_validation(self, version: int, wait_seconds: float) -> tuple[bool, list[bytes], int]:
        """Wait until every sample of the round has ended; return (complete, payloads of produced samples, failed)."""

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
            with suppress(UnavailableError):  # nothing expires while Redis cannot be reached
                due = [await self.training.expire(), await self.validation.expire()]
            # A short lease may be granted during the sleep, so the sleep has a bound.
            await asyncio.sleep(min([MAX_SLEEP_SECONDS, *(d for d in due if d is not None)]))

    async def _grant(self, request_id: str, max_samples: int, lease_seconds: float) -> Grant:
        """Grant training samples. The sampler draws whenever none of the tasks that it has drawn is left."""
        sampler = self._data.sampler
        while True:
            drawn = sampler.drawn if sampler else None
            grant = await self.training.lease_tasks(request_id, max_samples, lease_seconds, drawn)
            if sampler is None or grant.waiting_on != "draw":
                return grant
            await sampler.draw(self.training, self._data.train)

    async def _with_items(self, grant: Grant, *, is_validation: bool) -> LeasedTasks:
        positions = [granted.position for granted in grant.tasks if not granted.item]
        tasks = iter(await self.source(is_validation).tasks(positions) if positions else ())
        leases = []
        for granted in grant.tasks:
            if granted.item:  # added by a call
                lease = Lease(str(json.loads(granted.item)["id"]), granted.item.decode(), granted, is_validation)
            else:
                task = next(tasks)
                lease = Lease(task.task_id, task.item_json, granted, is_validation)
            leases.append(lease)
        return LeasedTasks(tuple(leases), grant.deadline, grant.waiting_on, grant.exhausted)


def vocabulary_size(model: ModelSpec) -> int | None:
    """Return the bound of token ids; None if only the model's own library knows it (a GGUF file)."""
    if model.scratch is not None:
        return model.scratch.vocabulary_size
    config = Path(model.path or "") / "config.json"
    size: int | None = json.loads(config.read_text()).get("vocab_size") if config.is_file() else None
    return size


def training_rules(spec: ExperimentSpec, total: int | None) -> LedgerRules:
    """Return what the experiment asks of the training ledger; `total` tasks in all epochs, None: no limit."""
    pool = spec.trajectory_pool
    return LedgerRules(
        batch_size=pool.batch_size,
        group_size=pool.group_size if pool.key_list else 1,
        samples_per_task=pool.group_size,
        positions=UNLIMITED if total is None else total,
        staleness=spec.weight_sync.staleness_threshold,
        is_bounded_by_staleness=is_bounded_by_staleness(spec),
        scoped="task_id" in pool.key_list,
        release_incomplete=pool.incomplete_groups == "release",
        max_attempts=spec.rollout.max_attempts,
        max_queued=spec.train_batch_pool.max_queued,
        max_payload_bytes=pool.max_payload_bytes,
        total_steps=spec.trainer.steps,
        max_refilled=max_refilled(spec),
        needs_size=pool.readiness != "loaded_batch_finished",
        needs_idle=pool.readiness != "batch_size",
    )


def max_refilled(spec: ExperimentSpec) -> int:
    """Return how many groups of equal rewards may be refilled before one batch is formed."""
    pool, algorithm = spec.trajectory_pool, spec.algorithm
    is_refilled = algorithm.zero_variance_groups == "refill"
    return algorithm.refill_limit * pool.batch_size // pool.group_size if is_refilled else 0


def is_bounded_by_staleness(spec: ExperimentSpec) -> bool:
    """Return True if the staleness threshold bounds what is granted.

    In mode fully-async it does so only for batches of everything that was granted, and for groups that span tasks:
    their samples stay in memory until their group is complete.
    """
    pool = spec.trajectory_pool
    spans_tasks = bool(pool.key_list) and "task_id" not in pool.key_list
    return spec.weight_sync.mode != "fully-async" or pool.readiness != "batch_size" or spans_tasks


def validation_rules(spec: ExperimentSpec, total: int | None) -> LedgerRules:
    """Return the rules of the validation ledger: every task once, no groups, no credit."""
    samples = spec.validation.samples_per_task if spec.validation else 1
    return replace(
        training_rules(spec, total) if total else LedgerRules(1, 1, 1, 0, 0, False, False, 1, 1),
        group_size=1,
        samples_per_task=samples,
        scoped=False,
        unlimited=True,
    )


def group_key(key_list: Sequence[str], sample_id: str, metadata: Mapping[str, str]) -> str:
    """Return the name of a sample's group: the values of the key list, or the sample id if the list is empty.

    `task_id` stands for the task as it was granted, so two epochs never share a group. Raises KeyError if a trajectory
    lacks a key.
    """
    if not key_list:
        return sample_id
    group = sample_id.partition(".")[0]
    return "/".join(group if key == "task_id" else f"{key}={quote(metadata[key], safe='')}" for key in key_list)
