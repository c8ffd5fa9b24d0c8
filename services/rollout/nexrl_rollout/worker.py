"""The rollout loop: lease, produce under a time limit, renew, put; and the class that users override.

Invariants, each with a test in tests/unit/nexrl_rollout/test_worker.py:
- never more than `max_in_flight` samples are leased;
- every lease ends in a put or is returned, or lapses because it had been lost;
- whatever user code does, its sample gets a verdict, never a reward of 0.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nexrl.activity import ActivityTracker
from nexrl.cancellation import is_called_off
from nexrl.client import RolloutClient
from nexrl.errors import DeadlineExceededError, NexrlError
from nexrl.rewards import RewardFailedError
from nexrl.rpc.client import is_passing, new_request_id
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl.v1.data_loader_service_pb2 import LeaseTasksResponse
from nexrl.v1.trajectory_pb2 import (
    VERDICT_ENV_ERROR,
    VERDICT_REWARD_ERROR,
    VERDICT_TIMEOUT,
    Purpose,
    SampleResult,
    TaskLease,
    Verdict,
)
from nexrl_rollout import metrics
from nexrl_rollout.results import all_failed

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
EXHAUSTED_PAUSE_SECONDS = 1.0


class RolloutWorker(ABC):
    """Produces samples. Subclass it and override `rollout`; the loop does the rest."""

    samples_together: ClassVar[bool] = True
    """False: `rollout` is called once for each sample, so that each has its own time limit and is put when it is
    ready."""

    @abstractmethod
    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """One result for each sample of `lease`, in any order; many calls run at the same time.

        `lease.purpose` tells training from validation. RewardFailedError gives all samples REWARD_ERROR,
        DeadlineExceededError TIMEOUT, anything else ENV_ERROR; the pool then has them attempted again. Cancelled when
        the lease is lost or the worker stops.
        """


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of the loop."""

    max_in_flight: int
    """Samples produced at the same time."""
    group_size: int
    """Samples that share one call of the policy: room for fewer is not worth a lease."""
    lease_seconds: float
    """Renewed three times in this time."""
    timeout_seconds: float
    """Longest time of one call of `rollout`."""


