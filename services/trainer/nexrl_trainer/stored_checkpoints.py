"""Checkpoints of a run in object storage, and of those that it continues.

The marker is written last and deleted first, so a torn copy has none.

checkpoints/global_step_<n>/      as in the run's folder (nexrl_trainer.checkpoint)
"""

import json
import logging
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from nexrl.checkpoint_files import check_files
from nexrl.errors import FailedPreconditionError, NotFoundError
from nexrl.fsync import fsync_path
from nexrl.run_layout import CHECKPOINT_MARKER, CHECKPOINT_PREFIX, CHECKPOINTS_FOLDER, checkpoint_path
from nexrl.storage import RunStorage
from nexrl_trainer.checkpoint import (
    UNUSABLE_SUFFIX,
    complete_checkpoints,
    is_ahead_of_ledger,
    partial_path,
    put_aside,
)

log = logging.getLogger(__name__)

_NAME = re.compile(rf"{CHECKPOINTS_FOLDER}/{CHECKPOINT_PREFIX}(\d+)/[^/]+")


class StoredCheckpoints:
    """The checkpoints of one run in object storage; methods raise what RunStorage raises."""

    def __init__(self, storage: RunStorage, keep: int) -> None:
        """`keep` newest checkpoints stay, as in the run's folder."""
        self._storage, self._keep = storage, keep

    def put(self, path: Path) -> None:
        """Copy a checkpoint. Raises FileNotFoundError if it is deleted meanwhile."""
        step, marker = _step(path), (path / CHECKPOINT_MARKER).read_bytes()
        if self._storage.read(_marker(step)) != marker:
            # Of the same step, made before Redis lost its last writes; by another number of ranks in other files.
            self._storage.delete([_marker(step)])
            self._storage.delete(self._by_step().get(step, []))
            for name in json.loads(marker)["sha256"]:
                self._storage.put(f"{_folder(step)}/{name}", path / name)
            self._storage.put(_marker(step), path / CHECKPOINT_MARKER)

    def fetch_newest(self, folder: Path, damaged: Collection[Path] = ()) -> Path | None:
        """Copy the newest complete checkpoint to `folder` if it has more steps than those there; return its path.

        Those of `folder` that are `damaged` do not count. One of the same step takes their place, and they are put
        aside. A damaged one in the storage is left out, and so are those that are ahead of the ledger.
        """
        newest_here = max((_step(path) for path in complete_checkpoints(folder) if path not in damaged), default=-1)
        for step, names in sorted(self._by_step().items(), reverse=True):
            path = checkpoint_path(folder, step)
            if step > newest_here and _marker(step) in names and not is_ahead_of_ledger(path):
                try:
                    return self._fetch(path, names)
                except (FailedPreconditionError, NotFoundError) as error:
                    log.warning("not used: %s", error)
        return None

    def _fetch(self, path: Path, names: list[str]) -> Path:
        """Copy a checkpoint, as it is written: nothing has its name until all of it is on disk and verified."""
        partial = partial_path(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        marker = self._storage.read(_marker(_step(path))) or b"{}"
        kept = {*json.loads(marker).get("sha256", {}), CHECKPOINT_MARKER}
        for name in names:
            if (file_name := name.rpartition("/")[2]) in kept:
                self._storage.get(name, partial / file_name)
        check_files(partial)
        for file in partial.iterdir():
            fsync_path(file)
        fsync_path(partial)
        if path.exists():
            put_aside(path, UNUSABLE_SUFFIX)
        partial.rename(path)
        fsync_path(path.parent)
        return path

    def prune(self, newest: Path) -> None:
        """Delete all but the newest up to `newest`, and what this run made after it: steps that Redis has lost.

        What an earlier run made after it stays: this run has not continued from there.
        """
        found, owner = self._by_step(), self._storage.owner()
        complete = [step for step in sorted(found) if step <= _step(newest) and _marker(step) in found[step]]
        kept = {*complete[-self._keep :]}
        if owner is not None:
            kept |= {step for step in found if step > _step(newest) and _marker(step) in owner.earlier}
        for step in found.keys() - kept:
            self._storage.delete([_marker(step)])
            self._storage.delete([name for name in found[step] if name != _marker(step)])

    def _by_step(self) -> dict[int, list[str]]:
        """Return the names of all files of checkpoints, complete or not, by step."""
        found: dict[int, list[str]] = {}
        for name in self._storage.names(CHECKPOINTS_FOLDER):
            if match := _NAME.fullmatch(name):
                found.setdefault(int(match[1]), []).append(name)
        return found


def _folder(step: int) -> str:
    return f"{CHECKPOINTS_FOLDER}/{CHECKPOINT_PREFIX}{step}"


def _marker(step: int) -> str:
    return f"{_folder(step)}/{CHECKPOINT_MARKER}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix(CHECKPOINT_PREFIX))
