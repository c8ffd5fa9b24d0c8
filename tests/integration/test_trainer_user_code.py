"""Processors of the user against the real pool: in the trainer, and in a process of their own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from nexrl.batch_proto import decode_batch
from nexrl.client import BatchClient, TrainBatchClient
from nexrl.critic_columns import REWARDS, SAMPLE
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, TrainingFailedError
from nexrl.rpc.client import connect
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import decode_train_batch
from nexrl.v1.trajectory_pool_service_pb2 import BatchLease
from nexrl_trainer import loop
from nexrl_trainer.preference import PAIR
from tests.support.pool import PoolClient
from tests.support.services import small_experiment
from tests.support.trainers import Call, running_world
from tests.support.training import STEPS, World, building_worlds

CODE = """
import torch
from nexrl.algorithm import Batch, LossInputs, LossOutputs, PreparedBatch, Processor


class Mine(Processor):
    def fit(self, batch: Batch) -> PreparedBatch:
        sequences = [t.sequence(s.reward - 0.5) for s in batch.samples for t in s.trajectories]
        policy = self.context.policy_logprobs(sequences)
        reference = self.context.reference_logprobs(sequences)
        return PreparedBatch(
            [
                t.sequence(s.reward - 0.5, {"drift": p - r})
                for s, p, r in zip(batch.samples, policy, reference)
                for t in s.trajectories
            ],
            {"largest_drift": float(max(abs(p - r).max() for p, r in zip(policy, reference)))},
        )


def loss(inputs: LossInputs, *, scale: float) -> LossOutputs:
    objective_T = (inputs.advantages_T - scale * inputs.columns["drift"]) * inputs.logprobs_T
    return LossOutputs(-(inputs.weights_T * objective_T).sum(), torch.zeros_like(inputs.weights_T, dtype=torch.bool))
