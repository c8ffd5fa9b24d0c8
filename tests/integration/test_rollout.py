"""The rollout process as it is started, and workers of one's own, against the contract on real gRPC servers."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path

import pytest

from nexrl.activity import ActivityTracker
from nexrl.client import MAX_PUT_BYTES, RolloutClient, open_rollout_client
from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.policy import Sampling
from nexrl.rollout_worker import RolloutWorker, scored
from nexrl.sample_states import ATTEMPT
from nexrl.spec import Experiment
from nexrl.tensor_proto import decode_tensor
from nexrl.transcript import Transcript
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    PURPOSE_VALIDATION,
    PUT_OUTCOME_ACCEPTED,
    VERDICT_ENV_ERROR,
    VERDICT_OK,
    SampleResult,
    TaskLease,
    Trajectory,
)
from nexrl_rollout.worker import RolloutLimits, RolloutLoop
from tests.support.patience import eventually
from tests.support.rollout import (
    ALPHABET,
    FakeEngine,
    FakePool,
    FakeWeightSync,
    completion,
    experiment,
    replica,
    serving,
    task_lease,
)
from tests.support.rollout_process import contract, rollout_process

REPOSITORY = Path(__file__).parents[2]
EOS = 2


def reverses(request: GenerateRequest, index: int) -> GeneratedCompletion:
    """The right answer to "write it backwards"."""
    return completion([*reversed(request.prompt_token_ids[1:]), EOS])


CLOSED = """
from pathlib import Path
from nexrl.environment import Outcome


class Closed:
    def run(self, task, endpoint):
        return Outcome("env_error", error=f"{task.purpose} {endpoint.temperature}")

    def close(self):
        Path(__file__).with_name("closed").touch()
