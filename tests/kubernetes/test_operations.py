"""What people do to a running experiment, and what clusters do to it."""

import json

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import (
    RESTRICTED,
    CommandError,
    Namespace,
    condition,
    eventually,
    fresh_namespace,
    is_true,
)
from tests.support.experiments import applied, assert_balanced, sort_digits

pytestmark = pytest.mark.timeout(1200)

COMPONENTS = ("controller", "trajectory-pool", "weight-sync", "inference", "trainer", "rollout")


def test_killed_pods_come_back_and_nothing_is_lost(namespace: Namespace) -> None:
    item = sort_digits("kills", trainer__steps=200, checkpoint__everySteps=20)
    with applied(namespace, item) as running:
        for number, component in enumerate(COMPONENTS):
            running.until_step(10 + 15 * number)
            for pod in running.pods(component):
                namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
        namespace.kubectl("delete", "pod", f"{RELEASE}-redis-0", "--force", "--grace-period=0")
        namespace.kubectl("rollout", "restart", f"deployment/{RELEASE}-operator")
        assert_balanced(running.until("Complete"))


def test_evicted_trainer_goes_on_from_a_checkpoint(namespace: Namespace) -> None:
    item = sort_digits("eviction", trainer__steps=60, checkpoint__everySteps=50)
    with applied(namespace, item) as running:
        running.until_step(20)
        (trainer,) = running.pods("trainer")
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": trainer}}
        path = f"/api/v1/namespaces/{namespace.name}/pods/{trainer}/eviction"
        namespace.kubectl("create", "--raw", path, "--filename", "-", text=json.dumps(eviction))
        ended = running.until("Complete")
        assert ended["status"]["trainerAttempt"] > 0
        assert_balanced(ended)


def test_suspended_experiment_has_no_pods_and_goes_on(namespace: Namespace) -> None:
    with applied(namespace, sort_digits("pause", trainer__steps=60)) as running:
        running.until_step(10)
        _patch(namespace, "pause", '{"spec": {"suspend": true}}')
        running.until("Suspended", 180.0)
        assert not running.pods()
        _patch(namespace, "pause", '{"spec": {"suspend": false}}')
        ended = running.until("Complete")
        assert not is_true(ended, "Suspended")
        assert_balanced(ended)


def test_scale_moves_the_rollouts(namespace: Namespace) -> None:
    with applied(namespace, sort_digits("scaled", trainer__steps=200)) as running:
        running.until_step(5)
        for replicas in (2, 1):
            namespace.kubectl("scale", "experiment/scaled", f"--replicas={replicas}")
            eventually(lambda: len(running.pods("rollout")) == replicas, f"{replicas} rollouts")  # noqa: B023
        assert_balanced(running.until("Complete"))


def test_two_experiments_run_at_once(namespace: Namespace) -> None:
    first, second = (sort_digits(name, trainer__steps=20) for name in ("first", "second"))
    with applied(namespace, first) as one, applied(namespace, second) as other:
        assert_balanced(one.until("Complete"))
        assert_balanced(other.until("Complete"))


def test_deleted_experiment_leaves_nothing(namespace: Namespace) -> None:
    with applied(namespace, sort_digits("deleted")) as running:
        running.until_step(2)
    owned = namespace.list("all,configmaps,secrets,pvc,networkpolicies", "nexrl.dev/experiment=deleted")
    assert [item["metadata"]["name"] for item in owned] == []


def test_upgrade_of_the_release_disturbs_no_experiment(namespace: Namespace) -> None:
    with applied(namespace, sort_digits("upgraded", trainer__steps=80)) as running:
        running.until_step(10)
        before = set(running.pods())
        namespace.install(RELEASE, "operator.logLevel=DEBUG")
        assert set(running.pods()) == before
        ended = running.until("Complete")
        assert ended["status"].get("restarts", 0) == 0
        assert_balanced(ended)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer__steps": 0}, "spec.trainer.steps"),
        ({"weightSync__mode": "sometimes"}, "spec.weightSync.mode"),
        ({"rollout__replicas": -1}, "spec.rollout.replicas"),
    ],
)
def test_wrong_experiment_is_refused_with_field_and_reason(
    namespace: Namespace, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(CommandError, match=field):
        namespace.apply(sort_digits("wrong", **changes))


def test_impossible_experiment_says_so(namespace: Namespace) -> None:
    template = {"spec": {"containers": [{"name": "nexrl", "image": 7}]}}
    with applied(namespace, sort_digits("impossible", trainer__template=template)) as running:
        found = eventually(lambda: condition(running.get(), "Accepted"), "Accepted", 30.0)
        assert found["status"] == "False"
        assert "image" in found["message"]


def test_second_release_waits_for_the_first(namespace: Namespace) -> None:
    namespace.install("second")
    try:
        lease = namespace.get("lease", "nexrl-operator")
        assert lease["spec"]["holderIdentity"].startswith(f"{RELEASE}-operator")
    finally:
        namespace.uninstall("second")


def test_uninstalled_release_leaves_nothing_but_the_definition() -> None:
    with fresh_namespace(RESTRICTED) as other:
        other.install("gone")
        other.test("gone")
        other.uninstall("gone")
        kinds = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,pvc,leases"
        eventually(lambda: not _ours(other, kinds), "nothing of the release is left")
        other.kubectl("get", "crd", "experiments.nexrl.dev")


def _ours(namespace: Namespace, kinds: str) -> list[str]:
    found = namespace.list(kinds)
    return [name for item in found if "gone" in (name := item["metadata"]["name"])]


def _patch(namespace: Namespace, name: str, patch: str) -> None:
    namespace.kubectl("patch", "experiment", name, "--type=merge", f"--patch={patch}")
