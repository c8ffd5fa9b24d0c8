"""Why pods of an experiment do not run or are not created: object, cause and remedy, for the status. Pure.

The kubelet and Kubernetes' controllers tell some causes only in Events: volumes that cannot be mounted, and pods that
the API server refuses.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from nexrl.components import COMPONENTS
from nexrl_operator.api_objects import (
    REPORTED_CONTAINERS,
    START_ERROR,
    component_of,
    condition,
    ending,
    experiment_of,
    has_ended,
    has_finished,
    is_deleted,
    seconds,
    subject,
    template_path,
)
from nexrl_operator.objects import Object
from nexrl_operator.observed import Observed

START_SECONDS = 45.0
"""Time after which a container that runs and is not ready is named."""
_ORDER = {component.name: number for number, component in enumerate(COMPONENTS)}
"""Those that others wait for come first."""
_HOPELESS = {
    "CreateContainerConfigError": "refers to an object that does not exist",
    "CreateContainerError": "cannot be created",
    "RunContainerError": "cannot be started",
    "InvalidImageName": "has an invalid image name",
    "ErrImagePull": "cannot pull its image",
    "ImagePullBackOff": "cannot pull its image",
    "ErrImageNeverPull": "has no image on the node, and must not pull it",
    "CrashLoopBackOff": "keeps ending",
}
"""Reasons of waiting containers that need a change by the user."""
_MOUNT_REASONS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
_MISSING = re.compile(
    r"""(?P<kind>secret|configmap|persistentvolumeclaim) "(?P<name>[^"]+)" not found""", re.IGNORECASE
)
_OWN = ("tls", "redis", "experiment", "run")
"""Last parts of the names of objects that the operator creates."""
_KINDS = {"secret": "Secret", "configmap": "ConfigMap", "persistentvolumeclaim": "PersistentVolumeClaim"}


@dataclass(frozen=True)
class Trouble:
    """The reason why a pod does not run."""

    reason: str
    message: str


def find_trouble(observed: Observed) -> Trouble | None:
    """Return the first reason found why a pod does not run or is not created; None if there is none.

    A pod that is only slow is named if no other has a cause: it may wait for that one.
    """
    pods = [pod for pod in observed.pods if not has_ended(pod) and not is_deleted(pod)]
    pods.sort(key=lambda pod: (_ORDER.get(component_of(pod), 0), str(pod["metadata"]["name"])))
    causes = (_trouble_of(pod, observed.warnings, observed.now) for pod in pods)
    factories = _data_factories(observed.resource.get("spec", {}))
    slow = (_slow_start(pod, observed.now, factories) for pod in pods)
    return next(filter(None, chain(causes, _uncreated(observed), slow)), None)


def next_trouble_seconds(observed: Observed) -> float | None:
    """Return the seconds until a container has been starting for too long, or has run on since it ended; else None."""
    pods = [pod for pod in observed.pods if not has_ended(pod)]
    statuses = chain(*(_statuses(pod, kind) for pod in pods for kind in ("initContainerStatuses", "containerStatuses")))
    young = (each for each in statuses if not each.get("ready") or each.get("lastState"))
    found = [START_SECONDS - _running_seconds(each, observed.now) for each in young]
    return min((seconds for seconds in found if 0 < seconds < START_SECONDS), default=None)


# pods -----------------------------------------------------------------------------------------------------------------


def _trouble_of(pod: Object, warnings: Mapping[str, Sequence[Object]], now: float) -> Trouble | None:
    name = pod["metadata"]["name"]
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        message = f"pod {name}: {scheduled.get('message', '')}"
        return Trouble(scheduled.get("reason", "Unschedulable"), message + _remedy(pod, "", message))
    containers = _statuses(pod, "initContainerStatuses"), _statuses(pod)
    for status in (*containers[0], *containers[1]):
        if (found := _trouble_of_container(pod, status, now)) is not None:
            return found
    return _mount_trouble(pod, warnings) or _endless_init(pod, *containers)