"""


def rewards(results: Sequence[SampleResult]) -> list[float]:
    return [result.trajectories[0].reward for result in results]


@pytest.mark.guide("G1", "G15", "Q8")
async def test_process_feeds_training_and_validation(tmp_path: Path) -> None:
    leases = [task_lease(group, 4, prompt="123", answer="321") for group in range(3)]
    leases.append(task_lease(0, 2, prompt="123", answer="999", purpose=PURPOSE_VALIDATION))
    pool = FakePool(leases)
    async with rollout_process(pool, FakeEngine(reverses), tmp_path, type="simple") as process:
        await pool.wait_for(lambda: sum(map(len, pool.results.values())) == 14)
        # The pool has the samples before the process has its answer. A stop in between would return them.
        await eventually(lambda: ATTEMPT not in {work.activity for work in process.activity.snapshot().work})
    assert rewards(pool.results[PURPOSE_TRAINING]) == [1.0] * 12
    assert rewards(pool.results[PURPOSE_VALIDATION]) == [0.0] * 2
    assert not pool.returned


@pytest.mark.guide("G17")
async def test_process_runs_an_environment(tmp_path: Path) -> None:
    pool = FakePool([task_lease(0, 4, prompt="7", answer="7")])
    reference = "nexrl_rollout.environments.number_guess:number_guess"
    async with rollout_process(pool, FakeEngine(reverses), tmp_path, type="agent", environment=reference):
        await pool.wait_for(lambda: len(pool.results[PURPOSE_TRAINING]) == 4)
    results = pool.results[PURPOSE_TRAINING]
    assert rewards(results) == [1.0] * 4
    assert [dict(result.trajectories[0].reward_components) for result in results] == [{"guesses": 1.0}] * 4


@pytest.mark.parametrize("kind", ["", "async "])
async def test_an_environment_knows_purpose_and_temperature_and_is_closed_when_the_process_stops(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"mine{kind.strip()}.py").write_text(CLOSED.replace("def ", f"{kind}def "))
    leases = [task_lease(0, 1), task_lease(0, 1, purpose=PURPOSE_VALIDATION)]
    leases[1].temperature = 0.25
    pool = FakePool(leases)
    reference = f"mine{kind.strip()}:Closed"
    async with rollout_process(pool, FakeEngine(reverses), tmp_path, type="agent", environment=reference):
        await pool.wait_for(lambda: sum(map(len, pool.results.values())) == 2)
    errors = {purpose: pool.results[purpose][0].error for purpose in (PURPOSE_TRAINING, PURPOSE_VALIDATION)}
    assert errors == {PURPOSE_TRAINING: "training 1.0", PURPOSE_VALIDATION: "validation 0.25"}
    assert (tmp_path / "closed").exists()


@pytest.mark.guide("Q36")
@pytest.mark.parametrize("retries", [0, 1])
async def test_a_failing_engine_is_asked_again_as_often_as_the_experiment_says(tmp_path: Path, retries: int) -> None:
    pool = FakePool([task_lease(0, 4, prompt="123", answer="321")])
    engine = FakeEngine(reverses, errors=[NexrlError("broken")] * 2)
    document = experiment(type="simple").model_dump(by_alias=True, exclude_none=True, mode="json")
    document["spec"]["inference"]["maxRetries"] = retries
    limited = Experiment.model_validate_json(json.dumps(document))
    async with rollout_process(pool, engine, tmp_path, limited):
        await pool.wait_for(lambda: len(pool.results[PURPOSE_TRAINING]) == 4)
    assert {result.verdict for result in pool.results[PURPOSE_TRAINING]} == {VERDICT_ENV_ERROR}
    assert len(engine.requests) == retries + 1


@pytest.mark.guide("G5", "G13")
async def test_process_that_is_told_to_stop_returns_its_samples(tmp_path: Path) -> None:
    engine = FakeEngine(reverses)
    engine.is_open.clear()
    pool = FakePool([task_lease(group, 4) for group in range(2)])
    async with rollout_process(pool, engine, tmp_path, type="simple"):
        await pool.wait_for(lambda: len(pool.granted) == 8)
    assert sorted(pool.returned) == sorted(pool.granted)


@pytest.mark.guide("A3")
async def test_example_worker_feeds_a_run_through_grpc_alone() -> None:
    pool = FakePool([task_lease(group, 4, prompt="123", answer="321") for group in range(2)])
    pool.is_over = True
    async with contract(pool, FakeEngine(reverses)) as addresses:
        script = REPOSITORY / "examples" / "custom_rollout_worker.py"
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), *addresses, ALPHABET)
        assert await process.wait() == 0
    assert rewards(pool.results[PURPOSE_TRAINING]) == [1.0] * 8


async def test_example_worker_ends_when_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = run_path(str(REPOSITORY / "examples" / "custom_rollout_worker.py"))
    main = example["main"]
    monkeypatch.setitem(main.__globals__, "GENERATE_SECONDS", 0.2)
    monkeypatch.setattr("nexrl.client.CALL_SECONDS", 0.2)
    monkeypatch.setitem(RolloutClient.lease.__kwdefaults__ or {}, "wait_seconds", 0.1)
    pool, registry = (
        FakePool([task_lease(group, 4, prompt="123", answer="321") for group in range(2)]),
        FakeWeightSync(),
    )
    async with serving(pool) as pool_address, serving(registry) as registry_address:
        await registry.set(replica("replica-0", "127.0.0.1:1"))  # an engine that is gone
        working = asyncio.create_task(main(pool_address, registry_address, ALPHABET))
        await pool.wait_for(lambda: pool.lease_calls > 2)
    await working
    assert capsys.readouterr().err.startswith("the run is over: ")


class Custom(RolloutWorker):
    """A user's worker: one method."""

    def __init__(self, client: RolloutClient) -> None:
        self._policy = client.policy

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        sampling = Sampling(max_new_tokens=8, temperature=0.7)
        completions = await self._policy.generate([1, 5, 6], len(lease.samples), sampling)
        results = []
        for sample, generated in zip(lease.samples, completions, strict=True):
            transcript = Transcript([1, 5, 6])
            transcript.add_completion(generated)
            results.append(scored(sample, [transcript.trajectory(0.5)], generated.finish_reason))
        return results


