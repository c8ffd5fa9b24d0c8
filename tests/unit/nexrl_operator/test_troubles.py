"""What the status says about pods that do not run: the object, the cause, and the remedy."""

from dataclasses import replace
from typing import Any

import pytest

from nexrl_operator.api_objects import rfc3339
from nexrl_operator.objects import Owner
from nexrl_operator.observed import Observed
from nexrl_operator.troubles import START_SECONDS, find_trouble, next_trouble_seconds

Object = dict[str, Any]
NOW = 1_800_000_000.0
OWNER = Owner("rl", "x", "uid-1")


def pod(
    component: str = "trainer",
    *containers: Object,
    init: Object | None = None,
    conditions: list[Object] | None = None,
    spec: Object | None = None,
) -> Object:
    metadata = {"name": f"x-{component}-0", "namespace": "rl", "uid": "pod", "labels": OWNER.labels(component)}
    status: Object = {"phase": "Pending", "containerStatuses": list(containers), "conditions": conditions or []}
    if init is not None:
        status["initContainerStatuses"] = [init]
    return {"kind": "Pod", "metadata": metadata, "spec": spec or {}, "status": status}


def waiting(reason: str, message: str = "", name: str = "nexrl", /, **last: Any) -> Object:
    ended = {"lastState": {"terminated": last}} if last else {}
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}, **ended}


def ended(name: str, code: int, message: str = "") -> Object:
    return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error", "message": message}}}


def running(name: str, seconds: float, *, is_started: bool) -> Object:
    state = {"running": {"startedAt": rfc3339(NOW - seconds)}}
    return {"name": name, "state": state, "started": is_started, "ready": is_started}


def again(name: str, seconds: float, **last: Any) -> Object:
    return {**running(name, seconds, is_started=False), "lastState": {"terminated": last}}


def warning(reason: str, message: str, ago: float = 5) -> Object:
    return {"metadata": {"name": "e"}, "reason": reason, "message": message, "lastTimestamp": rfc3339(NOW - ago)}


def observed(*pods: Object, warnings: list[Object] | None = None, children: list[Object] | None = None) -> Observed:
    uid = children[0]["metadata"]["uid"] if children else "pod"
    return Observed({"metadata": {}}, children or [], pods, None, NOW, warnings={uid: warnings or []})


CREATING = waiting("ContainerCreating")
LIMITED = {"containers": [{"name": "nexrl", "resources": {"limits": {"memory": "1Gi"}}}]}
NO_CLAIM = [{"type": "PodScheduled", "status": "False", "message": 'persistentvolumeclaim "data" not found'}]


