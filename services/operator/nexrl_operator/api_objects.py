"""What the objects of the API server say of themselves: pods, their containers, workloads. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic.alias_generators import to_camel

from nexrl.components import BY_NAME
from nexrl.errors import explain_exit
from nexrl_operator.objects import (
    ATTEMPT_LABEL,
    COMPONENT_LABEL,
    EXPERIMENT_LABEL,
    JOB_LABEL,
    MANAGED_BY_LABEL,
    OPERATOR,
    REPLICA_LABEL,
    Object,
)

MAX_LOG_TAIL = 4000
MAX_LAST_WORDS = 400
START_ERROR = "StartError"
"""Reason of a container that never started: its program does not exist."""
ENDED = ("Succeeded", "Failed")
MAIN_CONTAINER = "nexrl"
"""The first container that the operator renders."""
REPORTED_CONTAINERS = (MAIN_CONTAINER, *(component.name for component in BY_NAME.values() if component.beside))
"""The containers that the operator renders: the controller decides about their ends. Templates may add others."""
_FULL_VOLUME, _FULL_CONTAINER = re.compile(r'EmptyDir volume "([^"]+)"'), re.compile(r"^Container (\S+) exceeded")
"""The kubelet's messages when it evicts a pod for the disk that it uses."""


def component_of(item: Object) -> str:
    """Return the component that an object belongs to; "" for none."""
    return str(item["metadata"].get("labels", {}).get(COMPONENT_LABEL, ""))


def experiment_of(item: Object) -> str:
    """Return the name of the experiment that an object belongs to."""
    return str(item["metadata"].get("labels", {}).get(EXPERIMENT_LABEL, ""))


def instance_of(pod: Object) -> str:
    """Return the NEXRL_INSTANCE of a pod's process, such as 'rollout-0'."""
    component, labels, name = component_of(pod), pod["metadata"]["labels"], str(pod["metadata"]["name"])
    index = labels.get("apps.kubernetes.io/pod-index")
    if index is not None:
        return f"{component}-{index}"
    variables = pod.get("spec", {}).get("containers", [{}])[0].get("env", [])
    instance = str(next((v["value"] for v in variables if v["name"] == "NEXRL_INSTANCE" and "value" in v), name))
    return instance.replace("$(NEXRL_REPLICA)", str(replica_of(pod)))


def instances_of(pod: Object) -> list[str]:
    """Return the NEXRL_INSTANCE of each container of a pod that the operator renders."""
    names = {each["name"] for each in pod.get("spec", {}).get("containers", [])}
    return [instance_in(pod, name) for name in REPORTED_CONTAINERS if name == MAIN_CONTAINER or name in names]


def instance_in(pod: Object, container: str) -> str:
    instance = instance_of(pod)
    if container == MAIN_CONTAINER:
        return instance
    return container if instance == component_of(pod) else f"{instance}-{container}"


def trainer_instance(job: Object, replica: int) -> str:
    """Return the NEXRL_INSTANCE of a replica of the trainer, as 'trainer' or, of several, 'trainer-1'."""
    return f"trainer-{replica}" if job.get("spec", {}).get("completions", 1) > 1 else "trainer"


def replica_of(pod: Object) -> int:
    """Return the index of a trainer's pod in its Job."""
    return int(pod["metadata"]["labels"].get(REPLICA_LABEL, 0))


def job_of(pod: Object) -> str:
    """Return the name of the Job that a pod belongs to; "" for none."""
    return str(pod["metadata"]["labels"].get(JOB_LABEL, ""))


def is_disrupted(pod: Object) -> bool:
    """Return whether a pod was evicted from its node, or was deleted."""
    return is_deleted(pod) or condition(pod, "DisruptionTarget").get("status") == "True"


def is_gang_disrupted(pods: Sequence[Object]) -> bool:
    """Return whether a trainer ended because one of its pods was evicted or deleted.

    When a pod fails, Kubernetes deletes the others. So a deletion is a disruption only if no other pod failed before.
    """
    first_end = min((_ended_at(pod) for pod in pods if not is_disrupted(pod)), default=math.inf)
    return any(_disrupted_at(pod) < first_end for pod in pods if is_disrupted(pod))


def _ended_at(pod: Object) -> float:
    """Unix time at which a pod failed; infinite if it has not."""
    ended: Mapping[str, Any] = container_status(pod).get("state", {}).get("terminated") or {}
    if ended.get("exitCode") == 0 or not (ended or own_eviction(pod)):
        return math.inf
    return seconds(ended.get("finishedAt", ""))


def _disrupted_at(pod: Object) -> float:
    """Unix time at which a pod was asked to end, as far as Kubernetes says: before all others for an eviction."""
    if condition(pod, "DisruptionTarget").get("status") == "True":
        return -math.inf
    metadata = pod["metadata"]  # the time of deletion is that at which the grace period ends
    return seconds(metadata["deletionTimestamp"]) - float(metadata.get("deletionGracePeriodSeconds", 0))


def own_eviction(pod: Object) -> str:
    """Return why the kubelet evicted a pod that used more disk than its limit; "" for all other pods.

    An eviction for lack of resources of the node has the condition DisruptionTarget, and is no fault of the pod.
    """
    status, container = pod.get("status", {}), evicted_container(pod)
    if status.get("reason") != "Evicted" or condition(pod, "DisruptionTarget").get("status") == "True":
        return ""
    message, spec = str(status.get("message", "")).strip(), f"{template_path(pod)}.spec"
    limit = f"limits.ephemeral-storage in {spec}.containers[{container}].resources"
    raised = f"the sizeLimit of the volume in {spec}.volumes" if _FULL_VOLUME.search(message) else limit
    subject = "" if container == MAIN_CONTAINER else f"container {container}: "
    return f"evicted: {message}; {subject}write less, or raise {raised}"


