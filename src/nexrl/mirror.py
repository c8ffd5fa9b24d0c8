"""Copies what changes in a run's folder to object storage: logs, metrics, trajectories, report, but no checkpoints."""

import contextlib
import json
from pathlib import Path

from nexrl.results import records
from nexrl.run_layout import EXPERIMENT_FILE, UPLOADED_FILE
from nexrl.storage import RunStorage

Stamp = tuple[int, int]
"""Size in bytes and time of change in ns of a file when it was copied."""


class Mirror:
    """The files of a run's folder that are worth keeping, in object storage.

    What was copied is noted in the run's folder, so that another process continues: the trainer copies while the run
    goes on, `nexrl run` at its end.
    """

    def __init__(self, storage: RunStorage, run: Path, experiment_file: Path) -> None:
        """`experiment_file` is the resolved experiment; on a cluster it is not in the run's folder."""
        self._storage, self._run, self._experiment_file = storage, run, experiment_file
        self._copied: dict[str, Stamp] = self._read_note()

    def copy_changes(self) -> None:
        """Copy each file that has changed since it was last copied. Raises what RunStorage.put raises, except OSError.

        A file that was deleted or rotated meanwhile is left for the next time.
        """
        files = {EXPERIMENT_FILE: self._experiment_file, **records(self._run, everything=True)}
        before = dict(self._copied)
        try:
            for name, path in files.items():
                with contextlib.suppress(OSError):
                    self._copy_if_changed(name, path)
        finally:
            if self._copied != before:
                self._write_note()

    def _copy_if_changed(self, name: str, path: Path) -> None:
        found = path.stat()
        stamp = found.st_size, found.st_mtime_ns  # taken first: a change while it is copied is copied next time
        if self._copied.get(name) != stamp and path.suffix != ".tmp":
            self._storage.put(name, path)
            self._copied[name] = stamp

    def _read_note(self) -> dict[str, Stamp]:
        try:
            note = json.loads((self._run / UPLOADED_FILE).read_text())
            return {name: (size, ns) for name, (size, ns) in note["files"].items()} if self._is_mine(note) else {}
        except (OSError, ValueError, LookupError):  # none yet, or torn: everything is copied again
            return {}

    def _is_mine(self, note: dict[str, object]) -> bool:
        return note["address"] == self._storage.address

    def _write_note(self) -> None:
        partial = self._run / f"{UPLOADED_FILE}.tmp"
        partial.write_text(json.dumps({"address": self._storage.address, "files": self._copied}))
        partial.replace(self._run / UPLOADED_FILE)
