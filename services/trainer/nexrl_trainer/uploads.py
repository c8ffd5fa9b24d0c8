"""Copies checkpoints and the other files of a run to object storage beside the training, which never waits for it.

The storage may be away: copying is repeated with growing pauses, and the next copy contains everything.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from pathlib import Path

from prometheus_client import Counter, Gauge

from nexrl.activity import ActivityTracker
from nexrl.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from nexrl.mirror import Mirror
from nexrl.run_layout import CHECKPOINT_PREFIX
from nexrl.settings import Settings
from nexrl.spec import Experiment
from nexrl.storage import RunStorage, run_id
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
"""Longest time without a copied file at the end, when training is complete, and when the process is stopped before."""

UPLOADED_STEP = Gauge("nexrl_trainer_uploaded_step", "Steps in the newest checkpoint in object storage.")
UPLOAD_FAILURES = Counter("nexrl_trainer_upload_failures_total", "Copies to object storage that failed.")

StorageError = (UnavailableError, InvalidArgumentError, AlreadyExistsError)


class Uploads:
    """The copy of one run in object storage."""

    def __init__(
        self,
        storage: RunStorage,
        experiment: Experiment,
        settings: Settings,
        checkpoints: Path,
        activity: ActivityTracker,
    ) -> None:
        """`checkpoints` is the folder of the run's checkpoints."""
        self._storage, self._experiment, self._folder = storage, experiment, checkpoints
        self._run = run_id(settings.run_dir)
        self._mirror = Mirror(storage, settings.run_dir, settings.experiment_file)
        self._stored = StoredCheckpoints(storage, experiment.spec.checkpoint.keep)
        self._activity = activity
        self._newest: Path | None = None
        self.in_use: Path | None = None
        """The checkpoint that is being copied, which must not be deleted."""
        self._wanted = asyncio.Event()
        self._copying = asyncio.Lock()
        self._pause_seconds = 0.0
        self._stored_step: int | None = None
        self._finishing: asyncio.Task[None]

    @classmethod
    def of(
        cls, experiment: Experiment, settings: Settings, checkpoints: Path, activity: ActivityTracker
    ) -> "Uploads | None":
        """Return the copy of the run that a trainer with these settings makes; None without `storage.uri`."""
        if (storage := RunStorage.of(experiment)) is None:
            return None
        return cls(storage, experiment, settings, checkpoints, activity)

    def add(self, checkpoint: Path) -> None:
        """Copy a new checkpoint soon. One that was added before is left out if it is not being copied yet."""
        self._newest = checkpoint
        self._wanted.set()

    async def fetch_newest(
        self, durable_steps: int = 0, trained: int = 0, damaged: Collection[Path] = ()
    ) -> Path | None:
        """Copy the newest checkpoint from the storage, if it is newer than those of the run's folder; return its path.

        The `damaged` ones of that folder do not count, and the run cannot go on from an older one there. The ledger has
        `durable_steps` in checkpoints, and `trained` steps after them.
        A problem is only reported if the run can go on without the storage. Otherwise this waits START_SECONDS for the
        storage, then raises UnavailableError. If the storage refuses, or has another run, a run that has not trained
        yet fails with InvalidArgumentError; a later one is restarted.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                fetched = await asyncio.to_thread(self._claim_and_fetch, damaged)
            except (*StorageError, OSError) as error:
                if not damaged and self._can_go_on(durable_steps, trained):
                    await self._report(error)
                    return None
                if not isinstance(error, UnavailableError) or time.monotonic() > deadline:
                    is_passing = isinstance(error, UnavailableError | OSError) or durable_steps + trained > 0
                    raise (UnavailableError if is_passing else InvalidArgumentError)(str(error)) from error
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            else:
                if fetched is not None:
                    log.info("fetched %s from %s", fetched.name, self._storage.address)
                return fetched

    def _can_go_on(self, durable_steps: int, trained: int) -> bool:
        """Return whether the run needs no checkpoint of the storage: one is here, or its ledger requires none."""
        requires_none = trained > 0 and durable_steps == 0
        return requires_none or find_latest_checkpoint(self._folder) is not None

    async def run(self) -> None:
        """Copy what is new until cancelled."""
        while True:
            await self._until_due()
            await self._copy()

    async def finish(self, idle_seconds: float, limit_seconds: float) -> None:
        """Copy everything. Warn and return if no file was copied for `idle_seconds`, or after `limit_seconds`.

        The files are in the run's folder.
        """
        deadline = time.monotonic() + limit_seconds
        # Not cancelled at the end: its thread goes on, and `in_use` must be true until that has ended. A stop may call
        # this while the end of training waits here.
        finishing = self._finishing = asyncio.create_task(self._copy_until_complete())
        while True:
            files = self._storage.copied_files
            seconds = min(idle_seconds, deadline - time.monotonic())
            if (await asyncio.wait({finishing}, timeout=max(0.0, seconds)))[0]:
                return finishing.result()
            if files == self._storage.copied_files or time.monotonic() > deadline:
                break
        step = self._stored_step
        await self._report(
            f"storage.uri: the copy in {self._storage.address} is not complete; the rest is in the run's folder. This "
            f"process has stored {'no checkpoint' if step is None else f'the checkpoint of step {step}'}"
        )

    async def _copy_until_complete(self) -> None:
        while not await self._copy():
            await self._until_due()

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
            except (*StorageError, OSError) as error:
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
        self._claim()
        if checkpoint is not None:
            self._copy_checkpoint(checkpoint)
        self._mirror.copy_changes()

    def _claim(self, *, at_start: bool = False) -> None:
        self._storage.claim(self._experiment, self._run, at_start=at_start)

    def _copy_checkpoint(self, checkpoint: Path) -> None:
        try:
            self._stored.put(checkpoint)
        except FileNotFoundError:  # put aside, or deleted by hand
            log.warning("%s is gone and was not copied", checkpoint)
            return
        self._claim()  # another run may have taken the storage over meanwhile: delete nothing of it
        self._stored.prune(checkpoint)
        self._stored_step = int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX))
        UPLOADED_STEP.set(self._stored_step)

    def _claim_and_fetch(self, damaged: Collection[Path]) -> Path | None:
        self._claim(at_start=True)
        return self._stored.fetch_newest(self._folder, damaged)

    async def _report(self, problem: Exception | str) -> None:
        """Have `nexrl status` show a problem."""
        await self._activity.report(problem, work_context="upload", severity=SEVERITY_WARNING)
