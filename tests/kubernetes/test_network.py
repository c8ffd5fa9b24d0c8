"""The network matrix of docs/how-to/kubernetes.md, tried pod by pod."""

import json

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import Namespace, eventually
from tests.support.experiments import Running
from tests.support.python_pods import python_pod

CONNECT = """
import json, socket, sys, time
from concurrent.futures import ThreadPoolExecutor

def is_open(target):
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True

expected, deadline = json.loads(sys.argv[1]), time.monotonic() + float(sys.argv[2])
with ThreadPoolExecutor(len(expected)) as pool:
    while True:
        answers = dict(zip(expected, pool.map(is_open, expected)))
        if time.monotonic() > deadline or (answers == expected and any(answers.values())):
            break
        time.sleep(0.5)
print(json.dumps(answers))
"""
ENFORCED_SECONDS = 10.0
"""Time for network policies to apply to a new pod. A pod that may reach nothing must stay cut off for as long."""


def test_stranger_reaches_no_port_of_an_experiment_and_no_redis(namespace: Namespace, running: Running) -> None:
    closed = dict.fromkeys(
        [f"{RELEASE}-redis:6379", f"{RELEASE}-operator:9090", *namespace.addresses(running.selector)], False
    )
    assert _reached(namespace, "stranger", {}, closed) == closed


def test_pods_reach_what_the_matrix_says_and_no_more(namespace: Namespace, running: Running) -> None:
    """The pod elsewhere listens to anybody: it is the caller's own policy that keeps it from calling."""
    own, redis = dict.fromkeys(namespace.addresses(running.selector), True), f"{RELEASE}-redis:6379"
    namespace.apply(python_pod(namespace, RELEASE, "elsewhere", {}, "-m", "http.server", "8080"))
    try:
        eventually(lambda: "podIP" in namespace.get("pod", "elsewhere")["status"], "pod elsewhere is there")
        elsewhere = f"{namespace.get('pod', 'elsewhere')['status']['podIP']}:8080"
        for name, labels, matrix in (
            ("stranger", {}, {elsewhere: True}),
            ("rollout", _labels(running, "rollout"), {**own, redis: False, elsewhere: False}),
            ("weight-sync", _labels(running, "weight-sync"), {redis: True, elsewhere: False}),
        ):
            assert _reached(namespace, name, labels, matrix) == matrix
    finally:
        _delete(namespace, "elsewhere")


def test_pod_of_another_experiment_is_a_stranger(namespace: Namespace, running: Running) -> None:
    closed = dict.fromkeys(namespace.addresses(running.selector), False)
    assert _reached(namespace, "neighbour", {"nexrl.dev/experiment": "another"}, closed) == closed


def _labels(running: Running, component: str) -> dict[str, str]:
    return {"nexrl.dev/experiment": running.name, "app.kubernetes.io/component": component}


def _reached(namespace: Namespace, name: str, labels: dict[str, str], expected: dict[str, bool]) -> dict[str, bool]:
    """Which addresses a pod with these labels can connect to, once policies know it."""
    arguments = ("-c", CONNECT, json.dumps(expected), str(ENFORCED_SECONDS))
    namespace.apply(python_pod(namespace, RELEASE, name, labels, *arguments))
    try:
        eventually(lambda: namespace.get("pod", name)["status"]["phase"] == "Succeeded", f"pod {name} ended")
        answers: dict[str, bool] = json.loads(namespace.kubectl("logs", name))
        return answers
    finally:
        _delete(namespace, name)


def _delete(namespace: Namespace, name: str) -> None:
    namespace.kubectl("delete", "pod", name, "--grace-period=0", "--force")