class RolloutLoop:
    """Keeps a worker busy until it is cancelled; then returns what is unfinished."""

    def __init__(
        self, client: RolloutClient, worker: RolloutWorker, limits: RolloutLimits, activity: ActivityTracker
    ) -> None:
        self._client = client
        self._worker = worker
        self._limits = limits
        self._activity = activity
        self._held: dict[asyncio.Task[None], TaskLease] = {}
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def run(self) -> None:
        """Lease and produce without end. Raises what no retry can mend."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew_leases())
                await self._begin_attempts(tasks)
        finally:
            await self._return_held()

    async def _begin_attempts(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._has_room.wait()
            for lease in await self._lease():
                self._begin(lease, tasks)

    async def _lease(self) -> list[TaskLease]:
        request_id = new_request_id()
        try:
            response = await self._client.lease(self._samples_wanted(), request_id=request_id)
        except asyncio.CancelledError:
            await self._return_unseen(request_id)
            raise
        except NexrlError as error:
            if not is_passing(error):
                raise
            log.warning("lease: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
            return []
        if response.exhausted and not response.leases:
            # The server does not wait once the data is exhausted, yet a last validation can still come.
            await asyncio.sleep(EXHAUSTED_PAUSE_SECONDS)
        return list(_units(response, self._worker.samples_together))

    def _samples_wanted(self) -> int:
        return self._limits.max_in_flight - self._samples_held()

    def _samples_held(self) -> int:
        return sum(len(lease.samples) for lease in self._held.values())

    def _begin(self, lease: TaskLease, tasks: asyncio.TaskGroup) -> None:
        task = tasks.create_task(self._attempt(lease))
        self._held[task] = lease  # until it is released, lost, or returned
        self._update_room()

    def _release(self) -> None:
        """The current task's samples are no longer its own: put, or left to lapse."""
        task = asyncio.current_task()
        if task is not None and self._held.pop(task, None) is not None:
            self._update_room()

    def _update_room(self) -> None:
        held = self._samples_held()
        metrics.IN_FLIGHT.set(held)
        # Samples that share a call are waited for together: a lease for the first free place would split every group.
        wanted = min(self._limits.group_size, self._limits.max_in_flight) if self._worker.samples_together else 1
        if held + wanted <= self._limits.max_in_flight:
            self._has_room.set()
        else:
            self._has_room.clear()

    async def _attempt(self, lease: TaskLease) -> None:
        failure: Exception | None = None
        with self._activity.track("rollout", waiting_on="inference"), metrics.ROLLOUT_SECONDS.time():
            try:
                results = await self._produce(lease)
            except Exception as error:  # noqa: BLE001  # user code may raise anything; the pool counts it
                failure = error
                results = all_failed(lease, _verdict(error), f"{type(error).__name__}: {error}")
            await self._put(lease, results)
        self._release()
        failed = next((result for result in results if result.error), None)
        if failed is not None:
            await self._activity.report(
                failure or failed.error,
                work_context=f"rollout of task {lease.task.task_id}",
                severity=SEVERITY_WARNING,
                details={"group_id": lease.group_id, "verdict": Verdict.Name(failed.verdict)},
            )

    async def _produce(self, lease: TaskLease) -> Sequence[SampleResult]:
        limit = asyncio.timeout(self._limits.timeout_seconds)
        try:
            async with limit:
                return _complete(lease, await self._worker.rollout(lease))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceededError(f"no result after {self._limits.timeout_seconds:g} s") from error
        except asyncio.CancelledError as error:
            if is_called_off():
                raise
            raise NexrlError("rollout cancelled itself") from error

    async def _put(self, lease: TaskLease, results: Sequence[SampleResult]) -> None:
        try:
            await self._client.put(lease.purpose, results)
        except NexrlError as error:
            # The lease lapses and the samples are granted again: nothing is lost but the work.
            await self._activity.report(error, work_context=f"put of group {lease.group_id}")
            return
        purpose = Purpose.Name(lease.purpose)
        for result in results:
            metrics.SAMPLES.labels(purpose, Verdict.Name(result.verdict)).inc()
            for trajectory in result.trajectories:
                metrics.TOKENS.inc(sum(span.end - span.start for span in trajectory.spans))

    async def _renew_leases(self) -> None:
        period_seconds = self._limits.lease_seconds / 3
        while True:
            began = time.monotonic()
            for purpose in {lease.purpose for lease in self._held.values()}:
                await self._renew(purpose)
            await asyncio.sleep(max(0.0, began + period_seconds - time.monotonic()))

    async def _renew(self, purpose: Purpose.ValueType) -> None:
        held = {task: lease for task, lease in self._held.items() if lease.purpose == purpose}
        samples = [sample for lease in held.values() for sample in lease.samples]
        try:
            lost = await self._client.renew(samples, purpose)
        except NexrlError as error:
            log.warning("renew: %s", error)  # the next round is in time still
            return
        for task, lease in held.items():
            # Where only some are lost the others still need the call; the put of the lost ones is fenced off.
            if lost.issuperset(sample.sample_id for sample in lease.samples) and self._held.pop(task, None) is not None:
                metrics.LEASES_LOST.inc(len(lease.samples))
                task.cancel()
                self._update_room()

    async def _return_unseen(self, request_id: str) -> None:
        """Return what the pool may have granted to the call that was broken off: its id brings the same answer
        again."""
        try:
            response = await self._client.lease(1, wait_seconds=0, request_id=request_id)
            await self._return(response.leases)
        except NexrlError as error:
            log.warning("return of samples: %s", error)  # their leases lapse

    async def _return_held(self) -> None:
        held, self._held = list(self._held.values()), {}
        try:
            await self._return(held)
        except NexrlError as error:
            log.warning("return of samples: %s", error)  # their leases lapse

    async def _return(self, leases: Sequence[TaskLease]) -> None:
        for purpose in {lease.purpose for lease in leases}:
            samples = [sample for lease in leases if lease.purpose == purpose for sample in lease.samples]
            returned = await self._client.return_samples(samples, purpose)
            log.info("returned %d of %d samples", returned, len(samples))


def _units(response: LeaseTasksResponse, samples_together: bool) -> Iterator[TaskLease]:
    """The leases as `RolloutWorker.rollout` takes them."""
    for lease in response.leases:
        if samples_together or len(lease.samples) == 1:
            yield lease
            continue
        for sample in lease.samples:
            unit = TaskLease()
            unit.CopyFrom(lease)
            del unit.samples[:]
            unit.samples.append(sample)
            yield unit


def _verdict(error: Exception) -> Verdict.ValueType:
    match error:
        case RewardFailedError():
            return VERDICT_REWARD_ERROR
        case DeadlineExceededError():
            return VERDICT_TIMEOUT
        case _:
            return VERDICT_ENV_ERROR


def _complete(lease: TaskLease, results: Sequence[SampleResult]) -> Sequence[SampleResult]:
    """Exactly one result for each sample. Raises NexrlError when user code gave others."""
    wanted = sorted((sample.sample_id, sample.attempt) for sample in lease.samples)
    given = sorted((result.sample_id, result.attempt) for result in results)
    if wanted != given:
        raise NexrlError(f"rollout gave results for {given}, the lease holds {wanted}")
    return results
