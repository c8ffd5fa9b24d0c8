"""What has ended without the trainer's fault since the newest training step: a record in the status. Pure."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic.alias_generators import to_camel

from nexrl.restarts import action_after
from nexrl.spec.monitor import FailurePolicySpec
from nexrl_operator.observed import Observed

MAX_DISRUPTIONS = 100
"""Trainers whose pods may be evicted or deleted without a new step in between. The experiment fails at the next one."""


@dataclass(frozen=True)
class Setbacks:
    """Ends since `step`. The record changes only when there is another one: a step alone changes no status."""

    step: int = 0
    """The newest step at the last end."""
    controller_ends: int = 0
    """Ends of the controller's container that count for `failurePolicy.maxRestarts`."""
    disruptions: int = 0
    """Trainer Jobs whose pods were evicted or deleted."""
    controller_pod: str = ""
    """UID of the controller's pod."""
    controller_restarts: int = 0
    """Restarts of the container in that pod which are part of this record, those that do not count included."""

    def as_status(self) -> dict[str, Any]:
        """Return the record as a field of the status."""
        return {to_camel(name): value for name, value in asdict(self).items()}


def setbacks(observed: Observed, policy: FailurePolicySpec) -> Setbacks:
    """Return the record in the status, with what has ended since it was written."""
    old = observed.status.get("setbacks", {})
    record = Setbacks(**{name: old[to_camel(name)] for name in Setbacks.__dataclass_fields__ if to_camel(name) in old})
    pod, restarts, newest = observed.controller_ends()
    ends = restarts - (record.controller_restarts if pod == record.controller_pod else 0)
    is_disrupted = observed.disrupted_attempt > int(observed.status.get("disruptedAttempt", 0))
    if ends <= 0 and not is_disrupted:
        return record
    step = observed.seen.step if observed.seen else int(observed.status.get("progress", {}).get("step", 0))
    if step > record.step:
        record = replace(record, step=step, controller_ends=0, disruptions=0)
    if is_disrupted:
        record = replace(record, disruptions=record.disruptions + 1)
    if ends > 0:
        counted = ends if action_after(policy, newest.component, newest.exit_code) == "Count" else 0
        record = replace(record, controller_ends=record.controller_ends + counted)
        record = replace(record, controller_pod=pod, controller_restarts=restarts)
    return record
