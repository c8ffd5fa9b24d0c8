"""Copies what changes in a run's folder to object storage: logs, metrics, trajectories, report, but no checkpoints."""

import logging
import time
from pathlib import Path

from nexrl.errors import UnavailableError
from nexrl.results import records
from nexrl.run_layout import EXPERIMENT_FILE
from nexrl.storage import RECORDS_FOLDER, RunStorage, run_id

log = logging.getLogger(__name__)


class Mirror:
    """The files of a run's folder that are worth keeping, in object storage: `records/<run id>/`, same names inside.

    Two processes may copy one run: the trainer while it goes on, `nexrl run` at its end.
    """

    def __init__(self, storage: RunStorage, run: Path, experiment_file: Path) -> None:
        """`experiment_file` is the resolved experiment; on a cluster it is not in the run's folder."""
        self._storage, self._run, self._experiment_file = storage, run, experiment_file
        self._left_out: set[str] = set()

    def copy_changes(self, limit_seconds: float = float("inf")) -> None:
        """Copy each file whose size is not that of its copy, or that was changed after its copy was made.

        After `limit_seconds` no further file is begun. Raises UnavailableError then, and what RunStorage.put raises,
        except OSError: a file that was deleted or rotated meanwhile is left for the next time.
        """
        deadline = time.monotonic() + limit_seconds
        folder = f"{RECORDS_FOLDER}/{run_id(self._run)}"
        stored = self._storage.stamps(folder)
        for name, path in {EXPERIMENT_FILE: self._experiment_file, **records(self._run, everything=True)}.items():
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{self._storage.address}: not all is copied after {limit_seconds:g} s")
            if path.suffix == ".tmp":
                continue
            if not name.isprintable():
                self._leave_out(name, "its name is not printable; rename it")
                continue
            try:
                if _has_changed(path, stored.get(f"{folder}/{name}")):
                    self._storage.put(f"{folder}/{name}", path)
            except OSError as error:
                self._leave_out(name, str(error))

    def _leave_out(self, name: str, why: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning("%r is not copied: %s", name, why)


def _has_changed(path: Path, stored: tuple[int, float] | None) -> bool:
    found = path.stat()
    return stored is None or found.st_size != stored[0] or found.st_mtime > stored[1]
