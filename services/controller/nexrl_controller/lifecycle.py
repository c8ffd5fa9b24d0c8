"""The life of an experiment as a pure function from state and event to state.

Every end goes through Stopping, with its outcome already decided: the components stop then, and only when they have is
the experiment Succeeded or Failed.
"""

from dataclasses import replace

from nexrl_controller.events import ComponentExited, Event, MetricsPosted, Stalled
from nexrl_controller.state import LEGAL, IllegalTransitionError, Phase, Rules, State

_SPEAKS_WITHIN_A_PHASE = (MetricsPosted, ComponentExited, Stalled)


def advance(state: State, event: Event, rules: Rules) -> State:
    """The state after `event`. The reason and message of a phase are those of the event that led into it.

    Raises IllegalTransitionError when the event makes no sense; the old state stands then.
    """
    after = event.after(state, rules)
    if after.outcome is None and _is_complete(after, rules):
        after = after.ending(Phase.SUCCEEDED, "Completed", f"all {rules.total_steps} steps were made")
    if after.phase is state.phase:
        if not isinstance(event, _SPEAKS_WITHIN_A_PHASE):
            after = replace(after, reason=state.reason, message=state.message)
    elif after.phase not in LEGAL[state.phase]:
        raise IllegalTransitionError(f"{event}: {state.phase} cannot become {after.phase}")
    return after


def _is_complete(state: State, rules: Rules) -> bool:
    """Whether all steps were made, the last checkpoint is written and, where it must be, the last version measured."""
    is_validated = not rules.validates or state.validated_version >= rules.total_steps
    return state.is_trained and state.step >= rules.total_steps and is_validated
