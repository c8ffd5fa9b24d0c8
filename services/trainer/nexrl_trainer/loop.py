"""The train worker: one training loop, top to bottom.

resume -> publish -> (lease -> train -> ack -> publish -> checkpoint when due)* -> last checkpoint -> done
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import grpc
from prometheus_client import Gauge
from transformers import PreTrainedTokenizerBase

from nexrl.activity import ActivityTracker
from nexrl.models import iter_weights
from nexrl.rpc.client import call, new_request_id
from nexrl.spec import ExperimentSpec
from nexrl.v1 import train_batch_pool_service_pb2 as pb
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceStub
from nexrl.weights.publisher import WeightPublisher
from nexrl_trainer.checkpoint import (
    CheckpointMetadata,
    find_latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from nexrl_trainer.codec import decode_train_batch
from nexrl_trainer.step import Learner

log = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
CALL_SECONDS = 60.0

STEP = Gauge("nexrl_trainer_step", "Optimizer steps made.")
STEP_SECONDS = Gauge("nexrl_trainer_step_seconds", "Seconds of the last step, by phase.", ["phase"])

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints are written, what to start from when there is none yet, and the tokenizer saved with them."""

    folder: Path
    start_from: Path | None
    tokenizer: PreTrainedTokenizerBase


