"""Samples that fail: real pool, rollout and controller. Only the engine and weight sync are fakes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nexrl.rpc.client import connect, new_request_id, watch
from nexrl.spec import Experiment
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pb2 import VERDICT_ENV_ERROR, SampleLease, SampleResult
from nexrl_controller import server as controller_server
from nexrl_rollout import server as rollout_server
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.pool import TAG, PoolClient, running_pool
from tests.support.rollout import FakeEngine, FakeWeightSync, replica, serving
from tests.support.services import running_service, small_experiment

OFTEN = {"health": {"checkIntervalSeconds": 0.05}}

REWARDS = """
import time


def raises(task, text, is_finished):
    return {}["score"]


def not_a_number(task, text, is_finished):
    return float("nan")


def nothing(task, text, is_finished):
    return None


def sleeps(task, text, is_finished):
    time.sleep(1.2)
    return 1.0


def most(task, text, is_finished):
    if not task["id"].endswith("0"):
        raise ValueError("odd")
    return 1.0
"""


@asynccontextmanager
async def deployed(
    folder: Path, redis_url: str, experiment: Experiment, *, with_rollout: bool = True
) -> AsyncIterator[tuple[PoolClient, Callable[[], AsyncIterator[pb.Experiment]]]]:
    """A pool and its experiment as the controller sees it, from now on."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(running_pool(folder, redis_url, experiment))
        registry = FakeWeightSync()
        registry_address = await stack.enter_async_context(serving(registry))
        engine = await stack.enter_async_context(serving(FakeEngine()))
        await registry.set(replica("replica-0", engine))
        peers = {"trajectory_pool": pool.address, "weight_sync": registry_address}
        controller = await stack.enter_async_context(
            running_service(folder, controller_server.start, experiment, redis_url=redis_url, **peers)
        )
        if with_rollout:
            await stack.enter_async_context(running_service(folder, rollout_server.start, experiment, **peers))
        stub = ControllerServiceStub(await stack.enter_async_context(connect(controller.address)))

        async def states() -> AsyncIterator[pb.Experiment]:
            async for message in watch(stub.WatchExperiment, pb.WatchExperimentRequest()):
                yield message.experiment

        yield pool, states


async def until(
    states: Callable[[], AsyncIterator[pb.Experiment]], is_met: Callable[[pb.Experiment], bool]
) -> pb.Experiment:
    async def met() -> pb.Experiment:
        async for state in states():
            if is_met(state):
                return state
        raise AssertionError("a watch has no end")

    return await finished(met(), f"the experiment is as {is_met.__qualname__} says")


def has_outcome(state: pb.Experiment) -> bool:
    return state.phase in (pb.PHASE_STOPPING, pb.PHASE_FAILED)


def place(folder: Path, text: str) -> str:
    """`file:line` of a line of the rewards."""
    return f"{folder / 'mine.py'}:{REWARDS.splitlines().index(text) + 1}"


@pytest.fixture
def experiment(tmp_path: Path, experiment_name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    """Makes an experiment whose reward is a function of REWARDS."""
    (tmp_path / "mine.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(reward: str, **rollout: Any) -> Experiment:
        simple = {"type": "simple", "reward": f"mine:{reward}", "maxNewTokens": 8, "workers": 64, **rollout}
        data = {"type": "mock", "size": 32}
        pool = {"batchSize": 64, "groupSize": 2}  # many attempts at once: slow ones fail in few rounds
        return small_experiment(experiment_name, data=data, rollout=simple, trajectoryPool=pool, monitor=OFTEN)

    return make


@pytest.mark.parametrize(
    ("reward", "rollout", "said"),
    [
        ("raises", {}, ("REWARD_ERROR: reward of task", "KeyError ({place}): 'score'", "fix the reward function")),
        (
            "not_a_number",
            {},
            ("REWARD_ERROR: reward of task", "not_a_number ({place}) returned {{'reward': nan}}"),
        ),
        ("nothing", {}, ("REWARD_ERROR: reward of task", "TypeError ({place}): float() argument")),
        (
            "sleeps",
            {"timeoutSeconds": 1.0},
            ("TIMEOUT: ", "the reward at {place} had not returned", "rollout.timeoutSeconds"),
        ),
    ],
)
async def test_an_experiment_of_which_every_attempt_fails_ends_with_exception_file_line_and_remedy(
    tmp_path: Path,
    redis_url: str,
    experiment: Callable[..., Experiment],
    reward: str,
    rollout: dict[str, Any],
    said: tuple[str, ...],
) -> None:
    lines = {"raises": '    return {}["score"]', "sleeps": "    time.sleep(1.2)"}
    line = lines.get(reward, f"def {reward}(task, text, is_finished):")
    async with deployed(tmp_path, redis_url, experiment(reward, **rollout)) as (pool, states):
        state = await until(states, has_outcome)
        assert (state.reason, state.failing_samples + "; the limit is rollout.maxFailureRatio, 1") == (
            "SamplesFailing",
            state.message,
        )
        for text in ("100 % of the last ", " of test-0: ", *said):
            assert text.format(place=place(tmp_path, line)) in state.message
        counted = await pool.state()
        assert counted.failed_attempts == counted.finished_attempts >= 128
        assert counted.imbalance == 0


async def test_samples_of_which_some_fail_are_told_while_the_experiment_goes_on(
    tmp_path: Path, redis_url: str, experiment: Callable[..., Experiment]
) -> None:
    async with deployed(tmp_path, redis_url, experiment("most")) as (_, states):
        state = await until(states, lambda state: bool(state.failing_samples))
        assert state.phase == pb.PHASE_RUNNING
        raised_at = place(tmp_path, '        raise ValueError("odd")')
        assert f"ValueError ({raised_at}): odd" in state.failing_samples


async def test_failures_of_a_worker_outside_of_the_run_count(
    tmp_path: Path, redis_url: str, experiment: Callable[..., Experiment]
) -> None:
    given = experiment("raises")
    async with (
        deployed(tmp_path, redis_url, given, with_rollout=False) as (pool, states),
        asyncio.TaskGroup() as tasks,
    ):
        putting = tasks.create_task(put_failures(pool))
        state = await until(states, has_outcome)
        putting.cancel()
    assert "ENV_ERROR: the browser did not start; fix the environment or the rollout worker" in state.message
    assert " of mine: " in state.message


async def put_failures(pool: PoolClient) -> None:
    """Lease samples and put that they failed, without end."""
    while True:
        samples = [sample for lease in (await pool.lease(wait_seconds=1)).leases for sample in lease.samples]
        results = [failed(sample) for sample in samples]
        request = pool_pb.PutSamplesRequest(
            request_id=new_request_id(), model_tag=TAG, worker_id="mine", results=results
        )
        await pool.pool.PutSamples(request, timeout=LIMIT_SECONDS)


def failed(sample: SampleLease) -> SampleResult:
    return SampleResult(
        sample_id=sample.sample_id,
        attempt=sample.attempt,
        verdict=VERDICT_ENV_ERROR,
        error="the browser did not start",
    )
