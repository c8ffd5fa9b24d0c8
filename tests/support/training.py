"""Runs trainers in the test's process with a real pool. They can be killed at any call, or run user code."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import torch

from nexrl.activity import ActivityTracker
from nexrl.client import BatchClient, TrainBatchClient
from nexrl.models import build_model
from nexrl.spec import Experiment
from nexrl.spec.code import with_folder
from nexrl.train_batch import TrainBatch
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import trajectory_pb2
from nexrl.weights.publisher import TakeSnapshot, WeightPublisher
from nexrl_trainer.build import reference_logprobs
from nexrl_trainer.loop import TrainWorker
from nexrl_trainer.processor import AlgorithmProcessor, build_processor
from nexrl_trainer.server import run_checkpoints
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.step_metrics import StepMetrics
from nexrl_trainer.uploads import Uploads
from tests.support.patience import LIMIT_SECONDS
from tests.support.pool import PoolClient, drawn_span, running_pool, scored
from tests.support.services import settings, small_experiment

STEPS = 4
Reward = Callable[[int], float]
Made = list[tuple[int, bytes]]


class KilledError(Exception):
    """Simulates SIGKILL: the trainer does nothing after it."""


class KillAt(grpc.aio.UnaryUnaryClientInterceptor):
    """Simulates a kill at call number `call_number`: before the pool sees the call or, if `is_seen`, after."""

    def __init__(self, call_number: int, *, is_seen: bool) -> None:
        self._left, self._is_seen = call_number, is_seen

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self._left -= 1
        if self._left == 0 and self._is_seen:
            await (await continuation(client_call_details, request))
        if self._left <= 0:
            raise KilledError
        return await continuation(client_call_details, request)


class RecordingLearner(Learner):
    """Records the tokens and advantages that each step trains on. A step waits while `gate` is clear."""

    made: Made
    is_training: threading.Event
    gate: threading.Event

    def train(self, batch: TrainBatch) -> StepMetrics:
        self.is_training.set()
        self.made.append((self.step, batch.token_ids_N.tobytes() + batch.advantages_N.tobytes()))
        self.gate.wait(LIMIT_SECONDS)
        return super().train(batch)


class FakePublisher(WeightPublisher):
    """Stands for a weight sync whose replicas are always ready."""

    def __init__(self, pool: PoolClient) -> None:
        self._test_pool = pool
        self.published: list[int] = []

    async def publish(self, take: TakeSnapshot) -> None:  # type: ignore[override]
        policy_version = (await take(1 << 20, None, torch.device("cpu"))).manifest.policy_version
        self.published.append(policy_version)
        await self._test_pool.set_version(policy_version)


class World:
    """A pool, rollouts that never end, and trainers that start and stop."""

    def __init__(
        self, folder: Path, experiment: Experiment, pool: PoolClient, reward: Callable[[int], float] = float
    ) -> None:
        self.folder, self.experiment, self.spec, self.pool = folder, experiment, experiment.spec, pool
        self.user_code = experiment.folder
        self._reward = reward
        self.made: Made = []
        self.publisher = FakePublisher(pool)
        self.activity = ActivityTracker(activity_pb.Module(name="trainer"), None)

    def worker(self, channel: grpc.aio.Channel) -> TrainWorker:
        """Build the worker of a newly started trainer process."""
        learner_settings = LearnerSettings(self.spec.algorithm, STEPS, folder=self.user_code)
        learner = RecordingLearner(build_model(self.spec.model, 0), learner_settings)
        learner.made, learner.is_training, learner.gate = self.made, threading.Event(), threading.Event()
        learner.gate.set()
        checkpoints = run_checkpoints(self.folder, self.spec)
        uploads = Uploads.of(self.experiment, settings(self.folder), checkpoints.folder, self.activity)
        checkpoints = replace(checkpoints, uploads=uploads)
        return TrainWorker(self.spec, learner, checkpoints, TrainBatchClient(channel), self.publisher, self.activity)

    def processor(self, channel: grpc.aio.Channel, worker: TrainWorker) -> AlgorithmProcessor:
        """Build the algorithm processor of the trainer's process."""
        loop = asyncio.get_running_loop()
        reference = reference_logprobs(self.spec, shares_prompts=worker.learner.forward_pass.shares_prompts)
        processor = build_processor(
            self.spec.algorithm,
            self.user_code,
            lambda batch: asyncio.run_coroutine_threadsafe(worker.forward(batch), loop).result(),
            reference,
        )
        trajectories = self.folder / "trajectories"
        trajectories.mkdir(exist_ok=True)
        client = BatchClient(channel, worker_id="trainer")
        return AlgorithmProcessor(processor, client, self.activity, trajectories, reference)

    async def live(self, interceptor: KillAt | None = None) -> TrainWorker | None:
        """Run one trainer. Returns its worker if training is complete, None if it was killed."""
        interceptors = [interceptor] if interceptor else []
        address = self.pool.address
        async with grpc.aio.insecure_channel(address, interceptors=interceptors) as channel:
            worker = self.worker(channel)
            processor = self.processor(channel, worker)
            training = asyncio.create_task(worker.run())
            processing = asyncio.create_task(processor.run())
            await asyncio.wait([training, processing], return_when=asyncio.FIRST_COMPLETED)
            is_finished = training.done() and training.exception() is None
            for task in (training, processing):
                task.cancel()
            results = await asyncio.gather(training, processing, return_exceptions=True)
            if not is_finished:  # a real kill ends the threads too, and one of them may be writing a checkpoint
                await asyncio.to_thread(worker._torch.shutdown, cancel_futures=True)
                await _kill_writer(worker)
            unexpected = [r for r in results if isinstance(r, Exception) and not isinstance(r, KilledError)]
            assert not unexpected
        return worker if is_finished else None

    async def roll_out(self) -> None:
        """Produce samples until cancelled. Their tokens and rewards depend only on their ids."""
        while True:
            for lease in (await self.pool.lease(wait_seconds=10)).leases:
                version = (await self.pool.state()).policy_version
                await self.pool.put(
                    [scored(sample, self._trajectory(sample.sample_id, version)) for sample in lease.samples]
                )

    def _trajectory(self, sample_id: str, version: int) -> trajectory_pb2.Trajectory:
        task, _, sample = sample_id.partition(".")
        group, k = int(task.partition("-")[0]), int(sample)  # a task of a new ledger has an id like "2-ab12cd"
        return trajectory_pb2.Trajectory(
            token_ids=[4 + group % 10, 4 + k, 5 + (group + k) % 8, 2],
            loss_mask=[False, True, True, True],
            logprobs=[0.0, -2.0, -2.0, -2.0],
            spans=[trajectory_pb2.PolicySpan(start=1, end=4, policy_version=version)],
            completions=[drawn_span(1, 4)],
            reward=self._reward(k),
        )


