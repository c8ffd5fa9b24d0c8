"""What the train worker does at the moment: shown, tracked and timed."""

import time
from types import TracebackType
from typing import Protocol, Self

from prometheus_client import Gauge

from nexrl.activity import ActivityTracker

STEP_SECONDS = Gauge("nexrl_trainer_step_seconds", "Seconds of the last step, by phase.", ["phase"])


class Doing(Protocol):
    """Something that says what it does."""

    doing: str


class Phase:
    """Names what the worker does while the block runs, and times it."""

    def __init__(self, worker: Doing, activity: ActivityTracker, name: str, waiting_on: str) -> None:
        self.seconds = 0.0
        """How long the block took, once it has ended."""
        self._worker, self._name = worker, name
        self._work = activity.track(name, waiting_on)

    def __enter__(self) -> Self:
        self._work.__enter__()
        self._worker.doing, self._began = self._name, time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._worker.doing = "idle"
        self.seconds = time.monotonic() - self._began
        STEP_SECONDS.labels(self._name).set(self.seconds)
        self._work.__exit__(kind, error, traceback)
