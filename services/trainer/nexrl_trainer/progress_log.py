"""Lines in the trainer's log that show a reader how training goes."""

import logging
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Shortest time between two lines: short steps do not fill the log."""
FIGURES = ("reward_mean", "loss", "grad_norm", "train_seconds")


class ProgressLog:
    """Logs a step now and then, and the last one."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._next_seconds = 0.0

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log that `step` steps are made, with the figures of the last one, unless a line was logged just before."""
        if time.monotonic() < self._next_seconds and step < self._total_steps:
            return
        self._next_seconds = time.monotonic() + LOG_SECONDS
        shown = ", ".join(f"{name} {figures[name]:.4g}" for name in FIGURES if name in figures)
        log.info("step %d of %d: %s", step, self._total_steps, shown)
