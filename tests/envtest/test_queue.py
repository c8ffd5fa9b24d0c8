"""Admission by a queue. Kueue is played: its objects are served by definitions that know their names only."""

import asyncio
from typing import Any

import pytest

from nexrl.k8s.api import EVENT, EXPERIMENT, JOB, POD, RESOURCE_FLAVOR, STATEFUL_SET, WORKLOAD, Api, ApiError, Kind
from nexrl_controller.events import VersionCommitted
from tests.envtest.conftest import CRD
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import condition, operating, until_condition, until_phase
from tests.support.patience import eventually

Object = dict[str, Any]
NOW = "2026-11-22T00:00:00Z"


@pytest.fixture
async def kueue(api: Api) -> None:
    """Its kinds are served."""
    for kind, scope in ((WORKLOAD, "Namespaced"), (RESOURCE_FLAVOR, "Cluster")):
        try:
            await api.request("POST", CRD.path(), body=_definition(kind, scope))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

        async def is_served(kind: Kind = kind) -> bool:
            try:
                await api.list(kind)
            except ApiError:
                return False
            return True

        await eventually(is_served)


def _definition(kind: Kind, scope: str) -> Object:
    group, _, version = kind.api_version.partition("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind.kind, "plural": kind.plural},
            "scope": scope,
            "versions": [{**served, "subresources": {"status": {}}}],
        },
    }


async def until_asked(api: Api, namespace: str) -> Object:
    async def is_there() -> Object | None:
        found = await api.get(WORKLOAD, namespace, "queued-admission")
        return found if found and "status" not in found else None

    found = await eventually(is_there)
    assert found is not None
    return found


async def create_flavor(api: Api, name: str) -> list[Object]:
    """Create the flavor of the nodes `pool: small`, and return what they tolerate."""
    tolerations: list[Object] = [{"key": "pool", "operator": "Exists"}]
    flavor = {"apiVersion": RESOURCE_FLAVOR.api_version, "kind": "ResourceFlavor", "metadata": {"name": name}}
    body = {**flavor, "spec": {"nodeLabels": {"pool": "small"}, "tolerations": tolerations}}
    await api.request("POST", RESOURCE_FLAVOR.path(), body=body)
    return tolerations


async def answer(api: Api, namespace: str, *, flavor: str = "small", **conditions: str) -> None:
    """What Kueue writes: conditions, and flavors for all pods."""
    listed = [
        {"type": kind, "status": status, "reason": "Test", "message": "as the test has it", "lastTransitionTime": NOW}
        for kind, status in conditions.items()
    ]
    assigned = [{"name": name, "flavors": {"cpu": flavor}} for name in ("trainer", "rollout")]
    status = {"status": {"conditions": listed, "admission": {"podSetAssignments": assigned}}}
    path = WORKLOAD.path(namespace, "queued-admission", "status")
    await api.request("PATCH", path, body=status, content_type="application/merge-patch+json")


async def test_an_experiment_waits_for_its_queue_and_runs_where_that_says(
    api: Api, namespace: str, kubelet: Kubelet, kueue: None
) -> None:
    tolerations = await create_flavor(api, "small")
    services, document = Services(), experiment_object("queued", namespace)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    async with services.serving(document) as controller, operating(api, namespace, services, kueue=True):
        await api.apply(document, manager="test")
        asked = await until_asked(api, namespace)
        assert asked["spec"]["queueName"] == "team-a"
        assert {each["name"]: each["count"] for each in asked["spec"]["podSets"]}["rollout"] == 1
        await until_phase(api, namespace, "queued", "Queued")
        assert not (await api.list(POD, namespace))["items"]

        await answer(api, namespace, QuotaReserved="True", Admitted="True")
        await until_phase(api, namespace, "queued", "Starting")
        await controller.apply(VersionCommitted(0))
        await until_condition(api, namespace, "queued", "Ready", "True")
        job = await api.get(JOB, namespace, "queued-trainer-1")
        assert job is not None
        assert job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "small"}
        assert job["spec"]["template"]["spec"]["tolerations"] == tolerations
        found = await api.get(EXPERIMENT, namespace, "queued")
        assert found is not None
        assert {"nodeSelector": {"pool": "small"}, "tolerations": tolerations}.items() <= found["status"][
            "results"
        ].items()

        await api.merge(EXPERIMENT, namespace, "queued", {"spec": {"rollout": {"replicas": 3}}})
        await until_condition(api, namespace, "queued", "RolloutScaleLimited", "True")
        rollouts = await api.get(STATEFUL_SET, namespace, "queued-rollout")
        assert rollouts is not None
        assert rollouts["spec"]["replicas"] == 1

        await answer(api, namespace, QuotaReserved="True", Admitted="True", Evicted="True")
        await until_asked(api, namespace)  # another one
        await until_phase(api, namespace, "queued", "Queued")
        assert not (await api.list(POD, namespace))["items"]
        assert (await condition(api, namespace, "queued", "Admitted"))["status"] == "False"

        await answer(api, namespace, QuotaReserved="True", Admitted="True")
        await until_phase(api, namespace, "queued", "Running")
        assert await api.get(JOB, namespace, "queued-trainer-2") is not None

        await api.merge(EXPERIMENT, namespace, "queued", {"spec": {"suspend": True}})
        await until_phase(api, namespace, "queued", "Suspended")

        async def is_free() -> bool:
            return await api.get(WORKLOAD, namespace, "queued-admission") is None

        await eventually(is_free)


async def test_a_flavor_that_is_edited_moves_no_pod_and_is_no_change_by_hand(
    api: Api, namespace: str, kubelet: Kubelet, kueue: None
) -> None:
    await create_flavor(api, "edited")
    services, document = Services(), experiment_object("queued", namespace)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    async with services.serving(document):
        async with operating(api, namespace, services, kueue=True):
            await api.apply(document, manager="test")
            await until_asked(api, namespace)
            await answer(api, namespace, flavor="edited", QuotaReserved="True", Admitted="True")
            await until_phase(api, namespace, "queued", "Starting")
        await api.merge(RESOURCE_FLAVOR, "", "edited", {"spec": {"nodeLabels": {"pool": "large"}}})
        by_hand = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}
        path = STATEFUL_SET.path(namespace, "queued-rollout")
        query, content_type = {"fieldManager": "kubectl-patch"}, "application/strategic-merge-patch+json"
        await api.request("PATCH", path, query=query, body=by_hand, content_type=content_type)
        async with operating(api, namespace, services, kueue=True):  # one that has just started compares everything

            async def corrections() -> list[str]:
                events = (await api.list(EVENT, namespace))["items"]
                return [event["message"] for event in events if event["reason"] == "DriftCorrected"]

            await eventually(corrections)
            [told] = await corrections()
            assert (
                "queued-rollout was changed by hand: spec.template.spec.terminationGracePeriodSeconds; put back" in told
            )
            rollouts = await api.get(STATEFUL_SET, namespace, "queued-rollout")
            assert rollouts is not None
            assert rollouts["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "small"}


async def test_a_queue_without_kueue_is_not_passed_over(api: Api, namespace: str, kubelet: Kubelet) -> None:
    services, document = Services(), experiment_object("queued", namespace)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")
        await until_condition(api, namespace, "queued", "Accepted", "False")
        assert (await condition(api, namespace, "queued", "Accepted"))["reason"] == "MissingPrerequisite"
        await asyncio.sleep(0.5)
        assert not (await api.list(POD, namespace))["items"]
