"""The log files of a run, `logs/<process>.log`; nexrl.kept_log bounds them.

`python -m nexrl.log_files RUN_FOLDER COMPONENT` prints the logs of a component; `nexrl logs` runs it beside a volume.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from nexrl.components import component_of
from nexrl.kept_log import newest_bytes
from nexrl.run_layout import LOGS_FOLDER


def log_path(run: Path, instance: str) -> Path:
    """Return the log file of a process."""
    return run / LOGS_FOLDER / f"{instance}.log"


def logs_of(run: Path, component: str) -> dict[str, Path]:
    """Return the log files of a component's processes, or of the one process `component`, by process."""
    found = {path.stem: path for path in sorted((run / LOGS_FOLDER).glob("*.log"))}
    return {name: path for name, path in found.items() if component in (name, component_of(name))}


def print_logs(run: Path, component: str, write: Callable[[str], object]) -> None:
    """Write the logs of a component's processes; nothing if there are none."""
    found = logs_of(run, component)
    for name, path in found.items():
        for line in _lines(newest_bytes(path)):
            write(prefix(name, len(found)) + line)


def prefix(process: str, processes: int) -> str:
    """Return the beginning of each line of a process: its name, if there are several."""
    return f"{process} " if processes > 1 else ""


def _lines(content: bytes) -> Iterator[str]:
    return (line + "\n" for line in content.decode(errors="replace").splitlines())


if __name__ == "__main__":
    print_logs(Path(sys.argv[1]), sys.argv[2], sys.stdout.write)
