"""Experiments that cannot run, all at once. Each status says why and what to do, and so does the end of each."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import Namespace, Object, condition, eventually
from tests.support.experiments import Running, applied, sort_digits
from tests.support.patience import PatienceError

SCHEDULED_BY_NOBODY: Object = {"spec": {"schedulerName": "nobody"}}
"""A pod that costs nothing: no trouble of its own, and no work for the node."""
SMALL: Object = {"name": "nexrl", "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}}}
COMPONENTS = ("controller", "trajectoryPool", "weightSync", "trainer", "inference", "rollout")
MINE = "\n\ndef reward(task, text, is_finished):\n    return 1.0\n"
TEMPLATE = "spec.rollout.template"


@dataclass(frozen=True)
class Fault:
    """What is wrong with an experiment, and what its status must say."""

    says: tuple[str, ...]
    reasons: tuple[str, ...] = ("CrashLoopBackOff",)
    container: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the component's container."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the component's pod."""
    code: str = ""
    """Runs when the rollout imports the reward."""
    component: str = "rollout"
    real: tuple[str, ...] = ()
    """Other components that run."""


def _mount(kind: str, told: str, key: str) -> Fault:
    says = (f'{kind.lower()} "typo" not found', f"create the {told} typo in the namespace ", TEMPLATE)
    reason = "Unschedulable" if kind == "persistentVolumeClaim" else "FailedMount"
    mounts = {"volumeMounts": [{"name": "mine", "mountPath": "/mine"}]}
    return Fault(says, (reason,), mounts, {"volumes": [{"name": "mine", kind: {key: "typo"}}]})


def _shell(name: str, script: str) -> Object:
    allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"name": name, "image": "IMAGE", "command": ["sh", "-c", script], "securityContext": allowed}


SCARCE = "nexrl.dev/scarce"
"""A resource of which the namespace's quota is 0. No other pod requests it."""
QUOTA: Object = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "scarce"},
    "spec": {"hard": {f"requests.{SCARCE}": "0"}},
}
IDLE = {"command": ["sh", "-c", "sleep 600"]}
FAILS = _shell("fetch", "echo no such bucket; exit 7")
FAULTS: dict[str, Fault] = {
    "no-secret": _mount("secret", "Secret", "secretName"),
    "no-configmap": _mount("configMap", "ConfigMap", "name"),
    "no-claim": _mount("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
    "no-variable": Fault(
        ('secret "typo" not found', "create the Secret typo in the namespace ", TEMPLATE),
        ("CreateContainerConfigError",),
        {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "typo", "key": "key"}}}]},
    ),
    "wrong-image": Fault(
        ("localhost/typo:1", f"correct the image in {TEMPLATE}"),
        ("ErrImagePull", "ImagePullBackOff"),
        {"image": "localhost/typo:1"},
    ),
    "wrong-program": Fault(("typo", "not found"), ("CrashLoopBackOff", "RunContainerError"), {"command": ["typo"]}),
    "wrong-init": Fault(
        ("container fetch", "exit code 7", "no such bucket", f"correct the container fetch in {TEMPLATE}"),
        pod={"initContainers": [FAILS]},
    ),
    "endless-init": Fault(
        ("container fetch", "is an init container that has not ended", "--container=fetch"),
        ("InitContainerRunning",),
        pod={"initContainers": [_shell("fetch", "sleep 600")]},
    ),
    "wrong-sidecar": Fault(
        ("container fetch", "exit code 7", "no such bucket", f"correct the container fetch in {TEMPLATE}"),
        container=IDLE,
        pod={"containers": [FAILS]},
    ),
    "wrong-trainer-sidecar": Fault(
        ("container fetch", "exit code 7", "no such bucket", "correct the container fetch in spec.trainer.template"),
        ("ContainerFailed",),
        IDLE,
        {"containers": [FAILS]},
        component="trainer",
    ),
    "wrong-trainer-init": Fault(
        ("trainer ended with exit code 7", "no such bucket", "correct it in spec.trainer.template"),
        ("ComponentFailed",),
        pod={"initContainers": [FAILS]},
        component="trainer",
        real=("controller",),
    ),
    "not-allowed": Fault(
        ("StatefulSet not-allowed-rollout cannot create its pods", "violates PodSecurity", f"from {TEMPLATE}"),
        ("FailedCreate",),
        {"securityContext": {"allowPrivilegeEscalation": True}},
    ),
    "over-quota": Fault(
        (
            "StatefulSet over-quota-rollout cannot create its pods",
            "exceeded quota: scarce",
            f"raise the ResourceQuota, or lower the requests in {TEMPLATE}",
        ),
        ("FailedCreate",),
        {"resources": {"requests": {SCARCE: "1"}, "limits": {SCARCE: "1"}}},
    ),
    "raises": Fault(("mine.py:1", "ValueError", "no judge"), code="raise ValueError('no judge')"),
    "exits": Fault(("exit code 42", "ended the process"), code="import os; os._exit(42)"),
    "loops": Fault(
        ("is not ready", "code that it imports does not end", "kubectl logs loops-rollout-0"),
        ("NotStarted",),
        code="while 1: 7",
    ),
    "eats": Fault(
        ("exit code 137", "more memory than its limit of 200Mi", f"{TEMPLATE}.spec.containers[nexrl].resources"),
        container={"resources": {**SMALL["resources"], "limits": {"memory": "200Mi"}}},
        code="found = []\nwhile 1: found.append(b'x' * 10**7)",
    ),
    "forks": Fault(
        ("exit code 134", "perhaps because no more processes were allowed (podPidsLimit)"),
        # What a pod meets at the kubelet's podPidsLimit. gRPC aborts when it can start no thread.
        code="import subprocess, resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
        "while True: subprocess.Popen(['sleep', '600'])",
    ),
    "talks": Fault(
        ("exit code 42", "out of paper"),
        code="import os\nprint('x' * 30_000_000)\nprint('out of paper', flush=True); os._exit(42)",
    ),
}


