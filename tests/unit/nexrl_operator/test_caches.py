"""The objects of each experiment, as the operator's caches have them."""

from typing import Any

from nexrl_operator.caches import Caches
from nexrl_operator.objects import EXPERIMENT_LABEL, MANAGED_BY_LABEL, OPERATOR
from nexrl_operator.observed import Observed
from tests.support.kubelet import operator_settings


def pod(experiment: str, version: str) -> dict[str, Any]:
    labels = {EXPERIMENT_LABEL: experiment, MANAGED_BY_LABEL: OPERATOR}
    metadata = {"name": "one", "namespace": "rl", "uid": "1", "resourceVersion": version, "labels": labels}
    return {"kind": "Pod", "metadata": metadata}


def observed(caches: Caches, experiment: str) -> Observed:
    return caches.observe(("rl", experiment), {"metadata": {"uid": "2"}}, None)


def test_a_pod_that_somebody_labels_otherwise_is_of_the_other_experiment_only() -> None:
    caches = Caches(operator_settings(), lambda _: None)
    caches.note(pod("first", "1"))
    assert len(observed(caches, "first").pods) == 1
    caches.note(pod("second", "2"))
    assert observed(caches, "first").pods == []
    assert len(observed(caches, "second").pods) == 1