@pytest.mark.parametrize(
    ("item", "reason", "parts"),
    [
        pytest.param(
            pod(conditions=NO_CLAIM),
            "Unschedulable",
            ["create the PersistentVolumeClaim data in the namespace rl, or correct spec.trainer.template"],
            id="no claim",
        ),
        pytest.param(
            pod("rollout", waiting("CreateContainerConfigError", 'secret "keys" not found')),
            "CreateContainerConfigError",
            ["pod x-rollout-0", "create the Secret keys in the namespace rl, or correct spec.rollout.template"],
            id="no secret for a variable",
        ),
        pytest.param(
            pod("trajectory-pool", waiting("CreateContainerConfigError", 'secret "x-redis" not found')),
            "CreateContainerConfigError",
            ["the operator creates the Secret x-redis within a minute"],
            id="own secret",
        ),
        pytest.param(
            pod("inference", waiting("ImagePullBackOff", 'Back-off pulling image "typo:1"')),
            "ImagePullBackOff",
            ['cannot pull its image: Back-off pulling image "typo:1"', "correct the image in spec.inference.template"],
            id="image",
        ),
        pytest.param(
            pod("rollout", waiting("CrashLoopBackOff", "back-off", exitCode=3, message="mine.py, line 4: KeyError")),
            "CrashLoopBackOff",
            ["pod x-rollout-0 keeps ending, the last time with exit code 3: mine.py, line 4: KeyError"],
            id="exits at import",
        ),
        pytest.param(
            pod("rollout", waiting("CrashLoopBackOff", exitCode=42, message="import torch\nhalf of a line")),
            "CrashLoopBackOff",
            [
                "with exit code 42, which is none of NexRL: your code or a library ended the process: half of a line\n"
                "import torch\nhalf of a line"
            ],
            id="exits on its own",
        ),
        pytest.param(
            pod("rollout", waiting("CrashLoopBackOff", exitCode=134, message="Failed to start a thread")),
            "CrashLoopBackOff",
            ["134; a library aborted, perhaps because no more processes were allowed (podPidsLimit): Failed to start"],
            id="forks without end",
        ),
        pytest.param(
            pod("rollout", again("nexrl", 2, exitCode=3, message="mine.py, line 4: KeyError")),
            "CrashLoopBackOff",
            ["keeps ending, the last time with exit code 3: mine.py, line 4: KeyError"],
            id="runs between two ends",
        ),
        pytest.param(
            pod(
                "trainer",
                {**again("fetch", START_SECONDS - 1, exitCode=7, message="no such bucket"), "started": True},
                running("nexrl", 100, is_started=True),
            ),
            "CrashLoopBackOff",
            ["container fetch of pod x-trainer-0 keeps ending", "exit code 7", "no such bucket"],
            id="sidecar without a startup probe runs between two ends",
        ),
        pytest.param(
            pod("rollout", waiting("CrashLoopBackOff", exitCode=128, reason="StartError", message='exec: "typo"')),
            "CrashLoopBackOff",
            ['exec: "typo"; correct the container nexrl in spec.rollout.template'],
            id="no such program",
        ),
        pytest.param(
            pod("rollout", waiting("CrashLoopBackOff", exitCode=137, reason="OOMKilled"), spec=LIMITED),
            "CrashLoopBackOff",
            ["than its limit of 1Gi", "raise spec.rollout.template.spec.containers[nexrl].resources.limits.memory"],
            id="memory",
        ),
        pytest.param(
            pod(
                "trainer",
                waiting("PodInitializing"),
                init=waiting("CrashLoopBackOff", "back-off 10s", "fetch", exitCode=7, message="no such bucket"),
            ),
            "CrashLoopBackOff",
            [
                "container fetch of pod x-trainer-0",
                "no such bucket",
                "correct the container fetch in spec.trainer.temp",
            ],
            id="init container that fails",
        ),
        pytest.param(
            pod("trainer", waiting("PodInitializing"), init=running("fetch", 3, is_started=True)),
            "InitContainerRunning",
            ["container fetch of pod x-trainer-0", "`kubectl logs x-trainer-0 --container=fetch`"],
            id="init container that waits",
        ),
        pytest.param(
            pod("trainer", running("nexrl", 100, is_started=True), ended("proxy", 1, "no certificate")),
            "ContainerFailed",
            ["container proxy of pod x-trainer-0 has ended with exit code 1", "no certificate"],
            id="sidecar",
        ),
        pytest.param(
            pod("rollout", {**running("nexrl", START_SECONDS, is_started=False), "started": True}),
            "NotStarted",
            ["pod x-rollout-0 runs since", "code that it imports does not end", "--container=nexrl"],
            id="loops at import",
        ),
    ],
)
def test_status_names_object_cause_and_remedy(item: Object, reason: str, parts: list[str]) -> None:
    found = find_trouble(observed(item))
    assert found is not None
    assert found.reason == reason
    assert [part for part in parts if part not in found.message] == [], found.message


def test_pool_that_waits_for_a_data_factory_is_named_with_the_factory_and_what_to_do() -> None:
    pool = pod("trajectory-pool", {**running("nexrl", START_SECONDS, is_started=True), "ready": False})
    spec = {"data": {"type": "python", "factory": "mine:tasks"}, "validation": {"data": {"type": "mock"}}}
    found = find_trouble(replace(observed(pool), resource={"metadata": {}, "spec": spec}))
    assert found is not None
    assert "spec.data.factory mine:tasks, which must return (correct it if it never does)" in found.message
    assert "--container=data-reader" in found.message
    plain = find_trouble(observed(pool))
    assert plain is not None
    assert "factory" not in plain.message


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            'MountVolume.SetUp failed for volume "v" : configmap "data" not found',
            "create the ConfigMap data in the namespace rl, or correct spec.trainer.template",
        ),
        (
            'MountVolume.SetUp failed for volume "tls" : secret "x-tls" not found',
            "the operator creates the Secret x-tls within a minute; with cert-manager, "
            "`kubectl describe certificate x-tls` says why it does not exist",
        ),
    ],
)
def test_volume_that_cannot_be_mounted_is_named_from_the_event(message: str, remedy: str) -> None:
    told = [warning("FailedMount", message), warning("FailedMount", "older", 60), warning("Unhealthy", "newer", 1)]
    found = find_trouble(observed(pod("trainer", CREATING), warnings=told))
    assert found is not None
    assert found.reason == "FailedMount"
    assert found.message.startswith(f"pod x-trainer-0: {message}; {remedy}")


