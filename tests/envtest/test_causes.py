"""Causes that only Events tell, in the status of an experiment, with an operator and a real API server."""

import time
from typing import Any

from nexrl.k8s.api import EVENT, POD, STATEFUL_SET, Api
from nexrl_operator.api_objects import rfc3339
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import condition, operating, run, until_phase
from tests.support.patience import eventually

Object = dict[str, Any]


async def test_volume_that_cannot_be_mounted_is_named_in_the_status(api: Api, namespace: str, kubelet: Kubelet) -> None:
    kubelet.is_ready = False
    services, document = Services(), experiment_object("mount", namespace)
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")

        async def trainer() -> Object | None:
            return await api.get(POD, namespace, "mount-trainer-1-0")

        await eventually(trainer)
        pod = await trainer()
        assert pod is not None
        await _warn(api, pod, "FailedMount", 'MountVolume.SetUp failed for volume "v" : secret "typo" not found')
        await _until_ready_says(api, namespace, "mount", "FailedMount")
        message = (await condition(api, namespace, "mount", "Ready"))["message"]
        assert message == (
            'pod mount-trainer-1-0: MountVolume.SetUp failed for volume "v" : secret "typo" not found; '
            f"create the Secret typo in the namespace {namespace}, or correct spec.trainer.template"
        )


async def test_quota_that_keeps_pods_away_is_told_in_full(api: Api, namespace: str) -> None:
    services, document = Services(), experiment_object("quota", namespace)
    async with services.serving(document), operating(api, namespace, services):
        await api.apply(document, manager="test")

        async def rollout() -> Object | None:
            return await api.get(STATEFUL_SET, namespace, "quota-rollout")

        await eventually(rollout)
        found = await rollout()
        assert found is not None
        cause = 'pods "quota-rollout-0" is forbidden: exceeded quota: small, requested: cpu=100m, limited: cpu=50m'
        await _warn(api, found, "FailedCreate", cause)
        await _until_ready_says(api, namespace, "quota", "FailedCreate")
        message = (await condition(api, namespace, "quota", "Ready"))["message"]
        assert message == (
            f"StatefulSet quota-rollout cannot create its pods: {cause}; "
            "raise the ResourceQuota, or lower the requests in spec.rollout.template"
        )


async def test_pool_that_is_evicted_for_the_disk_of_its_data_reader_ends_the_run_and_names_both(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    services, document = Services(), experiment_object("disk", namespace, failurePolicy={"maxRestarts": 0})
    cause = 'Usage of EmptyDir volume "data-reader-tmp" exceeds the limit "32Gi".'
    async with services.serving(document) as controller, operating(api, namespace, services):
        await run(api, document, controller)
        status = {"status": {"phase": "Failed", "reason": "Evicted", "message": cause, "conditions": []}}
        path = POD.path(namespace, "disk-trajectory-pool-0", "status")
        await api.request("PATCH", path, body=status, content_type="application/merge-patch+json")
        await until_phase(api, namespace, "disk", "Failed")
        first = (await condition(api, namespace, "disk", "Failed"))["message"].partition("\n")[0]
        assert first.startswith("data-reader was ended by SIGKILL")
        remedy = "write less, or raise the sizeLimit of the volume in spec.trajectoryPool.template.spec.volumes"
        assert f"{cause}; container data-reader: {remedy}" in first


async def _warn(api: Api, about: Object, reason: str, message: str) -> None:
    """Create an Event, as the kubelet and Kubernetes' controllers do."""
    metadata, now = about["metadata"], rfc3339(time.time())
    involved = {"kind": about["kind"], **{key: metadata[key] for key in ("name", "namespace", "uid")}}
    event = {"reason": reason, "message": message, "type": "Warning", "firstTimestamp": now, "lastTimestamp": now}
    known = {"name": f"{metadata['name']}.1", "namespace": metadata["namespace"]}
    await api.create(
        {"apiVersion": EVENT.api_version, "kind": "Event", "metadata": known, "involvedObject": involved} | event
    )


async def _until_ready_says(api: Api, namespace: str, name: str, reason: str) -> None:
    async def is_told() -> bool:
        return bool((await condition(api, namespace, name, "Ready")).get("reason") == reason)

    await eventually(is_told)
