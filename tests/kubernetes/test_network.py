"""The network matrix of docs/how-to/kubernetes.md, tried pod by pod."""

import json
from collections.abc import Iterator

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import Namespace, eventually
from tests.support.experiments import Running, applied, sort_digits

pytestmark = pytest.mark.timeout(900)

CONNECT = """
import json, socket, sys
answers = {}
for target in sys.argv[1:]:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        answers[target] = True
    except OSError:
        answers[target] = False
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def running(namespace: Namespace) -> Iterator[Running]:
    """An experiment that goes on for as long as these tests need."""
    with applied(namespace, sort_digits("guarded", trainer__steps=100_000)) as found:
        found.until_step(1)
        yield found


def test_stranger_reaches_no_port_of_an_experiment_and_no_redis(namespace: Namespace, running: Running) -> None:
    targets = [
        f"{RELEASE}-redis:6379",
        f"{RELEASE}-operator:9090",
        *(f"{running.name}-{component}:50051" for component in ("controller", "trajectory-pool", "weight-sync")),
        *(f"{running.name}-{component}:50051" for component in ("trainer", "rollout", "inference")),
        f"{running.name}-inference:8000",
        f"{running.name}-inference:9090",
    ]
    reached = _reached(namespace, "stranger", {}, targets)
    assert reached == dict.fromkeys(targets, False)


def test_pods_reach_what_the_matrix_says(namespace: Namespace, running: Running) -> None:
    own = {"nexrl.dev/experiment": running.name, "app.kubernetes.io/component": "rollout"}
    reached = _reached(namespace, "friend", own, [f"{running.name}-trajectory-pool:50051", f"{RELEASE}-redis:6379"])
    assert reached == {f"{running.name}-trajectory-pool:50051": True, f"{RELEASE}-redis:6379": False}


def test_pod_of_another_experiment_is_a_stranger(namespace: Namespace, running: Running) -> None:
    target = f"{running.name}-trajectory-pool:50051"
    assert _reached(namespace, "neighbour", {"nexrl.dev/experiment": "another"}, [target]) == {target: False}


def _reached(namespace: Namespace, name: str, labels: dict[str, str], targets: list[str]) -> dict[str, bool]:
    """Which addresses a pod with these labels can connect to."""
    operator = namespace.get("deployment", f"{RELEASE}-operator")["spec"]["template"]["spec"]
    container = operator["containers"][0]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": operator["securityContext"],
            "containers": [
                {
                    "name": "connect",
                    "image": container["image"],
                    "imagePullPolicy": container["imagePullPolicy"],
                    # A policy may take a moment to be enforced for a new pod.
                    "command": ["python", "-c", f"import time; time.sleep(5)\n{CONNECT}", *targets],
                    "securityContext": container["securityContext"],
                }
            ],
        },
    }
    namespace.apply(pod)
    try:
        eventually(lambda: namespace.get("pod", name)["status"]["phase"] == "Succeeded", f"pod {name} ended")
        answers: dict[str, bool] = json.loads(namespace.kubectl("logs", name))
        return answers
    finally:
        namespace.kubectl("delete", "pod", name, "--grace-period=0", "--force")
