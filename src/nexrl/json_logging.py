"""Writes the log of every process: one JSON object per line, on standard error."""

import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from nexrl.kept_log import CopiedStream, KeptLog

STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats time, level, experiment, instance, logger, message and the fields passed as `extra`."""

    def __init__(self, experiment: str, instance: str) -> None:
        super().__init__()
        self._constant = {"experiment": experiment, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._constant,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in STANDARD_FIELDS})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def last_words(lines: Sequence[str]) -> str:
    """Return why a process ended, in plain words, from the last lines of its log.

    These are the lines after the last JSON line. If there are none, it is the newest error, or else the newest message.
    """
    plain = [*takewhile(lambda line: _record(line) is None, reversed(lines))]
    if plain:
        return "\n".join(reversed(plain))
    records = [record for record in map(_record, lines) if record is not None]
    errors = [record for record in records if record["level"] in ("ERROR", "CRITICAL")]
    return _in_words((errors or records)[-1]) if records else ""


def _record(line: str) -> dict[str, Any] | None:
    """Return the fields of a line that JsonFormatter wrote; None for any other line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"level", "message"} <= record.keys() else None


def _in_words(record: dict[str, Any]) -> str:
    """Return the message and, if there is a traceback, the error at its end."""
    return ": ".join([record["message"], *record.get("traceback", "").splitlines()[-1:]])


def configure_logging(experiment: str, instance: str, level: str, kept_in: Path | None = None) -> None:
    """Make the root logger write JSON lines to standard error, from `level` on.

    With `kept_in`, the lines also go to this file, and so does what the process prints.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    problem = ""
    if kept_in is not None:
        try:
            kept = KeptLog(kept_in)
        except OSError as error:
            problem = f"{kept_in}: the log is not kept: {error.strerror}"
        else:
            handlers.append(kept)
            sys.stdout = CopiedStream(sys.stdout, "stdout", kept)
            sys.stderr = CopiedStream(sys.stderr, "stderr", kept)
    for handler in handlers:
        handler.setFormatter(JsonFormatter(experiment, instance))
    logging.basicConfig(level=level, handlers=handlers, force=True)
    if problem:
        logging.getLogger(__name__).warning("%s", problem)
