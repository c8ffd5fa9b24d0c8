"""What the cluster and the controller of one experiment have reported about it. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from signal import SIGKILL
from typing import Any

from pydantic.alias_generators import to_camel

from nexrl.components import BY_NAME
from nexrl.errors import explain_exit
from nexrl_operator.objects import (
    ATTEMPT_LABEL,
    COMPONENT_LABEL,
    EXPERIMENT_LABEL,
    MANAGED_BY_LABEL,
    OPERATOR,
    Object,
)

WORKLOADS = ("Deployment", "StatefulSet", "Job")
MAX_LOG_TAIL = 4000
MAX_LAST_WORDS = 400
START_ERROR = "StartError"
"""Reason of a container that never started: its program does not exist."""
_ENDED = ("Succeeded", "Failed")
MAIN_CONTAINER = "nexrl"
"""The first container that the operator renders."""
REPORTED_CONTAINERS = (MAIN_CONTAINER, *(component.name for component in BY_NAME.values() if component.beside))
"""The containers that the operator renders: the controller decides about their ends. Templates may add others."""

_FULL_VOLUME, _FULL_CONTAINER = re.compile(r'EmptyDir volume "([^"]+)"'), re.compile(r"^Container (\S+) exceeded")
"""The kubelet's messages when it evicts a pod for the disk that it uses."""


@dataclass(frozen=True)
class Seen:
    """The last message of the experiment's controller."""

    phase: str
    reason: str = ""
    message: str = ""
    step: int = 0
    total_steps: int = 0
    policy_version: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)
    restarts: int = 0
    failing_samples: str = ""
    """Which share of the attempts at samples fails, and why, for people; empty while few fail."""

    @property
    def is_ending(self) -> bool:
        """Whether its outcome is decided."""
        return self.phase in ("Stopping", "Succeeded", "Failed")

    @property
    def has_ended(self) -> bool:
        """Whether its components have stopped, as far as its controller knows."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Exit:
    """The exit of one process."""

    request_id: str
    component: str
    exit_code: int
    """Negative for the signal that ended it."""
    log_tail: str


@dataclass(frozen=True)
class Observed:
    """The experiment and its objects, as the caches contain them."""

    resource: Object
    children: Sequence[Object]
    pods: Sequence[Object]
    seen: Seen | None
    now: float
    has_predecessor: bool = False
    """Whether objects of a deleted experiment of this name still exist."""
    warnings: Mapping[str, Sequence[Object]] = field(default_factory=dict)
    """The Events of type Warning about its objects, by the UID of the object."""

    @property
    def status(self) -> Mapping[str, Any]:
        """Its status as last written."""
        found: Mapping[str, Any] = self.resource.get("status", {})
        return found

    @property
    def admission(self) -> Object | None:
        """Its Kueue Workload; None if it has none."""
        found = (child for child in self.children if child["kind"] == "Workload" and not is_deleted(child))
        return next(found, None)

    def has(self, item: Object) -> bool:
        """Return whether it has an object of the kind and name of `item`."""
        return self.find(item) is not None

    def find(self, item: Object) -> Object | None:
        """Its object of the kind and name of `item`; None if there is none."""
        wanted = item["kind"], item["metadata"]["name"]
        return next((child for child in self.children if (child["kind"], child["metadata"]["name"]) == wanted), None)

    def workloads(self, component: str) -> list[Object]:
        """Return the objects that create the pods of a component; for the trainer every attempt, in order."""
        found = [
            child
            for child in self.children
            if child["kind"] in WORKLOADS and component_of(child) == component and not is_deleted(child)
        ]
        return sorted(found, key=attempt_of)

    def living(self, *components: str) -> list[Object]:
        """Return the pods of these components that have not ended."""
        return [pod for pod in self.pods if component_of(pod) in components and phase_of(pod) not in _ENDED]

    def ready(self, component: str) -> int:
        """Return the number of ready pods of a component."""
        return sum(is_ready(pod) for pod in self.living(component) if not is_deleted(pod))

    def exits(self) -> list[Exit]:
        """Return the newest exit of each container that the kubelet restarts, without the controller's."""
        pods = [pod for pod in self.pods if component_of(pod) not in ("controller", "trainer") and not is_deleted(pod)]
        pods.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        # A Deployment keeps its evicted pods. The controller knows only the newest exit, so it would count older ones.
        return list({exit.component: exit for pod in pods for exit in _exits(pod)}.values())

    def job_exit(self, job: Object) -> Exit:
        """Return how a Job ended."""
        uid = job["metadata"]["uid"]
        for pod in self._pods_of(job):
            if told := own_eviction(pod):
                return Exit(uid, "trainer", -SIGKILL, told)
            container = _container(pod)
            ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
            if ended:
                return _exit(uid, "trainer", ended, words(pod, MAIN_CONTAINER, ended))
            if failed := _failed_container(pod):
                name, ended = failed
                told = ending(pod, name, ended, "ended", f"; correct it in {template_path(pod)}")
                first, _, log = told.partition("\n")
                return _exit(uid, "trainer", ended, "\n".join(filter(None, [log, first])))
        is_complete = condition(job, "Complete").get("status") == "True"
        return Exit(uid, "trainer", 0 if is_complete else -9, "its pod has no exit code")

    def is_disrupted(self, job: Object) -> bool:
        """Return whether a Job ended because its pod was evicted or deleted."""
        return self._is_gone(job) or attempt_of(job) == self.disrupted_attempt

    @property
    def disrupted_attempt(self) -> int:
        """The number of the last trainer Job with an evicted or deleted pod, which may be gone by now; 0 for none."""
        now = [
            attempt_of(job)
            for job in self.workloads("trainer")
            if any(map(is_disrupted, self._pods_of(job))) or (has_finished(job) is not None and self._is_gone(job))
        ]
        return max([*now, int(self.status.get("disruptedAttempt", 0))])

    def controller_ends(self) -> tuple[str, int, Exit]:
        """Return the UID of the controller's pod, the number of ends of its container, and the newest end."""
        pods = self.living("controller")
        pod = max(pods, key=lambda each: int(_container(each).get("restartCount", 0)), default={})
        ended = _container(pod).get("lastState", {}).get("terminated") or {}
        newest = _exit("", "controller", ended, words(pod, MAIN_CONTAINER, ended))
        return str(pod.get("metadata", {}).get("uid", "")), _container(pod).get("restartCount", 0), newest

    def _is_gone(self, job: Object) -> bool:
        # A pod that ends by itself stays as long as its Job does.
        return condition(job, "Complete").get("status") != "True" and not any(self._pods_of(job))

    def _pods_of(self, job: Object) -> Iterator[Object]:
        return (pod for pod in self.pods if job_of(pod) == job["metadata"]["name"])


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
    return str(next((v["value"] for v in variables if v["name"] == "NEXRL_INSTANCE" and "value" in v), name))


