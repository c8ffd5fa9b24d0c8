"""Pods that are killed and evicted in the middle of a run."""

import json
import re
from collections.abc import Collection
from functools import partial

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import Namespace, eventually
from tests.support.experiments import Running, applied, assert_balanced, slow

PAIRS = (("controller", "weight-sync"), ("trajectory-pool", "inference"), ("trainer", "rollout"))
"""Components that do not call each other, so that the callers of each can survive its loss."""
BEGINS = r" begins at step (\d+)"


@pytest.mark.soak
def test_killed_pods_come_back_and_nothing_is_lost(namespace: Namespace) -> None:
    with applied(namespace, slow("kills", trainer__steps=45, checkpoint__everySteps=10)) as running:
        running.until_step(2)
        for pair in PAIRS:
            _kill(running, pair)
        ended = running.until("Complete")
        assert ended["status"]["progress"]["step"] == 45
        assert_balanced(ended)


def test_redis_operator_and_then_a_whole_node_are_lost_and_no_sample_is(namespace: Namespace) -> None:
    with applied(namespace, slow("lost-node", trainer__steps=16, checkpoint__everySteps=4)) as running:
        running.until_step(2)
        namespace.kubectl("delete", "pod", f"{RELEASE}-redis-0", "--force", "--grace-period=0")
        namespace.kubectl("delete", "pod", "--selector", "app.kubernetes.io/component=operator", "--force")
        running.until_it_goes_on()
        namespace.kubectl("delete", "pod", *running.pods().values(), "--force", "--grace-period=0")  # as a lost node
        ended = running.until("Complete")
        assert ended["status"]["progress"]["step"] == 16
        assert_balanced(ended)


def test_evicted_trainer_goes_on_where_it_was(namespace: Namespace, running: Running) -> None:
    """In this run a trainer writes a checkpoint only when it is stopped."""
    before = running.get()["status"]
    ((uid, trainer),) = running.pods("trainer").items()
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": trainer}}
    path = f"/api/v1/namespaces/{namespace.name}/pods/{trainer}/eviction"
    namespace.kubectl("create", "--raw", path, "--filename", "-", text=json.dumps(eviction))
    eventually(lambda: running.has_other_pods("trainer", [uid]), "another trainer")
    (successor,) = running.pods("trainer").values()
    (begins,) = eventually(lambda: re.findall(BEGINS, namespace.kubectl("logs", successor)), "it begins")
    assert int(begins) >= before["progress"]["step"] > 0
    running.until_step(int(begins) + 1)
    after = running.get()["status"]
    assert after["trainerAttempt"] == before["trainerAttempt"] + 1
    assert after.get("restarts", 0) == before.get("restarts", 0)  # an eviction is nobody's failure
    running.count()


def _kill(running: Running, components: Collection[str]) -> None:
    killed = {component: running.pods(component) for component in components}
    names = [name for pods in killed.values() for name in pods.values()]
    assert names, "it has ended before all were killed"
    running.namespace.kubectl("delete", "pod", *names, "--force", "--grace-period=0")
    for component, pods in killed.items():
        eventually(partial(running.has_other_pods, component, pods), f"{component} is back")


@pytest.mark.guide("Q20")
@pytest.mark.soak
def test_a_trainer_of_two_pods_of_which_one_is_killed_restarts_as_a_whole_and_completes(namespace: Namespace) -> None:
    item = slow("two-pods", trainer__steps=40, trainer__replicas=2, checkpoint__everySteps=5)
    with applied(namespace, item) as running:
        running.until_step(7)
        assert running.get()["status"]["trainer"] == {"replicas": 2, "readyReplicas": 2}
        before = running.pods("trainer")
        [killed] = [name for name in before.values() if "-trainer-1-1-" in name]
        namespace.kubectl("delete", "pod", killed, "--grace-period=0", "--force")
        eventually(lambda: running.has_other_pods("trainer", before), "another trainer")
        assert len(running.pods("trainer")) == 2
        assert_balanced(running.until("Complete"))