def _trouble_of_container(pod: Object, status: Mapping[str, Any], now: float) -> Trouble | None:
    container, state = status["name"], status.get("state", {})
    waiting, ended = state.get("waiting", {}), state.get("terminated", {})
    reason, last = waiting.get("reason", ""), status.get("lastState", {}).get("terminated") or {}
    ends_again = ended.get("exitCode") != 0 and (not waiting or reason in _HOPELESS)
    keeps_ending = last.get("exitCode") and ends_again and not _has_recovered(pod, status, now)
    if keeps_ending or (reason == "CrashLoopBackOff" and last):
        why = START_ERROR if last.get("reason") == START_ERROR else "CrashLoopBackOff"
        told = ending(pod, container, last, "keeps ending, the last time", _remedy(pod, why, "", container))
        return Trouble("CrashLoopBackOff", told)
    if reason in _HOPELESS:
        message = f"{subject(pod, container)} {_HOPELESS[reason]}: {waiting.get('message', '')}"
        return Trouble(reason, message + _remedy(pod, reason, message, container))
    # The ends of these are reported to the controller, which decides about them.
    if ended.get("exitCode") and container not in REPORTED_CONTAINERS:
        told = ending(pod, container, ended, "has ended", _remedy(pod, "", "", container))
        return Trouble("ContainerFailed", told)
    return None


def _has_recovered(pod: Object, status: Mapping[str, Any], now: float) -> bool:
    """Return whether a container that has ended before runs on: between two ends it runs for a moment.

    The startup probe alone does not tell: its port is open before code of the user is imported. Without a readiness
    probe, the kubelet says "ready" as soon as the container runs.
    """
    containers = chain(*(pod.get("spec", {}).get(kind, ()) for kind in ("containers", "initContainers")))
    runs_on = _running_seconds(status, now) >= START_SECONDS
    if any(each["name"] == status["name"] and "readinessProbe" in each for each in containers):
        return bool(status.get("ready") or (status.get("started") and runs_on))
    return runs_on


def _mount_trouble(pod: Object, warnings: Mapping[str, Sequence[Object]]) -> Trouble | None:
    statuses = [*_statuses(pod, "initContainerStatuses"), *_statuses(pod)]
    has_begun = any(each.get("lastState") or each.get("state", {}).keys() - {"waiting"} for each in statuses)
    if has_begun or condition(pod, "PodReadyToStartContainers").get("status") == "True":
        return None  # the Event is about an earlier attempt
    event = _newest(warnings.get(pod["metadata"].get("uid", ""), ()), _MOUNT_REASONS)
    if event is None:
        return None
    message = f"pod {pod['metadata']['name']}: {event.get('message', '')}"
    return Trouble(event["reason"], message + _remedy(pod, event["reason"], message))


def _endless_init(pod: Object, init: Sequence[Mapping[str, Any]], main: Sequence[Mapping[str, Any]]) -> Trouble | None:
    """Return the init container that the others wait for."""
    if all(each.get("state", {}).get("waiting", {}).get("reason") != "PodInitializing" for each in main):
        return None
    initial = pod.get("spec", {}).get("initContainers", [])
    sidecars = {each["name"] for each in initial if each.get("restartPolicy") == "Always"}
    for each in init:
        if "running" in each.get("state", {}) and each["name"] not in sidecars:
            log = f"`kubectl logs {pod['metadata']['name']} --container={each['name']}` shows what it does"
            message = f"{subject(pod, each['name'])} is an init container that has not ended; {log}"
            return Trouble("InitContainerRunning", message)
    return None


def _data_factories(spec: Mapping[str, Any]) -> Sequence[str]:
    """Return the functions of the user that make tasks, each with its key."""
    sections = {"spec.data": spec.get("data"), "spec.validation.data": (spec.get("validation") or {}).get("data")}
    return [f"{key}.factory {data['factory']}" for key, data in sections.items() if data and data.get("factory")]


