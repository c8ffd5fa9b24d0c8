"""Repairs an append-only file, then runs a Redis server on it: `python append_only_file.py FOLDER COMMAND…`.

Redis writes the effects of a script as one transaction. A server that is killed may leave a file that ends within such
a transaction. Redis 6.2 and 7 then drop only the truncated command. They keep the commands before it, without their
EXEC, and append new commands to them. The second start after that would run half a script. Valkey 9.1 fixes this
(https://github.com/valkey-io/valkey/pull/4342). This module removes the incomplete transaction before the server
starts. It imports only the standard library, so that it starts fast.
"""

import mmap
import os
import sys
from pathlib import Path

MULTI = b"*1\r\n$5\r\nMULTI\r\n"
EXEC = b"*1\r\n$4\r\nEXEC\r\n"
LONGEST_NUMBER = 16
"""Maximum length of a line that contains a count, in bytes."""


class TornError(Exception):
    """The file ends inside a command."""


def make_whole(folder: Path) -> None:
    """Remove an incomplete transaction from the end of each file in `folder`. The server must not be running."""
    for file in (*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")):
        if file.stat().st_size == 0:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = find_open_transaction(content)
        if end is not None:
            os.truncate(file, end)


def find_open_transaction(content: mmap.mmap | bytes) -> int | None:
    """Return the position of the MULTI of an incomplete transaction; None if there is none."""
    last = content.rfind(EXEC)
    while last >= 0:
        try:
            return _open_transaction(content, last + len(EXEC))
        except ValueError:  # these bytes are part of a value, because no command follows them
            last = content.rfind(EXEC, 0, last)
    first = content.find(MULTI)  # the file may begin with a snapshot in another format
    while first >= 0:
        try:
            return _open_transaction(content, first)
        except ValueError:
            first = content.find(MULTI, first + 1)
    return None


def _open_transaction(content: mmap.mmap | bytes, at: int) -> int | None:
    """Read the commands from `at` on. Return the position of a MULTI without EXEC; None if there is none."""
    begin = None
    try:
        while at < len(content):
            end = _end_of_command(content, at)
            if content[at:end] == MULTI:
                begin = at
            elif content[at:end] == EXEC:
                begin = None
            at = end
    except TornError:
        pass
    return begin


def _end_of_command(content: mmap.mmap | bytes, at: int) -> int:
    """Return where the command at `at` ends. Raises TornError if the file ends first, ValueError for other bytes."""
    number, at = _number(content, at, b"*")
    for _ in range(number):
        size, at = _number(content, at, b"$")
        at += size + 2
    if at > len(content):
        raise TornError
    return at


def _number(content: mmap.mmap | bytes, at: int, sign: bytes) -> tuple[int, int]:
    """Return the number of a line such as `*3`, and where the next line begins."""
    end = content.find(b"\r\n", at, at + LONGEST_NUMBER)
    if end < 0 and at + LONGEST_NUMBER > len(content):
        raise TornError
    if end < 0 or content[at : at + 1] != sign:
        raise ValueError(f"byte {at}: must be {sign!r}")
    return int(content[at + 1 : end]), end + 2


if __name__ == "__main__":
    make_whole(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
