"""How often the launcher restarts the controller or the private Redis, about which no controller can decide. Pure."""

from dataclasses import dataclass

from nexrl.errors import FailedPreconditionError
from nexrl.restarts import FAILING_EXITS, action_after, backoff_seconds
from nexrl.spec.monitor import FailurePolicySpec

CONFIGURATION_EXITS = (*FAILING_EXITS, FailedPreconditionError.exit_code)
"""After these a restart does not help, unless a rule says otherwise."""
FIRST_SECONDS = 0.2
"""Pause before the first restart: all other processes wait for this one."""


@dataclass
class RestartBudget:
    """The restarts of one process since the newest training step.

    For other components a step is not enough: they could repeat the same steps forever. The controller and Redis keep
    the steps that were made.
    """

    name: str
    policy: FailurePolicySpec
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
        match action_after(self.policy, self.name, exit_code, CONFIGURATION_EXITS):
            case "Fail":
                return None
            case "Ignore" if now_seconds - self.stuck_since_seconds >= self.deadline_seconds:
                return None
            case "Count" if self.counted >= self.policy.max_restarts:
                return None
            case "Count":
                self.counted += 1
        self.restarts += 1
        return backoff_seconds(self.restarts, FIRST_SECONDS)
