"""A log file that is bounded in size, and readable while the process runs and after its end.

On one machine the launcher directs the output of each process to its file, and rotates it. On a cluster the kubelet
keeps the output as long as the pod exists, so a process that mounts the run's volume also writes its own file.
"""

import contextlib
import logging
import os
import stat
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO, cast

LOG_BYTES = 4 * 2**20
"""Size at which a log becomes `<process>.log.1`, which replaces the one before: a process has at most twice as much."""
MAX_LINE = 65_536
"""Characters after which output without a line break becomes a line."""


def older_log_path(log: Path) -> Path:
    """Return the file with what was in the log before it was rotated; RotatingFileHandler uses this name."""
    return log.with_name(f"{log.name}.1")


def newest_bytes(log: Path, limit: int = 2 * LOG_BYTES) -> bytes:
    """Return the end of a log across its rotation; b"" if there is none."""
    content = b""
    for path in (older_log_path(log), log):
        with contextlib.suppress(OSError), open(path, "rb", opener=open_regular) as file:
            content += file.read()
    return content[-limit:]


def open_regular(path: str, flags: int) -> int:
    """Open a file of a folder that user code may write to: raises OSError for a link, a pipe or a device."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


def rotate(log: Path) -> None:
    """Move the content of a log that has become too large aside, while another process appends to the file.

    A line that is written within the microseconds between the last read and the truncation is lost. A process cannot
    be told to open another file: its output also comes from libraries, and from the interpreter when it crashes.
    """
    with contextlib.suppress(FileNotFoundError), log.open("rb+") as file:
        if (size := file.seek(0, os.SEEK_END)) <= LOG_BYTES:
            return
        file.seek(size - LOG_BYTES)
        content = file.read()
        file.truncate(0)
        older_log_path(log).write_bytes(content)


class KeptLog(RotatingFileHandler):
    """Appends the log of this process to its file. A volume that is full or gone does not disturb the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return cast(TextIOWrapper, open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_regular))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name of logging.Handler
        """Do nothing: the line is also on standard error, and an error for each line would hide the others."""


class CopiedStream:
    """A standard stream whose lines also go to a KeptLog: what user code prints."""

    def __init__(self, stream: TextIO, name: str, kept: KeptLog) -> None:
        self._stream = stream
        self._name = name
        self._kept = kept
        self._begun = ""
        """A line without its end."""

    def write(self, text: str) -> int:
        """Write the text, and log the lines that it ends."""
        self._stream.write(text)
        with self._kept.lock or contextlib.nullcontext():
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > MAX_LINE:
                lines, self._begun = [*lines, self._begun], ""
            for line in filter(None, lines):
                fields = {"name": self._name, "levelname": "INFO", "levelno": logging.INFO, "msg": line}
                self._kept.handle(logging.makeLogRecord(fields))
        return len(text)

    def __getattr__(self, name: str) -> object:
        """Everything else is the stream's own: fileno, flush, encoding, ..."""
        return getattr(self._stream, name)
