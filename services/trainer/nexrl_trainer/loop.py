"""The train worker: one training loop, top to bottom.

resume -> publish -> (lease -> train -> ack -> publish -> checkpoint when due)* -> last checkpoint -> done

A checkpoint is copied to host memory between two steps, and written beside the steps that follow.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import Gauge

from nexrl.activity import ActivityTracker
from nexrl.client import TrainBatchClient
from nexrl.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NexrlError,
    TrainingFailedError,
)
from nexrl.run_layout import checkpoint_path
from nexrl.spec import ExperimentSpec
from nexrl.spec.rollout import DemonstrationRollout
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import decode_train_batch
from nexrl.v1 import train_batch_pool_service_pb2 as pb
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl.weights.packing import Snapshot
from nexrl.weights.publisher import WeightPublisher
from nexrl_trainer.checkpoint import (
    CheckpointMetadata,
    OpenedCheckpoint,
    hold_checkpoint,
    open_checkpoint,
    prune_checkpoints,
    remove_abandoned,
)
from nexrl_trainer.checkpoint_writer import CheckpointWriter
from nexrl_trainer.phase import Phase
from nexrl_trainer.progress_log import ProgressLog
from nexrl_trainer.starting_point import Checkpoints, StartingPoint
from nexrl_trainer.step import Learner
from nexrl_trainer.step_metrics import StepMetrics
from nexrl_trainer.uploads import END_SECONDS

log = logging.getLogger(__name__)

UNTRAINABLE_BATCHES = 10
"""Batches in a row without a trained token after which the trainer warns."""

MAX_DROPS_IN_A_ROW = 3
"""If so many batches are dropped one after another, the fault is in the weights or the settings, not in a batch. A
checkpoint contains the count, because a new process must not start it again."""

OF_SAMPLES = frozenset({"reward_mean", "ratio_mean", "ratio_min", "ratio_max", "mismatch_kl"})
"""Figures of what the policy has sampled, which demonstrations do not have."""

STEP = Gauge("nexrl_trainer_step", "Optimizer steps made.")

ResultT = TypeVar("ResultT")
ResponseT = TypeVar("ResponseT")


class TrainWorker:
    """Trains until the steps are made or the data is exhausted. One thread does all torch work on the learner."""

    def __init__(
        self,
        spec: ExperimentSpec,
        learner: Learner,
        checkpoints: Checkpoints,
        pool: TrainBatchClient,
        publisher: WeightPublisher,
        activity: ActivityTracker,
    ) -> None:
        self.spec = spec
        self.learner = learner
        self.doing = "idle"
        self.is_done = False
        self.has_begun = asyncio.Event()
        """Set when this trainer has registered with the ledger."""
        self._checkpoints = checkpoints
        self._uploads = checkpoints.uploads
        self._pool = pool
        self._publisher = publisher
        self._activity = activity
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._writer = CheckpointWriter(activity)
        self._progress = ProgressLog(spec.trainer.steps)
        self.weights_lock = asyncio.Lock()
        """Held while weights are changed, sent or used in a forward pass."""
        # Held from a batch to its checkpoint: a stop waits for it, so that it finds whole steps only.
        self._step_in_hand = asyncio.Lock()
        self._one_begins = asyncio.Lock()
        self._beginning: asyncio.Task[None]
        self._checkpointed_step = -1
        self._untrainable_batches = 0
        self._acked_steps = -1
        self._is_checkpoint_wanted = False
        self._is_contradicted = False
        self._data_cursor = 0
        self._drops_in_a_row = 0
        self._has_skipped = False
        self._trained_since_checkpoint: list[int] = []

    async def run(self) -> None:
        """The whole of training; `is_done` afterwards."""
        await self._resume()
        await self._post({})  # the step at which it begins
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
                try:
                    await self._step(batch)
                except TrainingFailedError as error:
                    await self._report_failure(batch, error)
                    continue
                self._refuse_to_skip_on()
                if self._is_checkpoint_due():
                    await self._begin_checkpoint()
        self._refuse_to_end_untrained()
        async with self._step_in_hand:
            await self.save_checkpoint()
            self.is_done = True
        await self._finish_uploads()
        await self._activity.post_metrics(self.learner.step, {"training_complete": 1.0})

    async def in_torch_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run torch work where all of it runs, so that its threads are not doubled."""
        return await asyncio.get_running_loop().run_in_executor(self._torch, function)

    async def forward(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Log-probabilities of the trained tokens under the current weights, 0 elsewhere. Waits for a running step."""
        async with self.weights_lock:
            return await self.in_torch_thread(lambda: self.learner.forward(batch))

    async def forward_reference(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Log-probabilities of the trained tokens under the base of the adapter. Waits for a running step."""
        async with self.weights_lock:
            return await self.in_torch_thread(lambda: self.learner.forward_reference(batch))

    async def publish(self) -> None:
        """Make the current weights the committed policy version, unless a later one has been committed already.

        This is the case if the trainer replays steps after a crash: its predecessor may have published later versions.
        """
        with self._phase("publish", waiting_on="weight-sync"):
            async with self.weights_lock:
                await self._publisher.publish(self._snapshot)

    async def _snapshot(self, bucket_bytes: int, replaced: Snapshot | None, device: torch.device) -> Snapshot:
        return await self.in_torch_thread(lambda: self.learner.snapshot(bucket_bytes, replaced, device))

    async def save_checkpoint(self) -> Path:
        """Write `global_step_<n>`, and return its path when it is complete and the ledger knows it.

        Raises AlreadyExistsError when the folder has other weights of that step, LeaseLostError when the ledger has
        no record of these steps.
        """
        await self._begin_checkpoint()
        await self._writer.finish()
        return checkpoint_path(self._checkpoints.folder, self.learner.step)

    async def stop(self) -> None:
        """Finish the running step, and save a checkpoint if it is not saved yet. The loop is cancelled next."""
        await self._step_in_hand.acquire()
        is_saved = self.is_done or self._is_contradicted or not self.learner.is_between_steps
        if self.learner.step == self._acked_steps and not is_saved:
            try:
                await self._writer.finish()
            except (NexrlError, OSError) as error:
                log.error("the checkpoint before could not be written: %s", error)
            await self.save_checkpoint()

    async def load_checkpoint(self, path: Path) -> None:
        """Load a checkpoint into the learner, and note the position in the data at which to continue."""
        await self._writer.finish()
        await self._load(await self._open(path))

    async def _open(self, path: Path) -> OpenedCheckpoint:
        return await self.in_torch_thread(lambda: open_checkpoint(path, self.learner))

    async def _load(self, opened: OpenedCheckpoint) -> None:
        path, metadata = opened.path, opened.metadata
        await self.in_torch_thread(lambda: opened.load(self.learner))
        self._data_cursor = int(metadata.cursor.get("position", 0))
        self._drops_in_a_row = metadata.drops_in_a_row
        self._checkpointed_step = self.learner.step if path.parent == self._checkpoints.folder else -1
        log.info("loaded %s", path)

    async def _begin_checkpoint(self) -> None:
        """Copy the state, and write it beside the next steps. Waits for the checkpoint that is being written."""
        with self._phase("checkpoint"):
            # Ended even if the caller gives up: other ranks may have begun to write theirs.
            self._beginning = asyncio.create_task(self._hold_and_write())
            await asyncio.shield(self._beginning)

    async def _hold_and_write(self) -> None:
        async with self._one_begins:
            await self._writer.finish()
            metadata = CheckpointMetadata(
                step=self.learner.step,
                batch_ids=tuple(self._trained_since_checkpoint),
                cursor={"position": self._data_cursor},
                model_tag=self.spec.model.tag,
                drops_in_a_row=self._drops_in_a_row,
            )
            # Steps made through the Trainer RPCs have no train batch to commit.
            is_acked = self.learner.step == self._acked_steps
            if self.learner.step == self._checkpointed_step:
                return await self._commit_checkpoint(metadata, is_acked=is_acked)
            folder, tokenizer = self._checkpoints.folder, self._checkpoints.tokenizer
            held = await self.in_torch_thread(lambda: hold_checkpoint(folder, self.learner, tokenizer, metadata))
            self._writer.begin(held.write, lambda: self._commit_checkpoint(metadata, is_acked=is_acked))

    async def _commit_checkpoint(self, metadata: CheckpointMetadata, *, is_acked: bool) -> None:
        """Tell the pool that the train batches of a complete checkpoint are no longer needed."""
        self._checkpointed_step = metadata.step
        del self._trained_since_checkpoint[: len(metadata.batch_ids)]  # later steps may have been made meanwhile
        if is_acked:
            await self._ask_ledger(self._pool.commit(metadata.step))
            # Delete older checkpoints last: until the commit, the ledger resumes from one of them.
            in_use = self._uploads.in_use if self._uploads else None
            await asyncio.to_thread(prune_checkpoints, self._checkpoints.folder, self.spec.checkpoint.keep, in_use)
        if self._uploads is not None:
            self._uploads.add(checkpoint_path(self._checkpoints.folder, metadata.step))

    async def _finish_uploads(self) -> None:
        """Copy the rest to object storage before the experiment succeeds, which ends this process."""
        if self._uploads is not None:
            with self._phase("upload"):
                # Half, so that the copy does not count as a stall.
                limit_seconds = self.spec.monitor.health.stall_deadline_seconds / 2
                await self._uploads.finish(END_SECONDS, limit_seconds)

    async def _resume(self) -> None:
        """Agree with the ledger on where to start, and load the checkpoint."""
        start = StartingPoint(self._checkpoints, self._pool, self._activity, self._open)
        opened, answer = await start.find()
        await asyncio.to_thread(remove_abandoned, self._checkpoints.folder)
        if opened is not None:
            await self._load(opened)
        if self._uploads is not None and self._checkpointed_step >= 0:
            self._uploads.add(checkpoint_path(self._checkpoints.folder, self._checkpointed_step))
        self._acked_steps = self.learner.step
        state = await self._pool.state()
        self._publisher.newest_version = max(self.learner.step, state.durable_steps + state.trained + state.queued)
        log.info("trainer %d begins at step %d", answer.incarnation, self.learner.step)
        if answer.replayed_steps:
            log.warning("%d steps are in no checkpoint and will be replayed", answer.replayed_steps)

    async def _ask_ledger(self, answer: Awaitable[ResultT]) -> ResultT:
        """Await a call of the pool. Raises LeaseLostError if the ledger contradicts what this trainer has made.

        The process then ends and is restarted, because `_resume` can repair this and a retry cannot. These weights must
        be neither saved nor trained further.
        """
        try:
            return await answer
        except FailedPreconditionError as error:
            self._is_contradicted = True
            raise LeaseLostError(
                f"the ledger disagrees with this trainer after {self.learner.step} steps: {error}. Restart; it resumes "
                "from the newest checkpoint that the ledger has a record of"
            ) from error

    async def _next_batch(self) -> pb.TrainBatch | None:
        with self._phase("wait_batch", waiting_on="trajectory-pool"):
            while True:
                self._writer.check()
                answer = await self._ask_ledger(self._pool.lease(self.learner.step))
                if answer.HasField("train_batch"):
                    return answer.train_batch
                if answer.exhausted:
                    return None

    async def _step(self, batch: pb.TrainBatch) -> None:
        step = self.learner.step
        with self._phase("train") as training:
            async with self.weights_lock:
                arrays = decode_train_batch(batch.tensors)
                metrics = await self.in_torch_thread(lambda: self._trained(arrays))
        self._has_skipped = metrics.skipped_updates > 0
        if self._has_skipped:
            log.error(
                "batch %d: %d of its updates were not finite, and skipped; it has the samples %s",
                *(batch.batch_id, metrics.skipped_updates, " ".join(batch.sample_ids)),
            )
        elif metrics.token_count:
            self._drops_in_a_row = 0
        self._drops_in_a_row += batch.dropped or self._has_skipped
        self._data_cursor = batch.data_cursor
        self._trained_since_checkpoint.append(batch.batch_id)
        answer = await self._ask_ledger(self._pool.ack(step, batch))
        self._is_checkpoint_wanted = answer.checkpoint_wanted
        self._acked_steps = self.learner.step
        STEP.set(self.learner.step)
        await self._watch_for_untrainable(arrays)
        figures = {
            **batch.metrics,
            **metrics.figures(),
            "train_seconds": training.seconds,
            "untrainable_batches": float(self._untrainable_batches),
            "checkpointed_steps": float(max(0, self._checkpointed_step)),
        }
        if isinstance(self.spec.rollout, DemonstrationRollout):
            figures = {name: value for name, value in figures.items() if name not in OF_SAMPLES}
        self._progress.add(self.learner.step, figures)
        await asyncio.gather(self._post(figures), self.publish())

    def _trained(self, batch: TrainBatch) -> StepMetrics:
        try:
            self.learner.check_train_batch(batch)
        except InvalidArgumentError as error:  # of an external processor, or made for another algorithm
            raise TrainingFailedError(error.message) from None
        return self.learner.train(batch)

    async def _report_failure(self, batch: pb.TrainBatch, error: TrainingFailedError) -> None:
        """Tell the pool that training `batch` failed; the step is then leased again.

        The pool returns the same batch after the first failure. After the second it returns one without sequences: the
        step counts, and changes no weight. Raises `error` if batch after batch is dropped, and at once if the user's
        loss raised: the code is at fault then, and no batch may be dropped for it.
        """
        if error.__cause__ is not None:
            raise error
        if not await self._ask_ledger(self._pool.fail(self.learner.step, batch)):
            log.warning("batch %d: %s; trying it again", batch.batch_id, error)
            return
        log.error("batch %d: %s; dropped its samples %s", batch.batch_id, error, " ".join(batch.sample_ids))
        if self._drops_in_a_row + 1 >= MAX_DROPS_IN_A_ROW:
            raise error

    def _refuse_to_skip_on(self) -> None:
        """Raise TrainingFailedError if updates were skipped again, after other batches with skips or dropped ones."""
        if self._has_skipped and self._drops_in_a_row >= MAX_DROPS_IN_A_ROW:
            raise TrainingFailedError(
                f"the last {self._drops_in_a_row} batches were dropped, or had updates that were not finite; the "
                "trainer's log names their samples. Correct the loss or the settings, then resume"
            )

    def _refuse_to_end_untrained(self) -> None:
        """Raise TrainingFailedError if training ends with dropped batches only: such a run must not succeed."""
        if self._drops_in_a_row >= min(MAX_DROPS_IN_A_ROW, max(self.learner.step, 1)):
            raise TrainingFailedError(
                f"the last {self._drops_in_a_row} of {self.learner.step} batches were dropped, because their training "
                "failed twice; the trainer's log has the reason of each. Correct the loss or the settings, then resume "
                "with more trainer.steps, or start a new run"
            )

    async def _watch_for_untrainable(self, batch: TrainBatch) -> None:
        """Warn when no sample of many batches in a row was trained: the steps are counted and nothing is learned."""
        self._untrainable_batches = 0 if batch.token_count else self._untrainable_batches + 1
        if self._untrainable_batches and self._untrainable_batches % UNTRAINABLE_BATCHES == 0:
            await self._activity.report(
                f"no sample of the last {self._untrainable_batches} batches could be trained: each group's rewards "
                "are equal (algorithm.zeroVarianceGroups), all samples were cut at the token limit "
                "(truncatedSamples: drop), or the algorithm processor returned no sequences",
                work_context=f"step {self.learner.step}",
                severity=SEVERITY_WARNING,
            )

    async def _post(self, metrics: Mapping[str, float]) -> None:
        await self._activity.post_metrics(self.learner.step, metrics)

    def _is_checkpoint_due(self) -> bool:
        every = self.spec.checkpoint.every_steps
        return self._is_checkpoint_wanted or (every > 0 and self.learner.step % every == 0)

    def _phase(self, name: str, waiting_on: str = "") -> Phase:
        return Phase(self, self._activity, name, waiting_on)