"""


@pytest.fixture
async def build(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    """Builds worlds of their own folder and ledger."""
    async with building_worlds(tmp_path, redis_url, experiment_name) as start:
        yield start


async def test_a_processor_asks_policy_and_initial_model_while_the_trainer_trains(
    build: Callable[..., Awaitable[World]], tmp_path: Path
) -> None:
    (tmp_path / "drifting.py").write_text(CODE)
    algorithm = {"processor": "drifting:Mine", "loss": "drifting:loss", "lossConfig": {"scale": 0.1}}
    world = await build("drifting", algorithm=algorithm)
    worker = await world.live()
    assert worker is not None
    assert worker.learner.step == STEPS
    assert [step for step, _ in world.made] == [*range(STEPS)]


async def test_a_loss_that_raises_ends_the_trainer_and_drops_no_batch(
    build: Callable[..., Awaitable[World]], tmp_path: Path
) -> None:
    (tmp_path / "raising.py").write_text("def loss(inputs):\n    return inputs.columns['absent']\n")
    world = await build("raising", algorithm={"loss": "raising:loss"})
    async with connect(world.pool.address) as channel:
        worker = world.worker(channel)
        processor = asyncio.create_task(world.processor(channel, worker).run())
        with pytest.raises(
            TrainingFailedError,
            match=r"algorithm\.loss raising:loss: KeyError \(.*raising\.py:\d+\): 'no column absent",
        ):
            await worker.run()
        processor.cancel()
        await asyncio.wait([processor])
    assert not (await world.pool.state()).dropped


async def test_batches_without_a_trainable_sample_are_warned_of(
    build: Callable[..., Awaitable[World]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "UNTRAINABLE_BATCHES", 2)
    world = await build("equal", reward=lambda k: 1.0)
    assert await world.live() is not None
    warnings = [record.message for record in caplog.records if "could be trained" in record.message]
    assert [message.partition(":")[0] for message in warnings] == ["step 2", "step 4"]
    assert "no sample of the last 4 batches" in warnings[1]


@pytest.mark.guide("R4")
@pytest.mark.gate
async def test_a_process_of_ones_own_makes_the_train_batches(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    calls: list[str] = []

    async def observe(call: Call) -> None:
        if call.response is None:
            calls.append(call.name)

    algorithm = {"learningRate": 0.01, "processor": "external"}
    experiment = small_experiment(experiment_name, trainer={"steps": STEPS}, algorithm=algorithm)
    async with running_world(tmp_path / "run", redis_url, experiment) as world:
        world.before_call = observe
        async with processing(world.pool, put_leveled):
            assert await world.live() == 0
    assert len(world.steps) == STEPS
    assert set(calls) >= {"LeaseTrainBatch", "AckTrainBatch"}
    assert not {"LeaseBatch", "PutTrainBatch"} & set(calls), "the trainer's own processor is switched off"


async def test_a_train_batch_without_what_the_critic_needs_is_refused_where_it_enters_and_nothing_is_dropped(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    async def put(client: BatchClient, lease: BatchLease) -> None:
        with pytest.raises(InvalidArgumentError, match=r"columns\[rewards\]: algorithm.type ppo needs the reward"):
            await put_leveled(client, lease)
        sequences = [
            t.sequence(0.0, {REWARDS: np.where(t.loss_mask, s.reward, 0.0), SAMPLE: np.array(number)})
            for number, s in enumerate(decode_batch(lease).samples)
            for t in s.trajectories
        ]
        await client.put(lease, TrainBatch.pack(sequences), {})

    algorithm = {"type": "ppo", "learningRate": 0.01, "processor": "external"}
    experiment = small_experiment(experiment_name, trainer={"steps": STEPS}, algorithm=algorithm)
    async with running_world(tmp_path / "run", redis_url, experiment) as world:
        async with processing(world.pool, put):
            assert await world.live() == 0
        assert not (await world.pool.state()).dropped
    assert len(world.steps) == STEPS


async def test_a_train_batch_that_cannot_be_trained_is_dropped_with_the_reason_and_the_run_goes_on(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    batches = count()

    async def put(client: BatchClient, lease: BatchLease) -> None:
        is_first = next(batches) == 0
        sequences = [
            t.sequence(1.0, {} if is_first else {PAIR: np.array(pair)})
            for s, pair in zip(decode_batch(lease).samples, (1, -1, 2, -2), strict=True)
            for t in s.trajectories
        ]
        batch = TrainBatch.pack(sequences)
        await client.put(lease, replace(batch, reference_logprobs_N=batch.rollout_logprobs_N), {})

    algorithm = {"loss": "dpo", "learningRate": 0.01, "processor": "external"}
    experiment = small_experiment(experiment_name, trainer={"steps": STEPS}, algorithm=algorithm)
    async with running_world(tmp_path / "run", redis_url, experiment) as world:
        async with processing(world.pool, put):
            assert await world.live() == 0
        dropped = {"training_failed": experiment.spec.trajectory_pool.batch_size}
        assert (await world.pool.state()).dropped == dropped
    assert len(world.steps) == STEPS
    assert "columns[pair]: loss dpo needs an integer for each sequence" in (world.folder / "trainer.log").read_text()


async def put_leveled(client: BatchClient, lease: BatchLease) -> None:
    samples = decode_batch(lease).samples
    sequences = [t.sequence(s.reward - 0.5, {"level": 1.0}) for s in samples for t in s.trajectories]
    await client.put(lease, TrainBatch.pack(sequences), {"mine": 1.0})


@asynccontextmanager
async def processing(
    pool: PoolClient, put: Callable[[BatchClient, BatchLease], Awaitable[None]]
) -> AsyncIterator[None]:
    """What a user's process does, with nothing but the library."""

    async def process() -> None:
        async with connect(pool.address) as channel:
            client = BatchClient(channel, worker_id="mine")
            while not (answer := await client.lease()).exhausted:
                if answer.HasField("lease"):
                    await put(client, answer.lease)

    task = asyncio.create_task(process())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_train_batch_that_the_trainer_could_not_read_is_refused_with_the_column_named(
    build: Callable[..., Awaitable[World]],
) -> None:
    world = await build("refused")
    async with connect(world.pool.address) as channel:
        trainer, client = TrainBatchClient(channel), BatchClient(channel, worker_id="mine")
        assert (await trainer.resume(0)).replayed_steps == 0
        lease = (await client.lease()).lease
        sequences = [t.sequence(1.0) for s in decode_batch(lease).samples for t in s.trajectories]
        good = replace(TrainBatch.pack(sequences), columns={"level": np.arange(len(sequences))})
        bad = replace(good)
        object.__setattr__(bad, "columns", {"level": np.arange(3)})  # as a client in another language may send it
        with pytest.raises(InvalidArgumentError, match=r"columns\[level\]: has shape \(3,\)"):
            await client.put(lease, bad)
        await client.put(lease, good, {"mine": 2.0})
        train_batch = (await trainer.lease(0)).train_batch
        assert decode_train_batch(train_batch.tensors).columns["level"].tolist() == [*range(len(sequences))]
        assert train_batch.metrics["mine"] == 2.0
        assert not (await trainer.ack(0, train_batch)).checkpoint_wanted
        assert (await trainer.state()).trained == 1
        await trainer.commit(1)
        assert (await trainer.state()).durable_steps == 1
        newer = TrainBatchClient(channel)
        await newer.resume(1)
        with pytest.raises(FailedPreconditionError):
            await trainer.lease(1)
