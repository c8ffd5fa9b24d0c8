"""Kubernetes Events about an experiment, for `kubectl describe`. Pure."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from nexrl_operator.api_objects import condition, rfc3339
from nexrl_operator.objects import Object

MAX_NOTE = 950
CONTROLLER = "nexrl.dev/experiment-controller"
_WARNINGS = ("Failed", "Restarting")


def new_event(resource: Object, instance: str, kind: str, reason: str, note: str) -> Object:
    """Return an event about the experiment `resource`; `kind` is Normal or Warning.

    It is of `v1`: `kubectl get events` sorts by `lastTimestamp`, which an event of `events.k8s.io/v1` must not have.
    """
    metadata, now = resource["metadata"], rfc3339(time.time())
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:12]}", "namespace": metadata["namespace"]},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "type": kind,
        "reason": reason[:128],
        "message": note[:MAX_NOTE],
        "source": {"component": CONTROLLER},
        "reportingComponent": CONTROLLER,
        "reportingInstance": instance[:128],
        "involvedObject": {
            "apiVersion": "nexrl.dev/v1alpha1",
            "kind": "Experiment",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }


def event_of_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Type, reason and note of the Event for a change of the status; None if the change is no news."""
    accepted = condition({"status": new}, "Accepted")
    if accepted.get("status") == "False" and condition({"status": old}, "Accepted").get("reason") != accepted["reason"]:
        return "Warning", accepted["reason"], accepted["message"]
    phase = str(new["phase"])
    if old.get("phase") == phase:
        return None
    outcome = condition({"status": new}, "Failed") or condition({"status": new}, "Complete")
    about = outcome or condition({"status": new}, "Ready")
    return "Warning" if phase in _WARNINGS else "Normal", phase, about.get("message") or phase
