"""What the cluster and the controller of one experiment have reported about it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from nexrl.errors import UnavailableError
from nexrl_operator.api_objects import (
    ENDED,
    MAIN_CONTAINER,
    REPORTED_CONTAINERS,
    attempt_of,
    component_of,
    condition,
    container_status,
    ending,
    evicted_container,
    failed_container,
    has_finished,
    instance_in,
    is_deleted,
    is_gang_disrupted,
    is_ready,
    job_of,
    own_code,
    own_eviction,
    phase_of,
    replica_of,
    template_path,
    trainer_instance,
    words,
)
from nexrl_operator.objects import (
    Object,
)

WORKLOADS = ("Deployment", "StatefulSet", "Job")


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
        return [pod for pod in self.pods if component_of(pod) in components and phase_of(pod) not in ENDED]

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
        uid, leader = job["metadata"]["uid"], trainer_instance(job, 0)
        found = [exit for pod in self._pods_of(job) if (exit := _end_of_trainer(pod, uid, leader))]
        # The replicas end together, the first one for the reason of any other, unless it has only lost that one.
        telling = [exit for exit in found if exit.exit_code not in (0, UnavailableError.exit_code)]
        is_complete = condition(job, "Complete").get("status") == "True"
        unknown = Exit(uid, leader, 0 if is_complete else -SIGKILL, "its pod has no exit code")
        return next(iter([*telling, *found]), unknown)

    def is_disrupted(self, job: Object) -> bool:
        """Return whether a Job ended because its pod was evicted or deleted."""
        return self._is_gone(job) or attempt_of(job) == self.disrupted_attempt

    @property
    def disrupted_attempt(self) -> int:
        """The number of the last trainer Job with an evicted or deleted pod, which may be gone by now; 0 for none."""
        now = [
            attempt_of(job)
            for job in self.workloads("trainer")
            if is_gang_disrupted(self._pods_of(job)) or (has_finished(job) is not None and self._is_gone(job))
        ]
        return max([*now, int(self.status.get("disruptedAttempt", 0))])

    def controller_ends(self) -> tuple[str, int, Exit]:
        """Return the UID of the controller's pod, the number of ends of its container, and the newest end."""
        pods = self.living("controller")
        pod = max(pods, key=lambda each: int(container_status(each).get("restartCount", 0)), default={})
        ended = container_status(pod).get("lastState", {}).get("terminated") or {}
        newest = _exit("", "controller", ended, words(pod, MAIN_CONTAINER, ended))
        return str(pod.get("metadata", {}).get("uid", "")), container_status(pod).get("restartCount", 0), newest

    def _is_gone(self, job: Object) -> bool:
        # A pod that ends by itself stays as long as its Job does.
        return condition(job, "Complete").get("status") != "True" and not any(self._pods_of(job))

    def _pods_of(self, job: Object) -> list[Object]:
        """Return the pods of a Job, replica 0 first."""
        return sorted((pod for pod in self.pods if job_of(pod) == job["metadata"]["name"]), key=replica_of)


def _exits(pod: Object) -> Iterator[Exit]:
    uid = pod["metadata"]["uid"]
    for name in REPORTED_CONTAINERS:
        if ended := container_status(pod, name).get("lastState", {}).get("terminated"):
            request_id = f"{uid}/{ended.get('finishedAt', '')}"
            yield _exit(request_id, instance_in(pod, name), ended, words(pod, name, ended))
    if told := own_eviction(pod):
        yield Exit(f"{uid}/evicted", instance_in(pod, evicted_container(pod)), -SIGKILL, told)


def _end_of_trainer(pod: Object, request_id: str, leader: str) -> Exit | None:
    """Return how a pod of the trainer ended, as the end of the trainer; None if it has not ended by itself."""
    if told := own_eviction(pod):
        return Exit(request_id, leader, -SIGKILL, told)
    container = container_status(pod)
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    if ended:
        return _exit(request_id, leader, ended, words(pod, MAIN_CONTAINER, ended))
    if failed := failed_container(pod):
        name, ended = failed
        told = ending(pod, name, ended, "ended", f"; correct it in {template_path(pod)}")
        first, _, log = told.partition("\n")
        return _exit(request_id, leader, ended, "\n".join(filter(None, [log, first])))
    return None


def _exit(request_id: str, component: str, ended: Mapping[str, Any], log_tail: str) -> Exit:
    return Exit(request_id, component, own_code(ended), log_tail)
