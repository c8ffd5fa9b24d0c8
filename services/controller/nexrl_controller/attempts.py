"""Attempts at samples: which share of them fails, over a window of those that finished last. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

MIN_ATTEMPTS = 16
"""Fewest finished attempts of which a share is reported."""
REPORTED_RATIO = 0.2
"""Smallest share of failed attempts that is reported. The alert NexrlSamplesFail has the same limit."""
MAX_ERROR_CHARACTERS = 1000
"""Of the newest failure's error, this many characters are reported. It begins with the exception's type and place."""
_REMEDIES: Mapping[str, str] = {
    "REWARD_ERROR": "fix the reward function",
    "ENV_ERROR": "fix the environment or the rollout worker",
    "TIMEOUT": "make an attempt end sooner, or raise rollout.timeoutSeconds",
}


@dataclass(frozen=True)
class Count:
    """Attempts since the ledger began."""

    finished: int
    """Attempts that were scored or have failed."""
    failed: int


@dataclass(frozen=True)
class FailedAttempt:
    """A failed attempt at a sample."""

    sample_id: str
    worker_id: str
    verdict: str
    """As 'REWARD_ERROR'."""
    error: str


@dataclass(frozen=True)
class Window:
    """The attempts that finished last: from `size` to twice as many once that many have finished."""

    start: Count
    """What was counted when the window began."""
    middle: Count
    """What was counted when the next window began."""
    newest: Count

    @property
    def finished(self) -> int:
        """Return how many attempts are in the window."""
        return self.newest.finished - self.start.finished

    @property
    def failed_ratio(self) -> float:
        """Return the share of them that failed; 0 if there are none."""
        return (self.newest.failed - self.start.failed) / self.finished if self.finished else 0.0


def moved(window: Window | None, newest: Count, size: int) -> Window:
    """Return the window with the newest count. Another begins at the first count, and if Redis lost its last writes."""
    if window is None or newest.finished < window.newest.finished:
        return Window(newest, newest, newest)
    if newest.finished - window.middle.finished < size:
        return replace(window, newest=newest)
    return Window(window.middle, newest, newest)


def reaches(window: Window, size: int, max_failed_ratio: float) -> bool:
    """Return whether at least `size` attempts are in the window, and the share that failed has reached its limit."""
    return window.finished >= size and window.failed_ratio >= max_failed_ratio


def is_reported(window: Window) -> bool:
    """Return whether enough attempts have failed to report it."""
    return window.finished >= MIN_ATTEMPTS and window.failed_ratio >= REPORTED_RATIO


def report(window: Window, last: FailedAttempt) -> str:
    """Return the share that fails, the newest failure and what to do, as one sentence for people."""
    where = f"sample {last.sample_id}" + (f" of {last.worker_id}" if last.worker_id else "")
    error = last.error.strip()[:MAX_ERROR_CHARACTERS] or "no message"
    return (
        f"{int(100 * window.failed_ratio)} % of the last {window.finished} attempts at samples failed; "
        f"the newest, {where}: {last.verdict}: {error}; {_REMEDIES[last.verdict]}"
    )
