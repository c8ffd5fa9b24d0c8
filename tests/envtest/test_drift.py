"""Objects of a running experiment that somebody changes or deletes by hand, with an operator and a real API server."""

import base64
from typing import Any

import pytest

from nexrl.k8s.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    EXPERIMENT,
    JOB,
    NETWORK_POLICY,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    Api,
    Kind,
)
from nexrl_operator import drift, executor, reconciler
from nexrl_operator.authority import new_ca
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import operating, run
from tests.support.patience import eventually

Object = dict[str, Any]


async def test_what_somebody_changes_by_hand_is_put_back_and_named_once(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("own", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        before = await _contents(api, namespace)
        rollout = {"template": {"spec": {"containers": [{"name": "nexrl", "image": "evil:1"}]}}}
        changes: dict[tuple[Kind, str], Object] = {
            (NETWORK_POLICY, "own-pods"): {"egress": [{}]},
            (DISRUPTION_BUDGET, "own-rollout"): {"maxUnavailable": 0},
            (SERVICE, "own-controller"): {"selector": {"who": "else"}},
            (STATEFUL_SET, "own-rollout"): rollout,
            (JOB, "own-trainer-1"): {"parallelism": 0},
        }
        for (kind, name), spec in changes.items():
            await _patch(api, kind, namespace, name, spec)

        async def is_restored() -> bool:
            return await _contents(api, namespace) == before

        await eventually(is_restored)
        told = await _corrections(api, namespace)
        assert len(told) == len(changes)
        image = "spec.template.spec.containers[nexrl].image"
        for path in (": spec.egress;", ": spec.maxUnavailable;", "spec.selector.who", image):
            [note] = [note for note in told if path in note]
            assert "was changed by hand" in note


async def test_an_object_that_somebody_replaces_together_with_its_annotations_is_put_back(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("bare", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        before = await _contents(api, namespace)
        for kind, name, spec in (
            (NETWORK_POLICY, "bare-pods", {"podSelector": {}, "ingress": [{}], "egress": [{}]}),
            (STATEFUL_SET, "bare-rollout", None),
        ):
            found = await api.get(kind, namespace, name)
            assert found is not None
            if spec is None:
                spec = found["spec"]
                spec["template"]["spec"]["containers"][0]["image"] = "evil:1"
            kept = {key: found["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
            await api.replace({**found, "metadata": kept, "spec": spec})

        async def is_restored() -> bool:
            return await _contents(api, namespace) == before

        await eventually(is_restored)
        assert len(await _corrections(api, namespace)) == 2


async def test_fields_that_others_add_stay_and_start_nothing_again(
    api: Api, namespace: str, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "RESTORE_SECONDS", 0.1)
    services, document = Services(), experiment_object("others", namespace)
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        added = {"template": {"metadata": {"annotations": {"example.com/scraped": "true"}}}, "minReadySeconds": 1}
        await _patch(api, DEPLOYMENT, namespace, "others-trajectory-pool", added)
        await _patch(api, SERVICE, namespace, "others-controller", {"selector": {"who": "else"}})

        async def is_restored() -> bool:
            return bool(await _corrections(api, namespace))

        await eventually(is_restored)
        [note] = await _corrections(api, namespace)
        assert "Service others-controller" in note
        pool = await api.get(DEPLOYMENT, namespace, "others-trajectory-pool")
        assert pool is not None
        assert pool["spec"]["minReadySeconds"] == 1
        assert pool["spec"]["template"]["metadata"]["annotations"] == {"example.com/scraped": "true"}


async def test_the_configuration_follows_the_spec_and_is_put_back_as_before(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("live", namespace)

    async def configuration() -> str:
        found = await api.get(CONFIG_MAP, namespace, "live-experiment")
        assert found is not None
        return str(found["data"]["experiment.yaml"])

    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        before = await configuration()
        await api.merge(EXPERIMENT, namespace, "live", {"spec": {"rollout": {"replicas": 3}}})

        async def follows() -> bool:  # only there: another generation would mean a resumption to the controller
            return await configuration() == before.replace("replicas: 1\n    workers", "replicas: 3\n    workers")

        await eventually(follows)
        assert not await _corrections(api, namespace)
        after = await configuration()
        patch = {"data": {"experiment.yaml": after.replace("steps: 4", "steps: 400")}}
        assert patch["data"]["experiment.yaml"] != after
        await api.merge(CONFIG_MAP, namespace, "live-experiment", patch)

        async def is_restored() -> bool:
            return await configuration() == after and bool(await _corrections(api, namespace))

        await eventually(is_restored)
        [note] = await _corrections(api, namespace)
        assert "ConfigMap live-experiment was changed by hand: data.experiment.yaml" in note


async def test_another_version_of_the_operator_puts_back_only_what_it_would_make_alike(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("newer", namespace)
    async with services.serving(document) as controller:
        async with operating(api, namespace, services):
            await run(api, document, controller)
        before = await _contents(api, namespace)
        await _patch(api, NETWORK_POLICY, namespace, "newer-pods", {"podSelector": {"matchLabels": {"who": "else"}}})
        async with operating(api, namespace, services, image_trainer="test/trainer:2", pod_name="operator-1"):

            async def is_restored() -> bool:
                return bool(await _corrections(api, namespace))

            await eventually(is_restored)
        assert await _contents(api, namespace) == before


async def test_secrets_that_somebody_deletes_come_back(
    api: Api, namespace: str, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (executor, reconciler):
        monkeypatch.setattr(module, "SECRETS_SECONDS", 0.2)
    ca = new_ca()
    await _create_secret(api, namespace, "ca", {"tls.crt": ca.certificate, "tls.key": ca.key})
    await _create_secret(api, namespace, "redis", {"password": b"secret"})
    services, document = Services(), experiment_object("kept", namespace)
    settings = {"tls": "operator", "ca_secret": "ca", "redis_secret": "redis/password"}
    async with services.serving(document) as controller, operating(api, namespace, services, **settings):
        await run(api, document, controller)
        for name in ("kept-tls", "kept-redis"):  # not at once: both come back when one is seen to be missing
            assert await api.delete(SECRET, namespace, name)

            async def is_told(name: str = name) -> bool:
                return f"Secret {name}" in " ".join(await _corrections(api, namespace))

            await eventually(is_told)
            assert await api.get(SECRET, namespace, name)


async def _patch(api: Api, kind: Kind, namespace: str, name: str, spec: Object) -> None:
    """Change an object as `kubectl patch` does."""
    path, content_type = kind.path(namespace, name), "application/strategic-merge-patch+json"
    query = {"fieldManager": "kubectl-patch"}
    await api.request("PATCH", path, query=query, body={"spec": spec}, content_type=content_type)


async def _contents(api: Api, namespace: str) -> Object:
    """The specs of the experiment's objects by name."""
    kinds = (DEPLOYMENT, STATEFUL_SET, JOB, SERVICE, NETWORK_POLICY, DISRUPTION_BUDGET)
    found = {kind.kind: (await api.list(kind, namespace))["items"] for kind in kinds}
    return {f"{kind} {item['metadata']['name']}": item["spec"] for kind, items in found.items() for item in items}


async def _corrections(api: Api, namespace: str) -> list[str]:
    events = (await api.list(EVENT, namespace))["items"]
    return [event["message"] for event in events if event["reason"] == "DriftCorrected"]


async def _create_secret(api: Api, namespace: str, name: str, content: dict[str, bytes]) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    metadata = {"name": name, "namespace": namespace}
    await api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