@pytest.mark.guide("G1", "G2", "G8", "G15")
async def test_subclass_with_one_method_is_a_worker() -> None:
    pool = FakePool([task_lease(0, 4)])
    engine = FakeEngine(reverses)
    async with (
        contract(pool, engine) as (pool_address, registry_address),
        open_rollout_client(pool_address, registry_address, worker_id="custom") as client,
    ):
        limits = RolloutLimits(max_in_flight=4, group_size=4, lease_seconds=60, timeout_seconds=30)
        loop = RolloutLoop(client, Custom(client), limits, ActivityTracker(Module(name="custom"), None))
        running = asyncio.create_task(loop.run())
        await pool.wait_for(lambda: len(pool.results[PURPOSE_TRAINING]) == 4)
        running.cancel()
        await asyncio.wait([running])
    assert engine.requests[0].temperature == 0.7
    assert rewards(pool.results[PURPOSE_TRAINING]) == [0.5] * 4


WORKER = """
from nexrl.rollout_worker import RolloutWorker, WorkerContext, scored, with_columns
from nexrl.transcript import Transcript


class Mine(RolloutWorker):
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def rollout(self, lease):
        task = self.context.task(lease)
        prompt_ids = self.context.text.encode_prompt(task["prompt"])
        results = []
        for sample, completion in zip(lease.samples, await self.context.generate(lease, prompt_ids)):
            transcript = Transcript(prompt_ids)
            transcript.add_completion(completion)
            reward = float(self.context.text.decode([completion.token_ids])[0] == task["answer"])
            trajectory = transcript.trajectory(reward, metadata=self.context.metadata(task))
            with_columns(trajectory, {"place": range(len(trajectory.token_ids)), "difficulty": 0.5})
            results.append(scored(sample, [trajectory], completion.finish_reason))
        return results


class Exits(RolloutWorker):
    def __init__(self, context):
        raise SystemExit(1)

    async def rollout(self, lease):
        return []


class NeedsMore(RolloutWorker):
    def __init__(self, context, more):
        pass

    async def rollout(self, lease):
        return []
"""


@pytest.mark.guide("R3")
async def test_a_class_of_the_user_is_the_worker_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker_of_mine.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    engine = FakeEngine(reverses)
    pool = FakePool([task_lease(0, 4, prompt="123", answer="321")])
    async with rollout_process(pool, engine, tmp_path, type="worker", worker="worker_of_mine:Mine"):
        await pool.wait_for(lambda: len(pool.results[PURPOSE_TRAINING]) == 4)
    assert rewards(pool.results[PURPOSE_TRAINING]) == [1.0] * 4
    trajectory = pool.results[PURPOSE_TRAINING][0].trajectories[0]
    assert decode_tensor("place", trajectory.columns["place"]).tolist() == [*range(len(trajectory.token_ids))]
    assert decode_tensor("difficulty", trajectory.columns["difficulty"]) == 0.5
    assert trajectory.metadata["task_id"]
    assert len(set(engine.requests[0].seeds)) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NeedsMore", "rollout.worker worker_of_mine:NeedsMore: TypeError.*missing 1 required positional argument"),
        ("Exits", "rollout.worker worker_of_mine:Exits: SystemExit .*: 1"),
        ("scored", "rollout.worker worker_of_mine:scored: not a subclass of nexrl.rollout_worker.RolloutWorker"),
    ],
)
async def test_a_worker_that_cannot_be_made_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "worker_of_mine.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgumentError, match=message):
        async with rollout_process(
            FakePool([]), FakeEngine(reverses), tmp_path, type="worker", worker=f"worker_of_mine:{name}"
        ):
            pass


async def test_results_larger_than_one_call_are_put_in_several() -> None:
    pool = FakePool()
    large = Trajectory(response="x" * (MAX_PUT_BYTES // 3))
    results = [
        SampleResult(sample_id=f"0.{index}", attempt=1, verdict=VERDICT_OK, trajectories=[large]) for index in range(5)
    ]
    async with (
        contract(pool, FakeEngine()) as (pool_address, registry_address),
        open_rollout_client(pool_address, registry_address, worker_id="custom") as client,
    ):
        assert await client.put(PURPOSE_TRAINING, results) == [PUT_OUTCOME_ACCEPTED] * 5
    assert pool.puts == 3
    assert [result.sample_id for result in pool.results[PURPOSE_TRAINING]] == [f"0.{index}" for index in range(5)]