def test_event_about_a_volume_that_was_mounted_since_is_no_news() -> None:
    told = [warning("FailedMount", 'secret "late" not found')]
    mounted = [{"type": "PodReadyToStartContainers", "status": "True"}]
    assert find_trouble(observed(pod("trainer", CREATING, conditions=mounted), warnings=told)) is None
    assert find_trouble(observed(pod("trainer", running("nexrl", 1, is_started=False)), warnings=told)) is None


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (
            "exceeded quota: gpus, requested: nvidia.com/gpu=8, limited: nvidia.com/gpu=4",
            "raise the ResourceQuota, or lower",
        ),
        ("failed quota: q: must specify limits.memory for: nexrl", "set what the quota asks for in"),
        ('violates PodSecurity "restricted:latest": privileged', "remove what it names from"),
    ],
)
@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_refusal_of_pods_is_told_in_full(kind: str, cause: str, remedy: str) -> None:
    message = f'pods "x-rollout-0" is forbidden: {cause}'
    metadata = {"name": "x-rollout", "uid": "set", "labels": OWNER.labels("rollout")}
    child = {"kind": kind, "metadata": metadata, "spec": {"replicas": 1, "template": {}}}
    if kind == "Deployment":
        child["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": message}]}
    told = [warning("FailedCreate", message)] if kind == "StatefulSet" else []
    found = find_trouble(observed(children=[child], warnings=told))
    assert found is not None
    assert found.reason == "FailedCreate"
    expected = f"{kind} x-rollout cannot create its pods: {message}; {remedy}"
    assert found.message.startswith(expected)
    assert found.message.endswith("spec.rollout.template")
    assert find_trouble(observed(pod("rollout"), children=[child], warnings=told)) is None


def test_a_container_that_ended_and_then_runs_on_or_has_done_its_work_is_not_named() -> None:
    probed = {"containers": [{"name": "nexrl", "startupProbe": {}, "readinessProbe": {}}]}
    answered = {**running("nexrl", 1, is_started=True), "lastState": {"terminated": {"exitCode": 3}}}
    assert find_trouble(observed(pod("rollout", answered, spec=probed))) is None
    importing = {**answered, "ready": False}  # its port is open, and code of the user may end it again
    assert find_trouble(observed(pod("rollout", importing, spec=probed))) is not None
    unstarted = {**importing, **again("nexrl", START_SECONDS, exitCode=3)}
    assert find_trouble(observed(pod("rollout", unstarted, spec=probed))) is not None


def test_a_container_that_ended_and_is_not_ready_for_long_is_named_with_its_end() -> None:
    probed = {"containers": [{"name": "nexrl", "startupProbe": {}, "readinessProbe": {}}]}
    slow = {**again("nexrl", START_SECONDS, exitCode=42, message="out of paper"), "started": True}
    found = find_trouble(observed(pod("rollout", slow, spec=probed)))
    assert found is not None
    assert found.reason == "NotStarted"
    assert "exit code 42" in found.message
    assert "out of paper; it runs again since" in found.message


def test_a_sidecar_that_ended_and_runs_on_is_not_named() -> None:
    probed = {"containers": [{"name": "nexrl", "startupProbe": {}, "readinessProbe": {}}]}
    answered = {**running("nexrl", 1, is_started=True), "lastState": {"terminated": {"exitCode": 3}}}
    sidecar = {**answered, "name": "proxy"}
    found = find_trouble(observed(pod("rollout", sidecar, spec=probed)))
    assert found is not None
    assert next_trouble_seconds(observed(pod("rollout", sidecar))) == START_SECONDS - 1
    longer = {**running("proxy", START_SECONDS, is_started=True), "lastState": sidecar["lastState"]}
    assert find_trouble(observed(pod("rollout", longer, spec=probed))) is None
    done = {**sidecar, "state": {"terminated": {"exitCode": 0}}, "started": False}
    assert find_trouble(observed(pod("rollout", running("nexrl", 1, is_started=True), init=done))) is None


def test_the_operator_looks_again_when_a_container_has_been_starting_for_too_long() -> None:
    assert next_trouble_seconds(observed(pod("rollout", running("nexrl", 5, is_started=False)))) == START_SECONDS - 5
    assert next_trouble_seconds(observed(pod("rollout", running("nexrl", 5, is_started=True)))) is None


def test_pod_that_fails_before_its_main_container_starts_tells_the_controller_why() -> None:
    failed = pod("trainer", waiting("PodInitializing"), init=ended("fetch", 7, "no such bucket"))
    failed["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "x-trainer-1"
    exit = observed(failed).job_exit({"metadata": {"name": "x-trainer-1", "uid": "job"}})
    assert exit.exit_code == 7
    assert exit.log_tail == (
        "container fetch of pod x-trainer-0 ended with exit code 7: no such bucket; correct it in spec.trainer.template"
    )
