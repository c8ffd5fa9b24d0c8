"""Restarts of the processes of an experiment: which of them count, and how long to wait before the next one."""

from nexrl.errors import LeaseLostError, UnavailableError

UNCOUNTED_EXITS = (UnavailableError.exit_code, LeaseLostError.exit_code)
"""A peer such as Redis is unreachable, or Redis has lost its last writes. A restart after these is not counted."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


def backoff_seconds(in_a_row: int, first_seconds: float = FIRST_BACKOFF_SECONDS) -> float:
    """Seconds to wait before restart number `in_a_row` of a process without success in between; counts from 1."""
    return min(first_seconds * 2.0 ** min(in_a_row - 1, 16), MAX_BACKOFF_SECONDS)