def _slow_start(pod: Object, now: float, factories: Sequence[str]) -> Trouble | None:
    """Return the container that has run for a while and is not ready. `factories` are those of the data reader."""
    for status in _statuses(pod):
        if _starting_seconds(status, now) >= START_SECONDS:
            since, name = status["state"]["running"]["startedAt"], pod["metadata"]["name"]
            beside = [each.name for each in COMPONENTS if each.beside == component_of(pod)]  # it waits for these
            logs = [f"`kubectl logs {name} --container={each}`" for each in (status["name"], *beside)]
            log = f"{' and '.join(logs)} {'show what they do' if beside else 'shows what it does'}"
            last = status.get("lastState", {}).get("terminated") or {}
            if last.get("exitCode"):
                again = f"; it runs again since {since}, and is not ready; {log}"
                return Trouble("NotStarted", ending(pod, status["name"], last, "ended", again))
            message = f"{subject(pod, status['name'])} runs since {since} and is not ready: it waits for others,"
            if beside and factories:
                message += f" such as {' or '.join(factories)}, which must return (correct it if it never does),"
            return Trouble("NotStarted", f"{message} loads a model, or code that it imports does not end; {log}")
    return None


def _starting_seconds(status: Mapping[str, Any], now: float) -> float:
    """Return how long a container has run without being ready; 0 if it is ready or does not run.

    The startup probe says less: the port that it asks is open before code of the user is imported.
    """
    return 0.0 if status.get("ready") else _running_seconds(status, now)


def _running_seconds(status: Mapping[str, Any], now: float) -> float:
    running = status.get("state", {}).get("running", {})
    return max(0.0, now - seconds(running["startedAt"])) if "startedAt" in running else 0.0


# pods that do not exist -----------------------------------------------------------------------------------------------


def _uncreated(observed: Observed) -> Iterator[Trouble]:
    """Yield why the API server refuses the pods of components that lack pods."""
    for child in observed.children:
        spec = child.get("spec", {})
        wanted = spec.get("replicas", spec.get("parallelism", 0))
        if "template" not in spec or is_deleted(child) or has_finished(child) is not None:
            continue
        if len(observed.living(component_of(child))) >= wanted:
            continue
        failure = condition(child, "ReplicaFailure")
        event = _newest(observed.warnings.get(child["metadata"].get("uid", ""), ()), ("FailedCreate",))
        told = failure.get("message") if failure.get("status") == "True" else (event or {}).get("message")
        if told:
            message = f"{child['kind']} {child['metadata']['name']} cannot create its pods: {told}"
            yield Trouble("FailedCreate", message + _remedy(child, "FailedCreate", message))


def _newest(events: Sequence[Object], reasons: Sequence[str]) -> Object | None:
    known = [event for event in events if event.get("reason") in reasons]
    return max(known, key=_time_of, default=None)


def _time_of(event: Object) -> float:
    told = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return seconds(told or "")


# texts ----------------------------------------------------------------------------------------------------------------


def _remedy(item: Object, reason: str, message: str, container: str = "") -> str:
    """Return what to do, as the end of a sentence; "" if the message says all."""
    template = template_path(item)
    if missing := _MISSING.search(message):
        what = f"{_KINDS[missing['kind'].lower()]} {missing['name']}"
        if missing["name"].removeprefix(f"{experiment_of(item)}-") in _OWN:
            issued = f"; with cert-manager, `kubectl describe certificate {missing['name']}` says why it does not exist"
            return f"; the operator creates the {what} within a minute" + issued * missing["name"].endswith("-tls")
        return f"; create the {what} in the namespace {item['metadata'].get('namespace')}, or correct {template}"
    if "image" in reason.lower():
        return f"; correct the image in {template}, the chart's images, or the pod's imagePullSecrets"
    for words_of_cause, remedy in (
        ("exceeded quota", "raise the ResourceQuota, or lower the requests in"),
        ("must specify", "set what the quota asks for in"),
        ("violates PodSecurity", "remove what it names from"),
        ("is forbidden", "correct what it names in"),
        ("couldn't find key", "add the key, or correct"),
    ):
        if words_of_cause in message:
            return f"; {remedy} {template}"
    if reason == "CrashLoopBackOff" and container in REPORTED_CONTAINERS:
        return ""  # its log says what to do
    return f"; correct the container {container} in {template}" if container else ""


def _statuses(pod: Object, kind: str = "containerStatuses") -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = pod.get("status", {}).get(kind) or []
    return found