class TrainWorker:
    """Trains until the steps are made or the data is exhausted. All torch work on the learner is in one thread."""

    def __init__(
        self,
        spec: ExperimentSpec,
        learner: Learner,
        checkpoints: Checkpoints,
        channel: grpc.aio.Channel,
        publisher: WeightPublisher,
        activity: ActivityTracker,
    ) -> None:
        self.spec = spec
        self.learner = learner
        self.doing = "idle"
        self.is_done = False
        self._checkpoints = checkpoints
        self._pool = TrainBatchPoolServiceStub(channel)
        self._publisher = publisher
        self._activity = activity
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        # Whoever changes or sends the weights holds it.
        self.weights_lock = asyncio.Lock()
        # Held from a batch to its checkpoint: a stop waits for it, so that it finds whole steps only.
        self._step_in_hand = asyncio.Lock()
        self._checkpointed_step = -1
        self._incarnation = 0
        self._acked_steps = -1
        self._data_cursor = 0
        self._trained_since_checkpoint: list[int] = []

    async def run(self) -> None:
        """The whole of training; `is_done` afterwards."""
        await self._resume()
        await self.publish()
        if self.spec.trainer.steps == 0:
            self.is_done = True
            return
        while self.learner.step < self.spec.trainer.steps:
            batch = await self._next_batch()
            if batch is None:
                log.warning("the data is exhausted after %d of %d steps", self.learner.step, self.spec.trainer.steps)
                break
            async with self._step_in_hand:
                await self._step(batch)
                if self._is_checkpoint_due():
                    await self.save_checkpoint()
        await self.save_checkpoint()
        self.is_done = True
        await self._activity.post_metrics(self.learner.step, {"training_complete": 1.0})

    async def in_torch_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run torch work where all of it runs, so that its threads are not doubled."""
        return await asyncio.get_running_loop().run_in_executor(self._torch, function)

    async def publish(self) -> None:
        """Make the current weights the committed policy version, unless a later one has been committed already.

        A trainer that replays steps after a crash meets versions that its predecessor had published.
        """
        with self._phase("publish", waiting_on="weight-sync"):
            async with self.weights_lock:
                await self._publisher.publish(list(iter_weights(self.learner.model)), self.learner.step)

    async def save_checkpoint(self) -> Path:
        """Write `global_step_<n>`, then tell the pool that its train batches are no longer needed.

        Raises AlreadyExistsError when the folder has other weights of that step.
        """
        path = self._checkpoints.folder / f"global_step_{self.learner.step}"
        with self._phase("checkpoint"):
            if self.learner.step != self._checkpointed_step:
                metadata = CheckpointMetadata(
                    step=self.learner.step,
                    batch_ids=tuple(self._trained_since_checkpoint),
                    cursor={"position": self._data_cursor},
                    model_tag=self.spec.model.tag,
                )
                folder = self._checkpoints.folder
                await self.in_torch_thread(
                    lambda: save_checkpoint(folder, self.learner, self._checkpoints.tokenizer, metadata)
                )
            self._checkpointed_step = self.learner.step
            await self._commit_checkpoint()
            self._trained_since_checkpoint.clear()
            await asyncio.to_thread(prune_checkpoints, self._checkpoints.folder, self.spec.checkpoint.keep)
        return path

    async def stop(self) -> None:
        """Finish the step in hand, and save what no checkpoint contains yet. The loop is cancelled after this."""
        await self._step_in_hand.acquire()
        if self.learner.step == self._acked_steps and not self.is_done:
            await self.save_checkpoint()

    async def load_checkpoint(self, path: Path) -> None:
        """Put a checkpoint's state into the learner, and remember where its data goes on."""
        metadata = await self.in_torch_thread(lambda: load_checkpoint(path, self.learner))
        self._data_cursor = int(metadata.cursor.get("position", 0))
        self._checkpointed_step = self.learner.step if path.parent == self._checkpoints.folder else -1
        log.info("loaded %s", path)

    async def _commit_checkpoint(self) -> None:
        if self.learner.step != self._acked_steps:
            return  # made of steps that the Trainer RPCs asked for: no train batch belongs to them
        request = pb.CommitCheckpointRequest(
            request_id=new_request_id(),
            model_tag=self.spec.model.tag,
            steps=self.learner.step,
            incarnation=self._incarnation,
        )
        await call(self._pool.CommitCheckpoint, request, timeout_seconds=CALL_SECONDS)

    async def _resume(self) -> None:
        path = find_latest_checkpoint(self._checkpoints.folder) or self._checkpoints.start_from
        if path is not None:
            await self.load_checkpoint(path)
        request = pb.ResumeFromCheckpointRequest(
            request_id=new_request_id(),
            model_tag=self.spec.model.tag,
            steps=self.learner.step,
            data_cursor=self._data_cursor,
        )
        answer = await call(self._pool.ResumeFromCheckpoint, request, timeout_seconds=CALL_SECONDS)
        self._incarnation, self._acked_steps = answer.incarnation, self.learner.step
        log.info("trainer %d begins at step %d", answer.incarnation, self.learner.step)
        if answer.replayed_steps:
            log.warning("%d steps are in no checkpoint and will be replayed", answer.replayed_steps)

    async def _next_batch(self) -> pb.TrainBatch | None:
        with self._phase("wait_batch", waiting_on="trajectory-pool"):
            while True:
                request = pb.LeaseTrainBatchRequest(
                    request_id=new_request_id(),
                    model_tag=self.spec.model.tag,
                    step=self.learner.step,
                    wait_seconds=WAIT_SECONDS,
                    incarnation=self._incarnation,
                )
                answer = await call(self._pool.LeaseTrainBatch, request, timeout_seconds=WAIT_SECONDS + CALL_SECONDS)
                if answer.HasField("train_batch"):
                    return answer.train_batch
                if answer.exhausted:
                    return None

    async def _step(self, batch: pb.TrainBatch) -> None:
        step = self.learner.step
        with self._phase("train"):
            async with self.weights_lock:
                arrays = decode_train_batch(batch.tensors)
                metrics = asdict(await self.in_torch_thread(lambda: self.learner.train(arrays)))
        self._data_cursor = batch.data_cursor
        self._trained_since_checkpoint.append(batch.batch_id)
        request = pb.AckTrainBatchRequest(
            request_id=new_request_id(), model_tag=self.spec.model.tag, step=step, incarnation=self._incarnation
        )
        await call(self._pool.AckTrainBatch, request, timeout_seconds=CALL_SECONDS)
        self._acked_steps = self.learner.step
        STEP.set(self.learner.step)
        await asyncio.gather(self._post({**batch.metrics, **metrics}), self.publish())

    async def _post(self, metrics: Mapping[str, float]) -> None:
        await self._activity.post_metrics(self.learner.step, metrics)

    def _is_checkpoint_due(self) -> bool:
        every = self.spec.checkpoint.every_steps
        return every > 0 and self.learner.step % every == 0

    def _phase(self, name: str, waiting_on: str = "") -> "_Phase":
        return _Phase(self, self._activity, name, waiting_on)


class _Phase:
    """Names what the worker does while the block runs, and times it."""

    def __init__(self, worker: TrainWorker, activity: ActivityTracker, name: str, waiting_on: str) -> None:
        self._worker, self._name = worker, name
        self._work = activity.track(name, waiting_on)

    def __enter__(self) -> None:
        self._work.__enter__()
        self._worker.doing, self._began = self._name, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._worker.doing = "idle"
        STEP_SECONDS.labels(self._name).set(time.monotonic() - self._began)
        self._work.__exit__(kind, error, traceback)