def _experiment(name: str, fault: Fault, image: str) -> Object:
    changes: Object = {f"{each}__template": SCHEDULED_BY_NOBODY for each in COMPONENTS if each not in fault.real}
    main = {**SMALL, **fault.container}
    others = fault.pod.get("containers", [])
    pod = {**fault.pod, "containers": [main, *others]}
    changes[f"{fault.component}__template"] = {"spec": json.loads(json.dumps(pod).replace("IMAGE", image))}
    item = sort_digits(name, **changes, failurePolicy__maxRestarts=0, rollout__reward="mine:reward")
    item["spec"]["code"]["mine.py"] = fault.code + MINE
    return item


@pytest.fixture(scope="module")
def hostile(namespace: Namespace) -> Iterator[dict[str, Running]]:
    """All experiments, applied at once."""
    operator = namespace.get("deployment", f"{RELEASE}-operator")["spec"]["template"]["spec"]
    image = operator["containers"][0]["image"]
    namespace.apply(QUOTA)
    eventually(lambda: namespace.get("resourcequota", "scarce").get("status"), "the quota is counted")
    with ExitStack() as stack:
        items = {name: _experiment(name, fault, image) for name, fault in FAULTS.items()}
        yield {name: stack.enter_context(applied(namespace, item)) for name, item in items.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_status_of_what_cannot_run_says_why_and_what_to_do_until_its_end(
    hostile: dict[str, Running], namespace: Namespace, name: str
) -> None:
    running, fault = hostile[name], FAULTS[name]

    def is_told() -> bool:
        ready = condition(running.get(), "Ready")
        return ready.get("reason") in fault.reasons and not _missing(fault, ready["message"])

    try:
        eventually(is_told, "its cause")
    except PatienceError:
        pytest.fail(f"{condition(running.get(), 'Ready')} lacks {_missing(fault, _ready_message(running))}")
    if fault.reasons != ("ComponentFailed",):
        namespace.kubectl(
            *("patch", "experiment", name, "--type=merge"), '--patch={"spec": {"startupDeadlineSeconds": 1}}'
        )
    failed = condition(running.until("Failed"), "Failed")
    assert _missing(fault, failed["message"]) == [], failed["message"]
    assert f"nexrl resume {name}" in failed["message"]
    # kubectl shows the first line of a message.
    shown = namespace.kubectl("get", "experiment", name, "--output", "wide")
    assert _missing(fault, shown) == [], shown


def _ready_message(running: Running) -> str:
    return str(condition(running.get(), "Ready").get("message", ""))


def _missing(fault: Fault, text: str) -> list[str]:
    return [part for part in fault.says if part not in text]
