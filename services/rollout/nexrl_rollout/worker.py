"""The rollout loop: lease, produce under a time limit, renew, put.

Invariants, each with a test in tests/unit/nexrl_rollout/test_worker.py:
- never more than `max_in_flight` samples are leased;
- every lease ends in a put or is returned, or lapses because it had been lost;
- whatever user code does, its sample gets a verdict, never a reward of 0.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nexrl.activity import ActivityTracker
from nexrl.client import RolloutClient
from nexrl.code_reference import USER_CODE_ERRORS
from nexrl.errors import DeadlineExceededError, InvalidArgumentError, NexrlError
from nexrl.exception_text import exception_text
from nexrl.rewards import RewardFailedError
from nexrl.rollout_worker import NotAttemptedError, RolloutWorker, all_failed
from nexrl.rpc.client import is_passing, new_request_id
from nexrl.sample_states import ATTEMPT
from nexrl.task_cancellation import is_current_task_cancelled
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

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
EXHAUSTED_PAUSE_SECONDS = 1.0


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
            wanted = await self._worker.wanted(self._limits.max_in_flight - self._samples_held())
            # A sample's time limit begins with its lease: take none that no replica can serve yet.
            await self._client.policy.wait_gate()
            for lease in await self._lease(wanted):
                self._begin(lease, tasks)

    async def _lease(self, samples: int) -> list[TaskLease]:
        request_id = new_request_id()
        try:
            response = await self._client.lease(samples, request_id=request_id)
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
        failure: BaseException | None = None
        with self._activity.track(ATTEMPT), metrics.ROLLOUT_SECONDS.time():
            try:
                results = await self._produce(lease)
            except NotAttemptedError as error:
                return await self._give_back(lease, error)
            except USER_CODE_ERRORS as error:  # the pool counts it
                failure = error
                results = all_failed(lease, _verdict(error), exception_text(error))
            results = await self._put(lease, results)
        self._release()
        failed = next((result for result in results if result.error), None)
        if failed is not None:
            await self._activity.report(
                failure or failed.error,
                work_context=f"rollout of task {lease.task.task_id}",
                severity=SEVERITY_WARNING,
                details={
                    "group_id": lease.group_id,
                    "sample_id": failed.sample_id,
                    "attempt": str(failed.attempt),
                    "verdict": Verdict.Name(failed.verdict),
                },
            )

    async def _give_back(self, lease: TaskLease, reason: NotAttemptedError) -> None:
        log.info("not attempted: %s", reason)
        self._release()
        try:
            await self._return([lease])
        except NexrlError as error:
            log.warning("return of samples: %s", error)  # their leases lapse

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
            if is_current_task_cancelled():
                raise
            raise NexrlError("rollout cancelled itself") from error

    async def _put(self, lease: TaskLease, results: Sequence[SampleResult]) -> Sequence[SampleResult]:
        """Put results, or failures if the pool refuses them. Returns what it put."""
        try:
            results = await self._put_or_fail(lease, results)
        except NexrlError as error:
            # The lease lapses and the samples are granted again: nothing is lost but the work.
            await self._activity.report(error, work_context=f"put of group {lease.group_id}")
            return results
        purpose = Purpose.Name(lease.purpose)
        for verdict, samples in Counter(result.verdict for result in results).items():
            metrics.SAMPLES.labels(purpose, Verdict.Name(verdict)).inc(samples)
        spans = (span for result in results for trajectory in result.trajectories for span in trajectory.spans)
        metrics.TOKENS.inc(sum(span.end - span.start for span in spans))
        return results

    async def _put_or_fail(self, lease: TaskLease, results: Sequence[SampleResult]) -> Sequence[SampleResult]:
        try:
            await self._client.put(lease.purpose, results)
        except InvalidArgumentError as error:
            # Without a verdict, the samples would wait until their lease lapses, and the reason would be lost.
            results = all_failed(lease, VERDICT_ENV_ERROR, error)
            await self._client.put(lease.purpose, results)
        return results

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
            # If only some samples are lost, continue for the rest. The pool fences off the lost ones.
            if lost.issuperset(sample.sample_id for sample in lease.samples) and self._held.pop(task, None) is not None:
                metrics.LEASES_LOST.inc(len(lease.samples))
                task.cancel()
                self._update_room()

    async def _return_unseen(self, request_id: str) -> None:
        """Return samples of a cancelled lease call. The same request id returns the same samples."""
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


def _verdict(error: BaseException) -> Verdict.ValueType:
    match error:
        case RewardFailedError():
            return VERDICT_REWARD_ERROR
        case DeadlineExceededError():
            return VERDICT_TIMEOUT
        case _:
            return VERDICT_ENV_ERROR


def _complete(lease: TaskLease, results: Sequence[SampleResult]) -> Sequence[SampleResult]:
    """Return `results` if there is exactly one for each sample. Raises NexrlError if user code returned others."""
    if not isinstance(results, Sequence) or not all(isinstance(result, SampleResult) for result in results):
        raise NexrlError(
            f"rollout returned {type(results).__name__}; must return a list of SampleResult, one per sample"
        )
    wanted = sorted((sample.sample_id, sample.attempt) for sample in lease.samples)
    given = sorted((result.sample_id, result.attempt) for result in results)
    if wanted != given:
        raise NexrlError(f"rollout returned results for {given}; the lease contains {wanted}")
    return results
