"""Which failures count, and how an experiment that has failed is resumed."""

from dataclasses import replace

from nexrl_operator.plan import Stage, make_plan
from nexrl_operator.status import Verdict, new_status
from tests.support.observed import RUNNING, observed, renderer


def test_a_failed_experiment_that_is_suspended_can_be_resumed_and_one_that_has_succeeded_cannot() -> None:
    made, paused = renderer(), renderer(suspend=True)
    ended = replace(RUNNING, phase="Failed", reason="ComponentFailed", message="trainer ended")
    failed = new_status(observed(made, running=("controller",), seen=ended), made, Verdict(audit={"request": "final"}))
    assert (failed["phase"], failed["audit"]) == ("Failed", {"request": "final"})
    # The controller of the failed run is still there and says that it has failed.
    stopping = observed(paused, running=("controller",), seen=ended, **failed)
    assert make_plan(stopping, paused).stage is Stage.PAUSE
    assert new_status(stopping, paused, Verdict())["phase"] == "Suspending"
    status = new_status(observed(paused, running=(), seen=None, **failed), paused, Verdict())
    assert (status["phase"], "audit" in status) == ("Suspended", False)
    assert "Failed" not in {each["type"] for each in status["conditions"]}
    assert make_plan(observed(made, running=(), seen=None, **status), made).stage is Stage.RUN
    succeeded = {"conditions": [{"type": "Complete", "status": "True", "reason": "Completed", "message": ""}]}
    assert make_plan(observed(paused, running=(), seen=None, **succeeded), paused).stage is Stage.CLEAR
