"""Admission by Kueue: an experiment with a queue's name runs while its Workload is admitted. Pure.

The Workload says what all pods need; Kueue says on which kinds of nodes they may run. An eviction is a suspension.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl_controller.operator.observed import condition, seconds

Object = dict[str, Any]

API_VERSION = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


def queue_of(resource: Object) -> str:
    """The name of the LocalQueue that an experiment waits in; "" for none."""
    return str(resource["metadata"].get("labels", {}).get(QUEUE_LABEL, ""))


def with_pod_sets(item: Object, resource: Object, workloads: Mapping[str, Object]) -> Object:
    """The Workload: `item` with a set of pods for each component."""
    spec: Object = {
        "queueName": queue_of(resource),
        "podSets": [
            {"name": name, "count": count, "template": workload["spec"]["template"]}
            for name, workload in workloads.items()
            if (count := workload["spec"].get("replicas", workload["spec"].get("parallelism", 1)))
        ],
    }
    priority = resource["metadata"].get("labels", {}).get(PRIORITY_LABEL)
    if priority:
        spec["priorityClassRef"] = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": priority}
    return item | {"apiVersion": API_VERSION, "kind": "Workload", "spec": spec}


def is_admitted(workload: Object | None) -> bool:
    """Whether its pods may run. One that is evicted keeps its quota until it is deleted, and must stop all the same."""
    if workload is None or not workload["spec"].get("active", True):
        return False
    return _holds(workload, "Admitted") and not _holds(workload, "Evicted")


def is_to_be_queued_again(workload: Object, now: float) -> bool:
    """Whether an evicted Workload is to be deleted, which frees its quota, and made again."""
    if not workload["spec"].get("active", True):
        return False  # somebody wants it to wait
    return _holds(workload, "Evicted") and now >= requeue_at(workload)


def requeue_at(workload: Object) -> float:
    """Unix time before which an evicted Workload is not to be queued again."""
    return seconds(workload.get("status", {}).get("requeueState", {}).get("requeueAt", ""))


def admitted_counts(workload: Object) -> dict[str, int]:
    """Pods that are admitted, by component; podSets never change."""
    return {each["name"]: int(each["count"]) for each in workload["spec"]["podSets"]}


def flavors_of(workload: Object) -> dict[str, list[str]]:
    """Names of the ResourceFlavors that the pods of each component are to run on."""
    admission = workload.get("status", {}).get("admission", {})
    return {
        each["name"]: sorted(set(each.get("flavors", {}).values())) for each in admission.get("podSetAssignments", [])
    }


def placed(pod: Object, flavors: Mapping[str, Object], names: list[str]) -> Object:
    """A pod template that runs where its flavors say. Raises InvalidArgumentError when it asks for something else."""
    spec = pod["spec"]
    selector, tolerations = dict(spec.get("nodeSelector", {})), list(spec.get("tolerations", []))
    for key, value in _node_labels(flavors, names):
        if selector.setdefault(key, value) != value:
            raise InvalidArgumentError(f"nodeSelector {key}: {selector[key]}; the queue has assigned {value}")
    for name in names:
        tolerations += flavors[name].get("spec", {}).get("tolerations", [])
    return {**pod, "spec": {**spec, "nodeSelector": selector, "tolerations": tolerations}}


def _node_labels(flavors: Mapping[str, Object], names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        yield from flavors[name].get("spec", {}).get("nodeLabels", {}).items()


def _holds(workload: Object, kind: str) -> bool:
    return condition(workload, kind).get("status") == "True"
