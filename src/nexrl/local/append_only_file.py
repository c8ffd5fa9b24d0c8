"""Make an append-only file whole, then run a server on it: `python append_only_file.py FOLDER COMMAND…`.

A server that is killed, or whose machine is, may leave a file that ends within the transaction that holds the effects
of a script. Redis 6.2 and 7 then drop the command that is cut off and keep those before it, without their EXEC and
right before whatever is written next. The start after the next one would run that half of a script. Valkey 9.1 mends
it (https://github.com/valkey-io/valkey/pull/4342); here, the beginning of such a transaction is dropped. Needs nothing
but the standard library, so that it starts fast.
"""

import mmap
import os
import sys
from pathlib import Path

MULTI = b"*1\r\n$5\r\nMULTI\r\n"
EXEC = b"*1\r\n$4\r\nEXEC\r\n"
LONGEST_NUMBER = 16
"""Bytes of a line with a number."""


class TornError(Exception):
    """The file ends within a command."""


def make_whole(folder: Path) -> None:
    """Drop a transaction without an end from the files of a server that does not run."""
    for file in (*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")):
        if file.stat().st_size == 0:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = find_open_transaction(content)
        if end is not None:
            os.truncate(file, end)


def find_open_transaction(content: mmap.mmap | bytes) -> int | None:
    """Where the transaction begins that has no end; None when there is none."""
    last = content.rfind(EXEC)
    while last >= 0:
        try:
            return _open_transaction(content, last + len(EXEC))
        except ValueError:  # these bytes are part of a value: what follows is no command
            last = content.rfind(EXEC, 0, last)
    first = content.find(MULTI)  # a snapshot in Redis's own format may come before it
    try:
        return _open_transaction(content, first) if first >= 0 else None
    except ValueError:
        return None


def _open_transaction(content: mmap.mmap | bytes, at: int) -> int | None:
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
    """Where the command at `at` ends. Raises TornError when the file does first, ValueError when none begins there."""
    number, at = _number(content, at, b"*")
    for _ in range(number):
        size, at = _number(content, at, b"$")
        at += size + 2
    if at > len(content):
        raise TornError
    return at


def _number(content: mmap.mmap | bytes, at: int, sign: bytes) -> tuple[int, int]:
    """The number of a line such as `*3`, and where the next line begins."""
    end = content.find(b"\r\n", at, at + LONGEST_NUMBER)
    if end < 0 and at + LONGEST_NUMBER > len(content):
        raise TornError
    if end < 0 or content[at : at + 1] != sign:
        raise ValueError(f"no {sign!r} at {at}")
    return int(content[at + 1 : end]), end + 2


if __name__ == "__main__":
    make_whole(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
