"""One log format for every process: a JSON object a line, on standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time, level, instance, logger, message, and whatever was given as `extra`."""

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


def configure_logging(experiment: str, instance: str, level: str) -> None:
    """Make the root logger write JSON lines."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter(experiment, instance))
    logging.basicConfig(level=level, handlers=[stream], force=True)
