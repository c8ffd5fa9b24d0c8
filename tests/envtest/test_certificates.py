"""The metric of certificates that expire, with an operator and a real API server."""

import base64
import time

from prometheus_client import REGISTRY

from nexrl.k8s.api import EXPERIMENT, Api
from nexrl_operator.authority import new_ca
from tests.support.kubelet import Kubelet, Services, experiment_object
from tests.support.operator import operating, run, until_phase
from tests.support.patience import eventually


async def test_the_metrics_say_when_the_certificate_of_an_experiment_expires_while_it_has_pods(
    api: Api, namespace: str, kubelet: Kubelet
) -> None:
    ca = new_ca()
    data = {"tls.crt": base64.b64encode(ca.certificate).decode(), "tls.key": base64.b64encode(ca.key).decode()}
    metadata = {"name": "ca", "namespace": namespace}
    await api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    services, document = Services(), experiment_object("brief", namespace)

    async def is_shown() -> bool:
        labels = {"namespace": namespace, "certificate": "brief-tls"}
        ends = REGISTRY.get_sample_value("nexrl_certificate_expiration_timestamp_seconds", labels)
        return ends is not None and ends > time.time() + 80 * 86400

    async def is_not_shown() -> bool:
        return not await is_shown()

    settings = {"tls": "operator", "ca_secret": "ca"}
    async with services.serving(document) as controller, operating(api, namespace, services, **settings):
        await run(api, document, controller)
        assert await is_shown()
        await api.merge(EXPERIMENT, namespace, "brief", {"spec": {"suspend": True}})
        await until_phase(api, namespace, "brief", "Suspended")
        await eventually(is_not_shown)
        await api.merge(EXPERIMENT, namespace, "brief", {"spec": {"suspend": False}})
        await eventually(is_shown)
