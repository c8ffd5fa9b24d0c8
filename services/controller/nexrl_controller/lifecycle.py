"""The life of an experiment: a pure function from state and event to the next state.

Every experiment ends through Stopping, with its outcome already decided. It becomes Succeeded or Failed only when its
components have stopped.
"""

from dataclasses import replace

from nexrl_controller.events import ComponentExited, Event, MetricsPosted, Stalled
from nexrl_controller.state import LEGAL, IllegalTransitionError, Phase, Rules, State

_EXPLAINS_WITHIN_A_PHASE = (MetricsPosted, ComponentExited, Stalled)


def advance(state: State, event: Event, rules: Rules) -> State:
    """Return the state after `event`. The reason and message of a phase come from the event that led into it.

    Raises IllegalTransitionError if `state` does not allow the event.
    """
    after = event.after(state, rules)
    if after.outcome is None and _is_complete(after, rules):
        after = after.ending(Phase.SUCCEEDED, "Completed", f"all {rules.total_steps} steps were made")
    if after.phase is state.phase:
        if not isinstance(event, _EXPLAINS_WITHIN_A_PHASE):
            after = replace(after, reason=state.reason, message=state.message)
    elif after.phase not in LEGAL[state.phase]:
        raise IllegalTransitionError(f"{event}: {state.phase} cannot become {after.phase}")
    return after


def _is_complete(state: State, rules: Rules) -> bool:
    """Return whether all steps are made, the last checkpoint is written, and any last validation has ended."""
    is_validated = not rules.validates or state.validated_version >= rules.total_steps
    return state.is_trained and state.step >= rules.total_steps and is_validated
