"""Evictions of an experiment's pods, as draining a node makes them. The API server decides by the budgets."""

import pytest

from nexrl.k8s.api import DISRUPTION_BUDGET, POD, Api, ApiError
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import operating, run
from tests.support.patience import eventually

MERGE = "application/merge-patch+json"


async def test_a_drain_waits_for_the_ready_replica_and_never_for_one_that_is_not(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    document = experiment_object("drained", namespace, rollout={"maxNewTokens": 8, "replicas": 2})
    services = Services()
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        await _count(api, namespace, "drained-rollout", healthy=0, wanted=1)
        with pytest.raises(ApiError) as caught:
            await _evict(api, namespace, "drained-rollout-0")
        assert caught.value.code == 429
        unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
        path = POD.path(namespace, "drained-rollout-1", "status")
        uid = (await api.request("PATCH", path, body=unready, content_type=MERGE))["metadata"]["uid"]
        await _evict(api, namespace, "drained-rollout-1")

        async def is_replaced() -> bool:
            found = await api.get(POD, namespace, "drained-rollout-1")
            return found is not None and found["metadata"]["uid"] != uid

        await eventually(is_replaced)


async def _count(api: Api, namespace: str, name: str, *, healthy: int, wanted: int) -> None:
    """Write the status of a budget, in place of Kubernetes' controller: no disruption is allowed."""
    budget = await api.get(DISRUPTION_BUDGET, namespace, name)
    assert budget is not None
    counts = {"currentHealthy": healthy, "desiredHealthy": wanted, "disruptionsAllowed": 0, "expectedPods": wanted + 1}
    status = {"status": {**counts, "observedGeneration": budget["metadata"]["generation"]}}
    await api.request("PATCH", DISRUPTION_BUDGET.path(namespace, name, "status"), body=status, content_type=MERGE)


async def _evict(api: Api, namespace: str, pod_name: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod_name, "namespace": namespace}}
    await api.request("POST", POD.path(namespace, pod_name, "eviction"), body=body)