def instances_of(pod: Object) -> list[str]:
    """Return the NEXRL_INSTANCE of each container of a pod that the operator renders."""
    names = {each["name"] for each in pod.get("spec", {}).get("containers", [])}
    return [_instance_of(pod, name) for name in REPORTED_CONTAINERS if name == MAIN_CONTAINER or name in names]


def _instance_of(pod: Object, container: str) -> str:
    instance = instance_of(pod)
    if container == MAIN_CONTAINER:
        return instance
    return container if instance == component_of(pod) else f"{instance}-{container}"


def job_of(pod: Object) -> str:
    """Return the name of the Job that a pod belongs to; "" for none."""
    return str(pod["metadata"]["labels"].get("batch.kubernetes.io/job-name", ""))


def is_disrupted(pod: Object) -> bool:
    """Return whether a pod was evicted from its node, or was deleted."""
    return is_deleted(pod) or condition(pod, "DisruptionTarget").get("status") == "True"


def own_eviction(pod: Object) -> str:
    """Return why the kubelet evicted a pod that used more disk than its limit; "" for all other pods.

    An eviction for lack of resources of the node has the condition DisruptionTarget, and is no fault of the pod.
    """
    status, container = pod.get("status", {}), _evicted_container(pod)
    if status.get("reason") != "Evicted" or condition(pod, "DisruptionTarget").get("status") == "True":
        return ""
    message, spec = str(status.get("message", "")).strip(), f"{template_path(pod)}.spec"
    limit = f"limits.ephemeral-storage in {spec}.containers[{container}].resources"
    raised = f"the sizeLimit of the volume in {spec}.volumes" if _FULL_VOLUME.search(message) else limit
    subject = "" if container == MAIN_CONTAINER else f"container {container}: "
    return f"evicted: {message}; {subject}write less, or raise {raised}"


def _evicted_container(pod: Object) -> str:
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
    return phase_of(pod) in _ENDED


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


def _container(pod: Object, name: str = MAIN_CONTAINER) -> Mapping[str, Any]:
    statuses: Sequence[Mapping[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    return next((each for each in statuses if each["name"] == name), {})


def _failed_container(pod: Object) -> tuple[str, Mapping[str, Any]] | None:
    """Return name and end of an init container or sidecar that has failed; None if none has."""
    status = pod.get("status", {})
    for each in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        ended: Mapping[str, Any] = each.get("state", {}).get("terminated") or {}
        if ended.get("exitCode"):
            return str(each["name"]), ended
    return None


def _exits(pod: Object) -> Iterator[Exit]:
    uid = pod["metadata"]["uid"]
    for name in REPORTED_CONTAINERS:
        if ended := _container(pod, name).get("lastState", {}).get("terminated"):
            request_id = f"{uid}/{ended.get('finishedAt', '')}"
            yield _exit(request_id, _instance_of(pod, name), ended, words(pod, name, ended))
    if told := own_eviction(pod):
        yield Exit(f"{uid}/evicted", _instance_of(pod, _evicted_container(pod)), -SIGKILL, told)


def _exit(request_id: str, component: str, ended: Mapping[str, Any], log_tail: str) -> Exit:
    return Exit(request_id, component, _own_code(ended), log_tail)


def _own_code(ended: Mapping[str, Any]) -> int:
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
    hint = "" if ended.get("reason") in ("OOMKilled", START_ERROR) else explain_exit(_own_code(ended))
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
