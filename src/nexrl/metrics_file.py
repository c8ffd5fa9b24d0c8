"""metrics.jsonl, which the controller writes; or the trainer, where only that has the run's volume."""

import json
import math
from collections.abc import Mapping
from pathlib import Path


class MetricsFile:
    """Appends one JSON object per line: step, time (Unix seconds) and the metrics; null for a value that is not finite.

    A step can have several lines (training, validation) and, after a restart, the same line again. A reader merges the
    lines of a step in order: the last value of each name counts.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        # Unbuffered: the whole line is in the file before the request is answered.
        self._file = path.open("ab", buffering=0)

    def post(self, step: int, unix_seconds: float, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({**finite, "step": step, "time": round(unix_seconds, 3)}, allow_nan=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Drop an incomplete last line, which a crash of the machine leaves behind."""
    if path.exists():
        with path.open("rb+") as file:
            written = file.read()
            file.truncate(written.rfind(b"\n") + 1)
