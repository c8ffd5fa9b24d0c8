"""The rollout loop against a real gRPC pool: bounds, verdicts, lost leases, drain."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from nexrl.activity import ActivityTracker
from nexrl.client import RolloutClient
from nexrl.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from nexrl.rewards import RewardFailedError
from nexrl.rollout_worker import NotAttemptedError, RolloutWorker, all_failed, scored
from nexrl.rpc.client import connect
from nexrl.transcript import Transcript
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    PURPOSE_VALIDATION,
    VERDICT_ENV_ERROR,
    VERDICT_OK,
    VERDICT_REWARD_ERROR,
    VERDICT_TIMEOUT,
    SampleResult,
    TaskLease,
    Verdict,
)
from nexrl_rollout.worker import RolloutLimits, RolloutLoop
from tests.support.patience import eventually
from tests.support.rollout import FakePool, FakeWeightSync, completion, following_policy, serving, task_lease

LIMITS = RolloutLimits(max_in_flight=8, group_size=4, lease_seconds=60, timeout_seconds=30)


def results(lease: TaskLease) -> list[SampleResult]:
    transcript = Transcript([1])
    transcript.add_completion(completion([2]))
    return [scored(sample, [transcript.trajectory(1.0)], "stop") for sample in lease.samples]


class Scripted(RolloutWorker):
    """Calls a function for each lease."""

    def __init__(self, script: Callable[[TaskLease], Awaitable[Sequence[SampleResult]]]) -> None:
        self._script = script

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        return await self._script(lease)


class OneByOne(Scripted):
    samples_together = False


async def succeed(lease: TaskLease) -> Sequence[SampleResult]:
    return results(lease)


async def hang(lease: TaskLease) -> Sequence[SampleResult]:
    await asyncio.Event().wait()
    return []


@asynccontextmanager
async def running(
    pool: FakePool, worker: RolloutWorker, limits: RolloutLimits = LIMITS, weight_sync: FakeWeightSync | None = None
) -> AsyncIterator[RolloutLoop]:
    """A loop that is cancelled, as SIGTERM does, when the block ends."""
    async with (
        serving(pool, weight_sync or FakeWeightSync()) as address,
        connect(address) as channel,
        following_policy(address) as policy,
    ):
        client = RolloutClient(channel, policy, worker_id="rollout-0")
        loop = RolloutLoop(client, worker, limits, ActivityTracker(Module(name="rollout-0"), None))
        task = asyncio.create_task(loop.run())
        try:
            yield loop
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


def verdicts(pool: FakePool) -> set[Verdict.ValueType]:
    return {result.verdict for result in pool.results[PURPOSE_TRAINING]}


def all_put(pool: FakePool, count: int) -> Callable[[], bool]:
    return lambda: sum(map(len, pool.results.values())) == count


async def until_answered(loop: RolloutLoop, unfinished: int = 0) -> None:
    """Wait until the loop has the answers to its puts: a stop before them returns the samples.

    The pool has the samples before. `unfinished` samples stay in work.
    """
    await eventually(lambda: loop._samples_held() == unfinished)


@pytest.mark.guide("G4", "G11", "G12")
async def test_every_leased_sample_is_put_once_and_a_group_is_never_split_over_calls() -> None:
    pool = FakePool([task_lease(group, 4) for group in range(5)])
    async with running(pool, Scripted(succeed)) as loop:
        await pool.wait_for(all_put(pool, 20))
        await until_answered(loop)
    assert [result.sample_id for result in pool.results[PURPOSE_TRAINING]] == pool.granted
    assert verdicts(pool) == {VERDICT_OK}
    assert pool.puts <= 5
    assert not pool.returned


@pytest.mark.guide("L6")
async def test_no_task_is_leased_while_the_gate_of_weight_sync_is_closed() -> None:
    pool, weight_sync = FakePool([task_lease(0, 4)]), FakeWeightSync()
    await weight_sync.set(gate="version 1 is being synced")
    async with running(pool, Scripted(succeed), weight_sync=weight_sync):
        await weight_sync.wait_for(lambda: weight_sync.told == 1)
        await asyncio.sleep(0.2)  # enough for the call that must not come
        assert pool.lease_calls == 0
        await weight_sync.set()
        await pool.wait_for(all_put(pool, 4))


async def test_never_more_samples_are_leased_than_may_be_in_flight() -> None:
    gates: asyncio.Queue[asyncio.Event] = asyncio.Queue()
    most = 0

    async def wait_for_gate(lease: TaskLease) -> Sequence[SampleResult]:
        nonlocal most
        gate = asyncio.Event()
        gates.put_nowait(gate)
        most = max(most, pool.in_flight)
        await gate.wait()
        return results(lease)

    pool = FakePool([task_lease(group, 4) for group in range(6)])
    async with running(pool, Scripted(wait_for_gate)):
        for done in range(6):
            await pool.wait_for(lambda: pool.in_flight == 8 or not pool.waiting)
            (await gates.get()).set()
            await pool.wait_for(all_put(pool, 4 * (done + 1)))
    assert most == 8


async def test_samples_one_by_one_are_put_as_they_become_ready() -> None:
    async def hang_on_the_first(lease: TaskLease) -> Sequence[SampleResult]:
        assert len(lease.samples) == 1
        return await (hang if lease.samples[0].sample_id == "0.0" else succeed)(lease)

    pool = FakePool([task_lease(0, 4)])
    async with running(pool, OneByOne(hang_on_the_first)) as loop:
        await pool.wait_for(all_put(pool, 3))
        await until_answered(loop, unfinished=1)
    assert pool.returned == ["0.0"]


@pytest.mark.guide("G6", "G7", "G14", "R6")
async def test_results_go_where_their_purpose_says() -> None:
    pool = FakePool([task_lease(0, 4), task_lease(0, 2, purpose=PURPOSE_VALIDATION), task_lease(1, 4)])
    async with running(pool, Scripted(succeed)):
        await pool.wait_for(all_put(pool, 10))
    assert len(pool.results[PURPOSE_TRAINING]) == 8
    assert len(pool.results[PURPOSE_VALIDATION]) == 2


@pytest.mark.guide("G8")
@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RewardFailedError("reward"), VERDICT_REWARD_ERROR),
        (DeadlineExceededError("slow"), VERDICT_TIMEOUT),
        (InvalidArgumentError("prompt too long"), VERDICT_ENV_ERROR),
        (ZeroDivisionError(), VERDICT_ENV_ERROR),
        (TimeoutError("the environment's own"), VERDICT_ENV_ERROR),
        (asyncio.CancelledError(), VERDICT_ENV_ERROR),
        (SystemExit(1), VERDICT_ENV_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_what_user_code_raises_becomes_a_verdict_without_reward(
    error: BaseException, verdict: Verdict.ValueType
) -> None:
    async def fail(lease: TaskLease) -> Sequence[SampleResult]:
        raise error

    pool = FakePool([task_lease(0, 4)])
    async with running(pool, Scripted(fail)):
        await pool.wait_for(all_put(pool, 4))
    assert verdicts(pool) == {verdict}
    assert not any(result.trajectories for result in pool.results[PURPOSE_TRAINING])
    raised_at = f"({__file__}:{fail.__code__.co_firstlineno + 1}): "
    assert all(raised_at in result.error for result in pool.results[PURPOSE_TRAINING])


async def test_results_for_other_samples_fail_the_lease() -> None:
    async def forget_one(lease: TaskLease) -> Sequence[SampleResult]:
        return results(lease)[1:]

    pool = FakePool([task_lease(0, 4)])
    async with running(pool, Scripted(forget_one)):
        await pool.wait_for(all_put(pool, 4))
    assert verdicts(pool) == {VERDICT_ENV_ERROR}


async def test_a_worker_that_returns_no_list_is_told_what_to_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def return_one(lease: TaskLease) -> Sequence[SampleResult]:
        return results(lease)[0]  # type: ignore[return-value]  # the mistake

    pool = FakePool([task_lease(0, 4)])
    async with running(pool, Scripted(return_one)):
        await pool.wait_for(all_put(pool, 4))
    assert verdicts(pool) == {VERDICT_ENV_ERROR}
    assert "rollout returned SampleResult; must return a list of SampleResult" in caplog.text


async def test_rollout_beyond_its_time_is_cancelled_with_verdict_timeout() -> None:
    limits = RolloutLimits(max_in_flight=8, group_size=4, lease_seconds=60, timeout_seconds=0.05)
    pool = FakePool([task_lease(0, 4)])
    async with running(pool, Scripted(hang), limits):
        await pool.wait_for(all_put(pool, 4))
    assert verdicts(pool) == {VERDICT_TIMEOUT}
    for result in pool.results[PURPOSE_TRAINING]:
        assert result.error.startswith(f"DeadlineExceededError ({__file__}:{hang.__code__.co_firstlineno + 1}): ")


@pytest.mark.guide("G3", "G5", "G13")
async def test_stop_cancels_what_runs_and_returns_its_samples() -> None:
    pool = FakePool([task_lease(0, 4), task_lease(1, 4, purpose=PURPOSE_VALIDATION)])
    begun = asyncio.Semaphore(0)

    async def begin(lease: TaskLease) -> Sequence[SampleResult]:
        begun.release()
        return await hang(lease)

    async with running(pool, Scripted(begin)) as loop:
        await pool.wait_for(lambda: pool.in_flight == 8)
        for _ in range(2):
            await begun.acquire()
        assert [work.activity for work in loop._activity.snapshot().work] == ["rollout"] * 2
    assert sorted(pool.returned) == sorted(pool.granted)
    assert not pool.results[PURPOSE_TRAINING]


async def test_grant_whose_answer_was_never_seen_is_returned() -> None:
    pool = FakePool()
    async with running(pool, Scripted(hang)):
        await pool.wait_for(lambda: pool.lease_calls == 1)
        pool.waiting += [task_lease(0, 4)]  # granted to whoever asks next: the repeated call, while the loop stops
    assert sorted(pool.returned) == sorted(pool.granted)


async def test_samples_that_are_returned_are_granted_again_together_as_another_attempt() -> None:
    attempts: list[list[tuple[str, int]]] = []

    async def not_at_first(lease: TaskLease) -> Sequence[SampleResult]:
        attempts.append([(sample.sample_id, sample.attempt) for sample in lease.samples])
        if len(attempts) == 1:
            raise NotAttemptedError("no agent")
        return results(lease)

    pool = FakePool([task_lease(0, 2)])
    async with running(pool, Scripted(not_at_first)) as loop:
        await pool.wait_for(all_put(pool, 2))
        await until_answered(loop)
    assert attempts == [[("0.0", 1), ("0.1", 1)], [("0.0", 2), ("0.1", 2)]]
    assert (pool.returned, pool.in_flight) == (["0.0", "0.1"], 0)


async def test_leases_are_renewed_while_a_rollout_is_long() -> None:
    limits = RolloutLimits(max_in_flight=8, group_size=4, lease_seconds=0.06, timeout_seconds=30)
    pool = FakePool([task_lease(0, 4)])
    async with running(pool, Scripted(hang), limits):
        await pool.wait_for(lambda: pool.renewals >= 3)


async def test_work_on_a_lost_lease_is_cancelled_and_nothing_is_put() -> None:
    cancelled = asyncio.Event()

    async def notice(lease: TaskLease) -> Sequence[SampleResult]:
        try:
            return await hang(lease)
        finally:
            cancelled.set()

    limits = RolloutLimits(max_in_flight=4, group_size=4, lease_seconds=0.06, timeout_seconds=30)
    pool = FakePool([task_lease(0, 4), task_lease(1, 4)])
    pool.lost = {f"0.{index}" for index in range(4)}
    async with running(pool, Scripted(notice), limits):
        await cancelled.wait()
        await pool.wait_for(lambda: len(pool.granted) == 8)  # its place is free again
    assert sorted(pool.returned) == [f"1.{index}" for index in range(4)]
    assert not pool.results[PURPOSE_TRAINING]


async def test_put_that_fails_for_good_does_not_stop_the_worker() -> None:
    pool = FakePool([task_lease(0, 4), task_lease(1, 4)])
    pool.put_errors = [FailedPreconditionError("refused")]
    async with running(pool, Scripted(succeed), replace(LIMITS, max_in_flight=4)):
        await pool.wait_for(all_put(pool, 4))


async def test_refused_results_become_a_verdict_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool([task_lease(0, 4), task_lease(1, 4)])
    pool.put_errors = [InvalidArgumentError("logprobs: not finite")]
    async with running(pool, Scripted(succeed), replace(LIMITS, max_in_flight=4)):
        await pool.wait_for(all_put(pool, 8))
    assert [result.verdict for result in pool.results[PURPOSE_TRAINING]] == [VERDICT_ENV_ERROR] * 4 + [VERDICT_OK] * 4
    assert all("logprobs: not finite" in result.error for result in pool.results[PURPOSE_TRAINING][:4])
    assert "rollout of task train-0: " in caplog.text
    assert "logprobs: not finite" in caplog.text


async def test_exhausted_data_does_not_end_the_worker_since_a_validation_may_follow() -> None:
    pool = FakePool()
    pool.is_over = True
    async with running(pool, Scripted(succeed)):
        await pool.wait_for(lambda: pool.lease_calls == 1)
        await pool.add(task_lease(0, 2, purpose=PURPOSE_VALIDATION))
        await pool.wait_for(all_put(pool, 2))


async def test_a_sample_that_fails_is_reported_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    details: list[dict[str, str]] = []
    report = ActivityTracker.report

    async def spy(self: ActivityTracker, *args: Any, **kwargs: Any) -> None:
        details.append(kwargs["details"])
        await report(self, *args, **kwargs)

    monkeypatch.setattr(ActivityTracker, "report", spy)

    async def fail(lease: TaskLease) -> Sequence[SampleResult]:
        return all_failed(lease, VERDICT_REWARD_ERROR, "no such answer")

    pool = FakePool([task_lease(group, 4) for group in range(2)])
    async with running(pool, Scripted(fail), replace(LIMITS, max_in_flight=4)):
        await pool.wait_for(all_put(pool, 8))  # the second group is leased when the first is done with
    assert "rollout of task train-0: no such answer" in caplog.text
    assert [(each["sample_id"], each["attempt"]) for each in details[:1]] == [
        (pool.results[PURPOSE_TRAINING][0].sample_id, str(pool.results[PURPOSE_TRAINING][0].attempt))
    ]
