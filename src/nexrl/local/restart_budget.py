"""How often the launcher restarts the controller or the private Redis, about which no controller can decide. Pure."""

from dataclasses import dataclass

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.restarts import UNCOUNTED_EXITS, backoff_seconds

CONFIGURATION_EXITS = (InvalidArgumentError.exit_code, FailedPreconditionError.exit_code)
"""After these a restart never helps."""
FIRST_SECONDS = 0.2
"""Pause before the first restart: all other processes wait for this one."""


@dataclass
class RestartBudget:
    """The restarts of one process since the newest training step.

    For other components a step is not enough: they could repeat the same steps forever. The controller and Redis keep
    the steps that were made.
    """

    max_restarts: int
    deadline_seconds: float
    """Longest time without a new step in which restarts that are not counted continue."""
    restarts: int = 0
    counted: int = 0
    step: int = -1
    """The newest step at the last exit."""
    stuck_since_seconds: float = 0.0
    """Time of the first exit after that step."""

    def pause_seconds(self, exit_code: int, step: int, now_seconds: float) -> float | None:
        """Return the seconds to wait before the restart after an exit; None if the process must not restart.

        `step` is the newest training step so far; it never decreases.
        """
        if step > self.step:
            self.restarts, self.counted, self.step, self.stuck_since_seconds = 0, 0, step, now_seconds
        if exit_code in CONFIGURATION_EXITS:
            return None
        if exit_code in UNCOUNTED_EXITS:
            if now_seconds - self.stuck_since_seconds >= self.deadline_seconds:
                return None
        elif self.counted >= self.max_restarts:
            return None
        else:
            self.counted += 1
        self.restarts += 1
        return backoff_seconds(self.restarts, FIRST_SECONDS)
