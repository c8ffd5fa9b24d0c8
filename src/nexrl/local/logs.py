"""`nexrl logs` of a run on this machine, while it runs and after its end."""

import asyncio
import os
import sys
from pathlib import Path

from nexrl.errors import NotFoundError
from nexrl.kept_log import older_log_path
from nexrl.local.run_folder import experiment_of, is_running
from nexrl.log_files import logs_of, prefix
from nexrl.run_layout import LOGS_FOLDER

FOLLOW_SECONDS = 0.5


async def print_run_logs(run: Path, component: str, *, follows: bool) -> None:
    """Print the logs of a component. With `follows`, print new lines until the run ends.

    Raises NotFoundError if the folder has no run, or the run no such component.
    """
    experiment_of(run)
    if not logs_of(run, component):
        known = ", ".join(sorted(path.stem for path in (run / LOGS_FOLDER).glob("*.log"))) or "none yet"
        raise NotFoundError(f"{run}: no logs of {component!r}; there are logs of: {known}")
    positions: dict[Path, int] = {}
    while True:
        is_last = not (follows and is_running(run))
        found = logs_of(run, component)
        for name, path in found.items():
            before = prefix(name, len(found))
            if path not in positions and older_log_path(path).exists():
                _print_new(older_log_path(path), 0, before, is_last=True)
            positions[path] = _print_new(path, positions.get(path, 0), before, is_last=is_last)
        sys.stdout.flush()
        if is_last:
            return
        await asyncio.sleep(FOLLOW_SECONDS)


def _print_new(path: Path, position: int, before: str, *, is_last: bool) -> int:
    """Print the lines after `position`, but no unfinished one unless `is_last`; returns the new position."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        begin = log.seek(position if position <= size else 0)  # it was rotated
        content = log.read()
    if not is_last:
        content = content[: content.rfind(b"\n") + 1]
    for line in content.decode(errors="replace").splitlines():
        sys.stdout.write(f"{before}{line}\n")
    return begin + len(content)