def evicted_container(pod: Object) -> str:
    """Return the container that used the disk, as far as the kubelet's message tells; otherwise the main one."""
    message = str(pod.get("status", {}).get("message", ""))
    if named := _FULL_CONTAINER.search(message):
        return named[1] if named[1] in REPORTED_CONTAINERS else MAIN_CONTAINER
    volume, containers = _FULL_VOLUME.search(message), pod.get("spec", {}).get("containers", [])
    users = [
        each["name"]
        for each in containers
        if volume and any(mount["name"] == volume[1] for mount in each.get("volumeMounts", []))
    ]
    return users[0] if len(users) == 1 and users[0] in REPORTED_CONTAINERS else MAIN_CONTAINER


def attempt_of(item: Object) -> int:
    """Return the number of a trainer's Job; 0 for other objects."""
    label = str(item["metadata"].get("labels", {}).get(ATTEMPT_LABEL, ""))
    return int(label) if label.isdecimal() else 0


def owner_uid(item: Object) -> str:
    """Return the UID of the object that controls this one; "" for none."""
    owners = item["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def is_made_here(item: Object) -> bool:
    """Return whether the operator or one of its objects created it. Users' rollouts have the same label."""
    return bool(item["metadata"].get("labels", {}).get(MANAGED_BY_LABEL) == OPERATOR)


def is_deleted(item: Object) -> bool:
    """Return whether an object is being deleted."""
    return "deletionTimestamp" in item["metadata"]


def phase_of(pod: Object) -> str:
    """Return a pod's phase."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def has_ended(pod: Object) -> bool:
    """Return whether all containers of a pod have ended for good."""
    return phase_of(pod) in ENDED


def is_ready(pod: Object) -> bool:
    """Return whether a pod may receive calls."""
    return condition(pod, "Ready").get("status") == "True"


def has_finished(job: Object) -> float | None:
    """Unix time at which a Job completed or failed; None while it runs."""
    for kind in ("Complete", "Failed"):
        found = condition(job, kind)
        if found.get("status") == "True":
            return seconds(found.get("lastTransitionTime", "")) or 0.0
    return None


def condition(item: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the condition of that type; empty when there is none."""
    found: Sequence[Mapping[str, Any]] = item.get("status", {}).get("conditions") or []
    return next((each for each in found if each["type"] == kind), {})


def seconds(time: str) -> float:
    """Unix time of an API time; 0 for none."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def rfc3339(unix_seconds: float) -> str:
    """Return a Unix time in the format of the API."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def container_status(pod: Object, name: str = MAIN_CONTAINER) -> Mapping[str, Any]:
    statuses: Sequence[Mapping[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    return next((each for each in statuses if each["name"] == name), {})


def failed_container(pod: Object) -> tuple[str, Mapping[str, Any]] | None:
    """Return name and end of an init container or sidecar that has failed; None if none has."""
    status = pod.get("status", {})
    for each in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        ended: Mapping[str, Any] = each.get("state", {}).get("terminated") or {}
        if ended.get("exitCode"):
            return str(each["name"]), ended
    return None


def own_code(ended: Mapping[str, Any]) -> int:
    """Return the exit code, negative for the signal that ended it."""
    code = int(ended.get("exitCode", 0))
    return 128 - code if code > 128 else code


def subject(pod: Object, container: str) -> str:
    """Return the words for a container in messages."""
    name = pod["metadata"]["name"]
    return f"pod {name}" if container == MAIN_CONTAINER else f"container {container} of pod {name}"


def ending(pod: Object, container: str, ended: Mapping[str, Any], how: str, remedy: str) -> str:
    """Return how a container ended. The first line says it all, because kubectl shows no more; its log follows."""
    told = words(pod, container, ended).splitlines()
    hint = "" if ended.get("reason") in ("OOMKilled", START_ERROR) else explain_exit(own_code(ended))
    last = f": {told[-1][-MAX_LAST_WORDS:]}" if told else ""
    first = f"{subject(pod, container)} {how} with exit code {ended.get('exitCode', 0)}{hint}{last}{remedy}"
    return "\n".join([first, *(told if len(told) > 1 else [])])


def words(pod: Object, container: str, ended: Mapping[str, Any]) -> str:
    """Return the end of a container's log. Add the kubelet's reason if the exit code does not say it (OOMKilled)."""
    reason = str(ended.get("reason", ""))
    said = str(ended.get("message", "")).strip()[-MAX_LOG_TAIL:]
    if reason == "OOMKilled":
        reason = f"OOMKilled: {_memory_remedy(pod, container)}"
    return "\n".join(filter(None, [said, "" if reason in ("Completed", "Error", START_ERROR) else reason]))


def _memory_remedy(pod: Object, container: str) -> str:
    spec = pod.get("spec", {})
    known = {each["name"]: each for each in (*spec.get("initContainers", []), *spec.get("containers", []))}
    limit = known.get(container, {}).get("resources", {}).get("limits", {}).get("memory")
    path = f"{template_path(pod)}.spec.containers[{container}].resources"
    if limit is None:
        return f"the node had no memory left for the container {container}, which has no limit; set {path}"
    return f"the container {container} needed more memory than its limit of {limit}; raise {path}.limits.memory"


def template_path(item: Object) -> str:
    """Return the field of the spec with the template of the pods of an object's component."""
    component = component_of(item)
    return f"spec.{to_camel(BY_NAME[component].section)}.template" if component in BY_NAME else "the template"
