"""The train worker: one training loop, top to bottom.

resume -> publish -> (lease -> train -> ack -> publish -> checkpoint when due)* -> last checkpoint -> done
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from prometheus_client import Gauge
from transformers import PreTrainedTokenizerBase

from nexrl.activity import ActivityTracker
from nexrl.errors import FailedPreconditionError, LeaseLostError
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
    put_aside,
    read_metadata,
    save_checkpoint,
)
from nexrl_trainer.codec import decode_train_batch
from nexrl_trainer.step import Learner

if TYPE_CHECKING:
    from grpc.aio import UnaryUnaryCall

log = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
CALL_SECONDS = 60.0

STEP = Gauge("nexrl_trainer_step", "Optimizer steps made.")
STEP_SECONDS = Gauge("nexrl_trainer_step_seconds", "Seconds of the last step, by phase.", ["phase"])

ResultT = TypeVar("ResultT")
ResponseT = TypeVar("ResponseT")


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
        self.has_begun = asyncio.Event()
        """Set when the ledger knows of this trainer."""
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
        self._is_checkpoint_wanted = False
        self._is_contradicted = False
        self._data_cursor = 0
        self._trained_since_checkpoint: list[int] = []

    async def run(self) -> None:
        """The whole of training; `is_done` afterwards."""
        await self._resume()
        self.has_begun.set()
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
        async with self._step_in_hand:
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

        Raises AlreadyExistsError when the folder has other weights of that step, LeaseLostError when the ledger does
        not know of these steps.
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
            if (
                self.learner.step == self._acked_steps
            ):  # else the Trainer RPCs have made it: no train batch belongs to it
                await self._commit_checkpoint()
            self._trained_since_checkpoint.clear()
        return path

    async def stop(self) -> None:
        """Finish the step in hand, and save what no checkpoint contains yet. The loop is cancelled after this."""
        await self._step_in_hand.acquire()
        if self.learner.step == self._acked_steps and not self.is_done and not self._is_contradicted:
            await self.save_checkpoint()

    async def load_checkpoint(self, path: Path) -> None:
        """Put a checkpoint's state into the learner, and remember where its data goes on."""
        metadata = await self.in_torch_thread(lambda: load_checkpoint(path, self.learner))
        self._data_cursor = int(metadata.cursor.get("position", 0))
        self._checkpointed_step = self.learner.step if path.parent == self._checkpoints.folder else -1
        log.info("loaded %s", path)

    async def _commit_checkpoint(self) -> None:
        request = pb.CommitCheckpointRequest(
            request_id=new_request_id(),
            model_tag=self.spec.model.tag,
            steps=self.learner.step,
            incarnation=self._incarnation,
        )
        await self._call_ledger(self._pool.CommitCheckpoint, request)
        # Only now: until the ledger knows of this checkpoint it resumes from an older one.
        await asyncio.to_thread(prune_checkpoints, self._checkpoints.folder, self.spec.checkpoint.keep)

    async def _resume(self) -> None:
        """Begin at the newest checkpoint that the ledger can follow.

        One that is ahead of the ledger (Redis has lost acknowledgements) is put aside before an older one is tried: the
        samples of its last steps will be granted again, so that nobody may ever go on from it.
        """
        while True:
            path = find_latest_checkpoint(self._checkpoints.folder) or self._checkpoints.start_from
            begin = read_metadata(path) if path else CheckpointMetadata(step=0)
            try:
                answer = await self._resume_from(begin)
                break
            except FailedPreconditionError as refusal:
                await self._put_aside(path, begin.step, refusal)
        if path is not None:
            await self.load_checkpoint(path)
        self._incarnation, self._acked_steps = answer.incarnation, self.learner.step
        state = await self._pool_state()
        self._publisher.newest_version = max(self.learner.step, state.durable_steps + state.trained + state.queued)
        log.info("trainer %d begins at step %d", answer.incarnation, self.learner.step)
        if answer.replayed_steps:
            log.warning("%d steps are in no checkpoint and will be replayed", answer.replayed_steps)

    async def _resume_from(self, begin: CheckpointMetadata) -> pb.ResumeFromCheckpointResponse:
        request = pb.ResumeFromCheckpointRequest(
            request_id=new_request_id(),
            model_tag=self.spec.model.tag,
            steps=begin.step,
            data_cursor=int(begin.cursor.get("position", 0)),
        )
        return await call(self._pool.ResumeFromCheckpoint, request, timeout_seconds=CALL_SECONDS)

    async def _put_aside(self, path: Path | None, step: int, refusal: FailedPreconditionError) -> None:
        """Put a checkpoint aside that is ahead of the ledger. Raises FailedPreconditionError when that is not why."""
        state = await self._pool_state()
        acknowledged, folder = state.durable_steps + state.trained, self._checkpoints.folder
        if path is None or path.parent != folder or step <= acknowledged:
            at_hand = ", ".join(sorted(found.name for found in folder.glob("global_step_*"))) or "none"
            raise FailedPreconditionError(
                f"no checkpoint fits the ledger, which goes on from {state.durable_steps} to {acknowledged} steps. "
                f"In {folder}: {at_hand}; tried last: {path or 'the initial weights'}. Put a checkpoint of so many "
                "steps there, or start under another metadata.name with resume.mode from_path and one of these"
            ) from refusal
        aside = await asyncio.to_thread(put_aside, path)
        log.warning(
            "%s is kept as %s and not used: the ledger knows of %d steps only, so Redis has lost its last writes",
            *(path, aside.name, acknowledged),
        )

    async def _pool_state(self) -> pb.GetTrainBatchPoolStateResponse:
        request = pb.GetTrainBatchPoolStateRequest(model_tag=self.spec.model.tag)
        return await call(self._pool.GetTrainBatchPoolState, request, timeout_seconds=CALL_SECONDS)

    async def _call_ledger(
        self, method: "Callable[..., UnaryUnaryCall[Any, ResponseT]]", request: object, wait_seconds: float = 0
    ) -> ResponseT:
        """Call the pool. Raises LeaseLostError when the ledger holds something else than this trainer has made.

        The process ends then, and is started again: only `_resume` can mend this, never a repeated call, and these
        weights must be neither saved nor trained on.
        """
        try:
            return await call(method, request, timeout_seconds=wait_seconds + CALL_SECONDS)
        except FailedPreconditionError as error:
            self._is_contradicted = True
            raise LeaseLostError(
                f"the ledger contradicts this trainer, which has made {self.learner.step} steps: {error}; "
                "started again, it goes on from a checkpoint that both know"
            ) from error

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
                answer = await self._call_ledger(self._pool.LeaseTrainBatch, request, WAIT_SECONDS)
                if answer.HasField("train_batch"):
                    return answer.train_batch
                if answer.exhausted:
                    return None

    async def _step(self, batch: pb.TrainBatch) -> None:
        step = self.learner.step
        with self._phase("train") as training:
            async with self.weights_lock:
                arrays = decode_train_batch(batch.tensors)
                metrics = await self.in_torch_thread(lambda: self.learner.train(arrays))
        self._data_cursor = batch.data_cursor
        self._trained_since_checkpoint.append(batch.batch_id)
        request = pb.AckTrainBatchRequest(
            request_id=new_request_id(),
            model_tag=self.spec.model.tag,
            step=step,
            incarnation=self._incarnation,
            sample_ids=batch.sample_ids,
            put_id=batch.put_id,
        )
        answer = await self._call_ledger(self._pool.AckTrainBatch, request)
        self._is_checkpoint_wanted = answer.checkpoint_wanted
        self._acked_steps = self.learner.step
        STEP.set(self.learner.step)
        figures = {**batch.metrics, **metrics.figures(), "train_seconds": training.seconds}
        await asyncio.gather(self._post(figures), self.publish())

    async def _post(self, metrics: Mapping[str, float]) -> None:
        await self._activity.post_metrics(self.learner.step, metrics)

    def _is_checkpoint_due(self) -> bool:
        every = self.spec.checkpoint.every_steps
        return self._is_checkpoint_wanted or (every > 0 and self.learner.step % every == 0)

    def _phase(self, name: str, waiting_on: str = "") -> "_Phase":
        return _Phase(self, self._activity, name, waiting_on)


class _Phase:
    """Names what the worker does while the block runs, and times it."""

    def __init__(self, worker: TrainWorker, activity: ActivityTracker, name: str, waiting_on: str) -> None:
        self.seconds = 0.0
        """How long the block took, once it has ended."""
        self._worker, self._name = worker, name
        self._work = activity.track(name, waiting_on)

    def __enter__(self) -> Self:
        self._work.__enter__()
        self._worker.doing, self._began = self._name, time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._worker.doing = "idle"
        self.seconds = time.monotonic() - self._began
        STEP_SECONDS.labels(self._name).set(self.seconds)
        self._work.__exit__(kind, error, traceback)