@contextlib.asynccontextmanager
async def building_worlds(folder: Path, redis_url: str, name: str) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    """Yield a function that starts worlds, each with its own folder and ledger. Keywords are experiment sections.

    `reward` returns the reward of sample k of a group. User code is in `folder`.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            world_name: str, reward: Callable[[int], float] = float, **sections: Mapping[str, Any]
        ) -> World:
            own = folder / world_name
            own.mkdir()
            known = {
                "trainer": {"steps": STEPS},
                "checkpoint": {"everySteps": 2},
                "algorithm": {"learningRate": 0.01, **sections.pop("algorithm", {})},
            }
            experiment = with_folder(small_experiment(f"{name}-{world_name}", **(known | sections)), folder)
            pool = await stack.enter_async_context(running_pool(own, redis_url, experiment))
            world = World(own, experiment, pool, reward)
            rolling = asyncio.create_task(world.roll_out())
            stack.push_async_callback(asyncio.wait, [rolling])
            stack.callback(rolling.cancel)
            return world

        yield start


async def _kill_writer(worker: TrainWorker) -> None:
    writer = worker._writer
    if writer._writing is not None:
        writer._writing.cancel()
        await asyncio.gather(writer._writing, return_exceptions=True)
    await asyncio.to_thread(writer._thread.shutdown, cancel_futures=True)
