"""Events: news about an experiment, for `kubectl describe`. Pure."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from nexrl_controller.operator.observed import condition

Object = dict[str, Any]

MAX_NOTE = 950
CONTROLLER = "nexrl.dev/experiment-controller"
_WARNINGS = ("Failed", "Restarting")


def new_event(resource: Object, instance: str, kind: str, reason: str, note: str) -> Object:
    """An event about the experiment `resource`; `kind` is Normal or Warning."""
    metadata = resource["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:12]}", "namespace": metadata["namespace"]},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": kind,
        "action": "Reconcile",
        "reason": reason[:128],
        "note": note[:MAX_NOTE],
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "regarding": {
            "apiVersion": "nexrl.dev/v1alpha1",
            "kind": "Experiment",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }


def event_of_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(type, reason, note) of what changed between two statuses, when that is news."""
    accepted = condition({"status": new}, "Accepted")
    if accepted.get("status") == "False" and condition({"status": old}, "Accepted").get("reason") != accepted["reason"]:
        return "Warning", accepted["reason"], accepted["message"]
    phase = str(new["phase"])
    if old.get("phase") == phase:
        return None
    outcome = condition({"status": new}, "Failed") or condition({"status": new}, "Complete")
    about = outcome or condition({"status": new}, "Ready")
    return "Warning" if phase in _WARNINGS else "Normal", phase, about.get("message") or phase
