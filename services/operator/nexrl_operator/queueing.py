"""Admission by Kueue: an experiment with the name of a queue runs while its Workload is admitted. Pure.

The Workload says what all pods need, Kueue on which kinds of nodes they may run. An evicted experiment is suspended.
"""

import json
from collections.abc import Mapping, Sequence

from nexrl.errors import InvalidArgumentError
from nexrl_operator.api_objects import condition, seconds
from nexrl_operator.objects import GROUP, Object, Owner

API_VERSION = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
NODES = f"{GROUP}/nodes"
"""Annotation with the nodes that an object was placed on. A flavor that is edited later moves nothing that runs."""


def queue_of(resource: Object) -> str:
    """Return the name of the LocalQueue that an experiment waits in; "" for none."""
    return str(resource["metadata"].get("labels", {}).get(QUEUE_LABEL, ""))


def new_workload(owner: Owner, resource: Object, workloads: Mapping[str, Object]) -> Object:
    """Return the Kueue Workload that asks for the pods of all components."""
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
    return owner.new_object(API_VERSION, "Workload", "admission", "admission") | {"spec": spec}


def is_admitted(workload: Object | None) -> bool:
    """Return whether its pods may run. An evicted Workload keeps its quota until deleted, but its pods must stop."""
    if workload is None or not workload["spec"].get("active", True):
        return False
    return _holds(workload, "Admitted") and not _holds(workload, "Evicted")


def is_to_be_queued_again(workload: Object, now: float) -> bool:
    """Return whether to delete an evicted Workload, which frees its quota, and create it again."""
    if not workload["spec"].get("active", True):
        return False  # a user has deactivated it
    return _holds(workload, "Evicted") and now >= requeue_at(workload)


def requeue_at(workload: Object) -> float:
    """Unix time before which an evicted Workload must not be queued again."""
    return seconds(workload.get("status", {}).get("requeueState", {}).get("requeueAt", ""))


def admitted_counts(workload: Object) -> dict[str, int]:
    """Return the number of admitted pods by component; podSets never change."""
    return {each["name"]: int(each["count"]) for each in workload["spec"]["podSets"]}


def flavors_of(workload: Object) -> dict[str, list[str]]:
    """Names of the ResourceFlavors assigned to the pods of each component."""
    admission = workload.get("status", {}).get("admission", {})
    return {
        each["name"]: sorted(set(each.get("flavors", {}).values())) for each in admission.get("podSetAssignments", [])
    }


def nodes_of(flavors: Mapping[str, Object], names: Sequence[str]) -> Object:
    """Return the labels and tolerations of these flavors."""
    specs = [flavors[name].get("spec", {}) for name in names]
    labels = [[key, value] for spec in specs for key, value in spec.get("nodeLabels", {}).items()]
    return {"nodeLabels": labels, "tolerations": [each for spec in specs for each in spec.get("tolerations", [])]}


def nodes_before(live: Object | None) -> Object | None:
    """Return the nodes that an object was placed on when it was applied; None if it does not say so."""
    told = (live or {}).get("metadata", {}).get("annotations", {}).get(NODES, "")
    try:
        nodes = json.loads(told)
        labels = [[str(key), str(value)] for key, value in nodes["nodeLabels"]]
        return {"nodeLabels": labels, "tolerations": [dict(each) for each in nodes["tolerations"]]}
    except (ValueError, KeyError, TypeError):  # anybody who may edit the object can write there
        return None


def placed(workload: Object, nodes: Object) -> Object:
    """Return the workload with pods that run on these nodes, and an annotation with the nodes.

    Raises InvalidArgumentError if its template asks for other nodes.
    """
    metadata, pod = workload["metadata"], workload["spec"]["template"]
    spec = pod["spec"]
    selector = dict(spec.get("nodeSelector", {}))
    for key, value in nodes["nodeLabels"]:
        if selector.setdefault(key, value) != value:
            raise InvalidArgumentError(
                f"nodeSelector {key}: the template asks for {selector[key]}, the queue has assigned {value}; remove it"
            )
    tolerations = [*spec.get("tolerations", []), *nodes["tolerations"]]
    template = {**pod, "spec": {**spec, "nodeSelector": selector, "tolerations": tolerations}}
    annotations = {**metadata.get("annotations", {}), NODES: json.dumps(nodes)}
    return {
        **workload,
        "metadata": {**metadata, "annotations": annotations},
        "spec": {**workload["spec"], "template": template},
    }


def _holds(workload: Object, kind: str) -> bool:
    return condition(workload, kind).get("status") == "True"
