"""Pods that are killed and evicted in the middle of a run."""

import json

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import Namespace, eventually
from tests.support.experiments import Running, applied, assert_balanced, slow

pytestmark = pytest.mark.timeout(1200)

COMPONENTS = ("controller", "trajectory-pool", "weight-sync", "inference", "trainer", "rollout")
BACK_SECONDS = 180.0


def test_killed_pods_come_back_and_nothing_is_lost(namespace: Namespace) -> None:
    with applied(namespace, slow("kills", trainer__steps=60, checkpoint__everySteps=10)) as running:
        running.until_step(2)
        for component in COMPONENTS:
            _kill(running, component)
        namespace.kubectl("delete", "pod", f"{RELEASE}-redis-0", "--force", "--grace-period=0")
        namespace.kubectl("delete", "pod", "--selector", "app.kubernetes.io/component=operator", "--force")
        running.until_it_goes_on()
        namespace.kubectl("delete", "pod", *running.pods().values(), "--force", "--grace-period=0")  # as a lost node
        ended = running.until("Complete")
        assert ended["status"]["progress"]["step"] == 60
        assert_balanced(ended)


def test_evicted_trainer_goes_on_where_it_was(namespace: Namespace) -> None:
    """It has no checkpoint but the one that it writes when it is told to go."""
    with applied(namespace, slow("eviction", trainer__steps=40, checkpoint__everySteps=1000)) as running:
        running.until_step(5)
        ((uid, trainer),) = running.pods("trainer").items()
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": trainer}}
        path = f"/api/v1/namespaces/{namespace.name}/pods/{trainer}/eviction"
        namespace.kubectl("create", "--raw", path, "--filename", "-", text=json.dumps(eviction))
        eventually(lambda: running.has_other_pods("trainer", [uid]), "another trainer", BACK_SECONDS)
        (successor,) = running.pods("trainer").values()
        said = namespace.kubectl("logs", successor)
        assert " begins at step " in said
        assert " begins at step 0" not in said
        ended = running.until("Complete")
        assert ended["status"]["trainerAttempt"] == 2
        assert ended["status"]["restarts"] == 0  # an eviction is nobody's failure
        assert_balanced(ended)


def _kill(running: Running, component: str) -> None:
    killed = running.pods(component)
    running.namespace.kubectl("delete", "pod", *killed.values(), "--force", "--grace-period=0")
    eventually(lambda: running.has_other_pods(component, killed), f"{component} is back", BACK_SECONDS)
