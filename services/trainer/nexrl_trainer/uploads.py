"""Copies checkpoints and the other files of a run to object storage beside the training, which never waits for it.

The storage may be away: copying is repeated with growing pauses, and the next copy contains everything.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from prometheus_client import Counter, Gauge

from nexrl.activity import ActivityTracker
from nexrl.errors import InvalidArgumentError, UnavailableError
from nexrl.mirror import Mirror
from nexrl.run_layout import CHECKPOINT_PREFIX
from nexrl.settings import Settings
from nexrl.spec import Experiment
from nexrl.storage import RunStorage
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl_trainer.checkpoint import find_latest_checkpoint
from nexrl_trainer.stored_checkpoints import StoredCheckpoints

log = logging.getLogger(__name__)

EVERY_SECONDS = 60.0
"""Time between two copies of logs, metrics and trajectories. A new checkpoint is copied at once."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
START_SECONDS = 60.0
"""Longest time that a trainer without a checkpoint waits for the storage, which may have one."""
END_SECONDS, STOP_SECONDS = 600.0, 20.0
"""Longest time for the last copy when training is complete, and when the process is stopped before."""

UPLOADED_STEP = Gauge("nexrl_trainer_uploaded_step", "Steps in the newest checkpoint in object storage.")
UPLOAD_FAILURES = Counter("nexrl_trainer_upload_failures_total", "Copies to object storage that failed.")

StorageError = (UnavailableError, InvalidArgumentError)


class Uploads:
    """The copy of one run in object storage."""

    def __init__(
        self, storage: RunStorage, experiment: Experiment, mirror: Mirror, checkpoints: Path, activity: ActivityTracker
    ) -> None:
        """`checkpoints` is the folder of the run's checkpoints."""
        self._storage, self._experiment, self._mirror, self._folder = storage, experiment, mirror, checkpoints
        self._stored = StoredCheckpoints(storage, experiment.spec.checkpoint.keep)
        self._activity = activity
        self._newest: Path | None = None
        self.in_use: Path | None = None
        """The checkpoint that is being copied, which must not be deleted."""
        self._wanted = asyncio.Event()
        self._copying = asyncio.Lock()
        self._pause_seconds = 0.0

    @classmethod
    def of(
        cls, experiment: Experiment, settings: Settings, checkpoints: Path, activity: ActivityTracker
    ) -> "Uploads | None":
        """Return the copy of the run that a trainer with these settings makes; None without `storage.uri`."""
        if (storage := RunStorage.of(experiment)) is None:
            return None
        return cls(
            storage, experiment, Mirror(storage, settings.run_dir, settings.experiment_file), checkpoints, activity
        )

    def add(self, checkpoint: Path) -> None:
        """Copy a new checkpoint soon. One that was added before is left out if it is not being copied yet."""
        self._newest = checkpoint
        self._wanted.set()

    async def fetch_newest(self) -> None:
        """Copy the newest checkpoint from the storage, if it is newer than those of the run's folder.

        Without a checkpoint in the folder, waits START_SECONDS for the storage, then raises UnavailableError: the run
        may have one there. Raises InvalidArgumentError if the storage refuses, and AlreadyExistsError if it has
        another run.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                fetched = await asyncio.to_thread(self._claim_and_fetch)
            except StorageError as error:
                if find_latest_checkpoint(self._folder) is not None:
                    return await self._report(error)
                if isinstance(error, InvalidArgumentError) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            else:
                if fetched is not None:
                    log.info("fetched %s from %s", fetched.name, self._storage.address)
                return None

    async def run(self) -> None:
        """Copy what is new until cancelled. Raises AlreadyExistsError if the storage has another run."""
        while True:
            await self._until_due()
            await self._copy()

    async def finish(self, seconds: float) -> None:
        """Copy everything. After `seconds`, warn and return: the files are in the run's folder."""
        try:
            async with asyncio.timeout(seconds):
                while not await self._copy():
                    await self._until_due()
        except TimeoutError:
            await self._report(
                f"storage.uri: the copy in {self._storage.address} is not complete after {seconds:g} s; "
                "the rest is in the run's folder"
            )

    async def _until_due(self) -> None:
        """Wait for a new checkpoint, at most EVERY_SECONDS; after a failure, for the end of the pause."""
        if self._pause_seconds:
            await asyncio.sleep(self._pause_seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_SECONDS):
                await self._wanted.wait()

    async def _copy(self) -> bool:
        """Copy what is new; return whether that succeeded."""
        async with self._copying:
            self._wanted.clear()
            self.in_use = self._newest
            try:
                await asyncio.to_thread(self._copy_all, self.in_use)
            except StorageError as error:
                if not self._pause_seconds:
                    await self._report(error)
                UPLOAD_FAILURES.inc()
                self._pause_seconds = min(2 * self._pause_seconds or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
                return False
            finally:
                self.in_use = None
        if self._pause_seconds:
            log.info("%s answers again; everything is copied", self._storage.address)
        self._pause_seconds = 0.0
        return True

    def _copy_all(self, checkpoint: Path | None) -> None:
        self._storage.claim(self._experiment)
        if checkpoint is not None:
            self._copy_checkpoint(checkpoint)
        self._mirror.copy_changes()

    def _copy_checkpoint(self, checkpoint: Path) -> None:
        try:
            self._stored.put(checkpoint)
        except FileNotFoundError:  # put aside, or deleted by hand
            log.warning("%s is gone and was not copied", checkpoint)
        else:
            UPLOADED_STEP.set(int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX)))

    def _claim_and_fetch(self) -> Path | None:
        self._storage.claim(self._experiment)
        return self._stored.fetch_newest(self._folder)

    async def _report(self, problem: Exception | str) -> None:
        """Have `nexrl status` show a problem."""
        await self._activity.report(problem, work_context="upload", severity=SEVERITY_WARNING)
