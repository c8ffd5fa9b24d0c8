"""What people do to a running experiment, and to the release beside it."""

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import CommandError, Namespace, Object, condition, eventually, is_true
from tests.support.experiments import FOREVER, Running, applied, slow, sort_digits
from tests.support.patience import Patience


def test_scale_moves_the_rollouts(namespace: Namespace, running: Running) -> None:
    for replicas in (2, 1):
        namespace.kubectl("scale", f"experiment/{running.name}", f"--replicas={replicas}")

        def is_scaled(replicas: int = replicas) -> bool:
            return running.ready("rollout") == replicas == len(running.pods("rollout"))

        eventually(is_scaled, f"{replicas} rollouts")
    running.until_it_goes_on()
    running.count()


def test_suspended_experiment_has_no_pods_and_goes_on_where_it_was(namespace: Namespace, running: Running) -> None:
    _patch(namespace, running.name, '{"spec": {"suspend": true}}')
    running.until("Suspended")
    assert not running.pods()
    before = running.step
    _patch(namespace, running.name, '{"spec": {"suspend": false}}')
    running.until_step(before + 1)
    assert not is_true(running.get(), "Suspended")
    running.count()


def test_experiments_train_side_by_side_and_a_deadline_ends_one(namespace: Namespace, running: Running) -> None:
    with applied(namespace, slow("late", trainer__steps=FOREVER)) as late:
        late.until_step(2)
        running.until_it_goes_on()
        _patch(namespace, "late", '{"spec": {"activeDeadlineSeconds": 1}}')
        late.until("Failed")
        eventually(lambda: "audit" in late.get()["status"], "the ledger is counted")
        ended = late.get()
        assert condition(ended, "Failed")["reason"] == "DeadlineExceeded"
        assert ended["status"]["audit"]["findings"] == 0
        eventually(lambda: not late.pods(), "no pod is left")
    running.until_it_goes_on()
    running.count()


def test_deleted_experiment_leaves_nothing_and_no_pod_has_to_be_killed(namespace: Namespace) -> None:
    """Not even one that has just begun to start."""
    mine = "nexrl.dev/experiment=deleted"
    with applied(namespace, slow("deleted", trainer__steps=FOREVER)) as deleted:
        eventually(lambda: len(deleted.pods()) == 6, "all its pods")
        graces = {pod["spec"]["terminationGracePeriodSeconds"] for pod in namespace.list("pods", mine)}
        namespace.kubectl("delete", "experiment", "deleted")
        eventually(
            lambda: not namespace.list("pods", mine), "its pods have ended", Patience(min(graces) - 10.0, max_scale=1.0)
        )
    owned = namespace.list("all,configmaps,secrets,pvc,networkpolicies", mine)
    assert [item["metadata"]["name"] for item in owned] == []


def test_upgrade_of_the_release_disturbs_no_experiment(namespace: Namespace, running: Running) -> None:
    before, restarts = running.pods(), running.get()["status"].get("restarts", 0)
    namespace.install(RELEASE, "operator.logLevel=DEBUG")
    running.until_it_goes_on()
    assert running.pods() == before
    assert running.get()["status"].get("restarts", 0) == restarts
    running.count()


def test_second_release_waits_for_the_first(namespace: Namespace, running: Running) -> None:
    namespace.install("second", "redis.enabled=false", "externalRedis.url=redis://elsewhere.example:6379")
    try:
        lease = namespace.get("lease", "nexrl-operator")
        assert lease["spec"]["holderIdentity"].startswith(f"{RELEASE}-operator")
        running.until_it_goes_on()
    finally:
        namespace.uninstall("second")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer__steps": -1}, "spec.trainer.steps"),
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
        found = eventually(lambda: condition(running.get(), "Accepted"), "Accepted")
        assert found["status"] == "False"
        assert "image" in found["message"]


def test_experiment_that_fits_on_no_node_says_so(namespace: Namespace) -> None:
    template = {"spec": {"containers": [{"name": "nexrl", "resources": {"requests": {"cpu": "1000"}}}]}}
    with applied(namespace, sort_digits("giant", trainer__template=template)) as running:
        eventually(lambda: _ready(running).get("reason") == "Unschedulable", "Unschedulable")
        assert "trainer" in _ready(running)["message"]


def _ready(running: Running) -> Object:
    return condition(running.get(), "Ready")


def _patch(namespace: Namespace, name: str, patch: str) -> None:
    namespace.kubectl("patch", "experiment", name, "--type=merge", f"--patch={patch}")
