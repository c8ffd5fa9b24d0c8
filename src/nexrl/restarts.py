"""Restarts of the processes of an experiment: which of them count, and how long to wait before the next one."""

from collections.abc import Collection
from typing import Literal

from nexrl.components import component_of
from nexrl.errors import InvalidArgumentError, LeaseLostError, UnavailableError
from nexrl.spec.monitor import FailurePolicySpec

FAILING_EXITS = (InvalidArgumentError.exit_code,)
"""The configuration is wrong. A restart never helps."""
UNCOUNTED_EXITS = (UnavailableError.exit_code, LeaseLostError.exit_code)
"""A peer such as Redis is unreachable, or Redis has lost its last writes. A restart after these is not counted."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


def action_after(
    policy: FailurePolicySpec, instance: str, exit_code: int, failing_exits: Collection[int] = FAILING_EXITS
) -> Literal["Fail", "Ignore", "Count"]:
    """Return what an exit of the process `instance` leads to; `failing_exits` are those that fail without a rule."""
    component = component_of(instance)
    for rule in policy.rules:
        if exit_code in rule.exit_codes and (not rule.components or component in rule.components):
            return rule.action
    if exit_code in failing_exits:
        return "Fail"
    return "Ignore" if exit_code in UNCOUNTED_EXITS else "Count"


def backoff_seconds(in_a_row: int, first_seconds: float = FIRST_BACKOFF_SECONDS) -> float:
    """Seconds to wait before restart number `in_a_row` of a process without success in between; counts from 1."""
    return min(first_seconds * 2.0 ** min(in_a_row - 1, 16), MAX_BACKOFF_SECONDS)
