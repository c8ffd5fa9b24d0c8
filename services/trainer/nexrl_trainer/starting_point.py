"""Where a trainer starts: the newest checkpoint that is whole, fits the model, and can be continued by the ledger.

No sample may be lost or trained twice. So a checkpoint is left out only if the ledger still has the batches of the
steps that are lost with it: they are trained again, from an older checkpoint.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nexrl.activity import ActivityTracker
from nexrl.checkpoint_files import check_files
from nexrl.client import TrainBatchClient
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from nexrl.run_layout import CHECKPOINT_PREFIX
from nexrl.v1 import train_batch_pool_service_pb2 as pb
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl_trainer.checkpoint import (
    UNUSABLE_SUFFIX,
    CheckpointMetadata,
    OpenedCheckpoint,
    complete_checkpoints,
    put_aside,
)
from nexrl_trainer.uploads import Uploads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints are written, what to start from when there is none yet, and the tokenizer saved with them."""

    folder: Path
    start_from: Path | None
    tokenizer: PreTrainedTokenizerBase
    uploads: Uploads | None = None
    """The copy of the run in object storage; None without `storage.uri`."""


@dataclass(frozen=True)
class _Unusable:
    """A checkpoint that cannot be loaded."""

    path: Path
    reason: str

    @property
    def steps(self) -> int:
        return int(self.path.name.removeprefix(CHECKPOINT_PREFIX))

    def is_damaged(self) -> bool:
        """Return whether its files are not those that were written, so that a copy may help."""
        try:
            check_files(self.path)
        except (FailedPreconditionError, NotFoundError):
            return True
        return False


class StartingPoint:
    """Finds the checkpoint from which this trainer continues, and registers the trainer with the ledger."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        pool: TrainBatchClient,
        activity: ActivityTracker,
        open_checkpoint: Callable[[Path], Awaitable[OpenedCheckpoint]],
    ) -> None:
        """`open_checkpoint` raises NotFoundError or FailedPreconditionError for one that cannot be loaded."""
        self._folder, self._start_from, self._uploads = checkpoints.folder, checkpoints.start_from, checkpoints.uploads
        self._pool, self._activity, self._open = pool, activity, open_checkpoint

    async def find(self) -> tuple[OpenedCheckpoint | None, pb.ResumeFromCheckpointResponse]:
        """Return the checkpoint, None for the initial weights, and the answer of the ledger.

        Raises InvalidArgumentError if there is one that cannot be loaded, and the ledger cannot continue from an older
        one; FailedPreconditionError if none fits the ledger.
        """
        while True:
            await self._fetch()
            opened = await self._newest_usable()
            begin = opened.metadata if opened else CheckpointMetadata(step=0)
            try:
                return opened, await self._pool.resume(begin.step, int(begin.cursor.get("position", 0)))
            except FailedPreconditionError as refusal:
                await self._put_aside_ahead(opened.path if opened else None, begin.step, refusal)

    async def _fetch(self, *damaged: Path) -> Path | None:
        """Fetch a newer checkpoint from the object storage, or one in place of the damaged ones."""
        if self._uploads is None:
            return None
        with self._activity.track("fetch", waiting_on="object storage"):
            ledger = await self._pool.state()
            return await self._uploads.fetch_newest(ledger.durable_steps, ledger.trained, damaged)

    async def _newest_usable(self) -> OpenedCheckpoint | None:
        """Return the newest checkpoint that can be loaded. Newer ones are put aside if the ledger allows it."""
        unusable: list[_Unusable] = []
        for path in reversed(complete_checkpoints(self._folder)):
            try:
                opened: OpenedCheckpoint | None = await self._open(path)
                break
            except (FailedPreconditionError, NotFoundError) as error:
                unusable.append(_Unusable(path, str(error)))
        else:
            opened = await self._open_given()
        if not unusable:
            return opened
        if await self._can_do_without(unusable[0], opened):
            for each in unusable:
                await self._put_aside_unusable(each)
            return opened
        damaged = [each.path for each in unusable if await asyncio.to_thread(each.is_damaged)]
        if damaged and await self._fetch(*damaged):
            return await self._newest_usable()
        raise await self._verdict(unusable)

    async def _open_given(self) -> OpenedCheckpoint | None:
        if self._start_from is None:
            return None
        try:
            return await self._open(self._start_from)
        except (FailedPreconditionError, NotFoundError) as error:
            raise InvalidArgumentError(f"resume.path: {error}") from error

    async def _can_do_without(self, newest: _Unusable, opened: OpenedCheckpoint | None) -> bool:
        """Return whether the ledger has all batches since the checkpoint `opened`, or the initial weights.

        A ledger that has lost everything can begin at any checkpoint of this run. It never begins again at the initial
        weights: that would silently drop the whole training.
        """
        ledger = await self._pool.state()
        is_of_run = opened is not None and opened.path.parent == self._folder
        has_all_steps = newest.steps <= ledger.durable_steps + ledger.trained
        return ledger.durable_steps <= (opened.metadata.step if opened else 0) and (is_of_run or has_all_steps)

    async def _put_aside_unusable(self, unusable: _Unusable) -> None:
        aside = await asyncio.to_thread(put_aside, unusable.path, UNUSABLE_SUFFIX)
        await self._activity.report(
            f"{unusable.reason}. It is kept as {aside.name} and not used: its last steps are made again from an older "
            "checkpoint",
            work_context="resume",
            severity=SEVERITY_WARNING,
        )

    async def _verdict(self, unusable: list[_Unusable]) -> InvalidArgumentError:
        """Return the error that ends the experiment: a restart would find the same."""
        ledger = await self._pool.state()
        reasons = "; ".join(each.reason for each in unusable)
        return InvalidArgumentError(
            f"{reasons}. No older checkpoint can take its place, because the ledger continues from "
            f"{ledger.durable_steps} to {ledger.durable_steps + ledger.trained} steps. Restore the files of "
            f"{unusable[0].path.name} from a copy, or the settings of the model that it was made with, then resume. Or "
            "start under another metadata.name, with resume.mode from_path if an older checkpoint exists"
        )

    async def _put_aside_ahead(self, path: Path | None, step: int, refusal: FailedPreconditionError) -> None:
        """Put a checkpoint aside that is ahead of the ledger. Raises FailedPreconditionError if it is not ahead.

        It is ahead if Redis has lost acknowledgements. The samples of its last steps will be granted again, so no
        trainer may ever continue from it.
        """
        state = await self._pool.state()
        acknowledged, folder = state.durable_steps + state.trained, self._folder
        if path is None or path.parent != folder or step <= acknowledged:
            existing = ", ".join(sorted(found.name for found in folder.glob(f"{CHECKPOINT_PREFIX}*"))) or "none"
            raise FailedPreconditionError(
                f"no checkpoint fits the ledger, which can resume from {state.durable_steps} to {acknowledged} steps. "
                f"In {folder}: {existing}; tried last: {path or 'the initial weights'}. Put a checkpoint of so many "
                "steps there, or start under another metadata.name with resume.mode from_path and one of these"
            ) from refusal
        aside = await asyncio.to_thread(put_aside, path)
        log.warning(
            "%s is kept as %s and not used: the ledger has only %d steps, because Redis has lost its last writes",
            *(path, aside.name, acknowledged),
        )
