"""The chart on a real API server: Helm installs it, Pod Security lets its pods in, and its rights are enough."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from nexrl.k8s.api import EVENT, EXPERIMENT, Api, ApiError, Kind, connect_cluster
from nexrl_controller.events import VersionCommitted
from nexrl_operator.release_secrets import ReleaseSettings, make_secrets
from nexrl_operator.server import Operator
from tests.support.helm import CHART, VARIANTS, helm, helms, objects, pod_specs
from tests.support.kubelet import Kubelet, Services, experiment_object, operator_settings
from tests.support.patience import eventually

pytestmark = pytest.mark.skipif(not helms(), reason="needs Helm: `helm` on the PATH, or HELM")

DEFINITIONS = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
NAMESPACES = Kind("v1", "Namespace", "namespaces")
KINDS = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "Service", "services"),
    Kind("apps/v1", "Deployment", "deployments"),
    Kind("apps/v1", "StatefulSet", "statefulsets"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
)

SECRETS = {"redis_secret": "redis/password", "tls": "operator", "ca_secret": "ca"}


@pytest.fixture
async def namespace(api: Api) -> str:
    """One that lets only restricted pods in."""
    name = f"chart-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await api.request("POST", NAMESPACES.path(), body={"metadata": {"name": name, "labels": labels}})
    await api.request("POST", f"/api/v1/namespaces/{name}/serviceaccounts", body={"metadata": {"name": "default"}})
    return name


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
async def test_restricted_namespace_lets_every_pod_in(api: Api, namespace: str, values: tuple[str, ...]) -> None:
    for name, spec in pod_specs(objects(values)).items():
        claimed = [{"name": "data", "emptyDir": {}}]  # what a StatefulSet's claim becomes
        spec = {**spec, "priorityClassName": "", "volumes": [*spec.get("volumes", []), *claimed]}
        pod = {"metadata": {"name": "trial"}, "spec": spec}
        try:
            await api.request("POST", f"/api/v1/namespaces/{namespace}/pods", query={"dryRun": "All"}, body=pod)
        except ApiError as error:
            pytest.fail(f"{name}: {error}")


@pytest.mark.parametrize("program", helms())
async def test_helm_installs_twice_upgrades_and_leaves_nothing(api: Api, namespace: str, program: str) -> None:
    for release in ("one", "two"):
        await _helm(program, "install", release, str(CHART), "--namespace", namespace)
    await _helm(program, "upgrade", "one", str(CHART), "--namespace", namespace, "--set", "operator.replicas=2")
    for release in ("one", "two"):
        await _helm(program, "uninstall", release, "--namespace", namespace)

    async def left() -> list[str]:
        found = [item["metadata"]["name"] for kind in KINDS for item in (await api.list(kind, namespace))["items"]]
        return [name for name in found if name.startswith(("one", "two"))]

    async def nothing_is_left() -> bool:
        return not await left()

    await eventually(nothing_is_left)
    assert await api.get(DEFINITIONS, "", "experiments.nexrl.dev")


async def test_rights_of_the_chart_are_enough_for_the_operator(
    api: Api, namespace: str, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the secrets of the release to the end of an experiment, as the chart's ServiceAccount."""
    elsewhere = ("--set", "redis.enabled=false,externalRedis.url=redis://elsewhere:6379")
    await _helm(helms()[0], "install", "trial", str(CHART), "--namespace", namespace, *elsewhere)
    token = await _token(api, namespace, "trial-nexrl")
    monkeypatch.setenv("KUBECONFIG", str(_kubeconfig_with(token, kubeconfig, tmp_path)))
    settings = ReleaseSettings(namespace=namespace, owner="trial-nexrl-owner", redis_secret="redis", ca_secret="ca")
    services, document = Services(), experiment_object("one", namespace)
    async with connect_cluster() as limited, _kubelet(api, namespace), services.serving(document) as controller:
        await make_secrets(limited, settings)
        known = operator_settings(
            namespace=namespace,
            release_namespace=namespace,
            redis_secret="redis/password",
            tls="operator",
            ca_secret="ca",
        )
        running = asyncio.create_task(Operator(limited, known, services.connect).run())
        await api.apply(document, manager="test")
        await _until_phase(api, namespace, "Starting")
        await controller.apply(VersionCommitted(0))
        await _until_phase(api, namespace, "Running")
        await controller.post_metrics("m1", 4, {"training_complete": 1})
        await _until_phase(api, namespace, "Succeeded")
        running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result
        assert (await api.list(EVENT, namespace))["items"]
        with pytest.raises(ApiError, match="forbidden"):
            await limited.list(Kind("v1", "Secret", "secrets"), namespace)
        with pytest.raises(ApiError, match="forbidden"):
            await limited.list(EXPERIMENT)


@asynccontextmanager
async def _kubelet(api: Api, namespace: str) -> AsyncIterator[None]:
    playing = asyncio.create_task(Kubelet(api, namespace).play())
    yield
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


async def _until_phase(api: Api, namespace: str, phase: str) -> None:
    async def is_in_phase() -> bool:
        found = await api.get(EXPERIMENT, namespace, "one")
        return bool(found) and (found or {}).get("status", {}).get("phase") == phase

    await eventually(is_in_phase)


async def _token(api: Api, namespace: str, account: str) -> str:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    answer = await api.request("POST", path, body={"spec": {"expirationSeconds": 600}})
    return str(answer["status"]["token"])


def _kubeconfig_with(token: str, admin: Path, folder: Path) -> Path:
    configuration = yaml.safe_load(admin.read_text())
    configuration["users"][0]["user"] = {"token": token}
    target = folder / "kubeconfig"
    target.write_text(yaml.safe_dump(configuration))
    return target


async def _helm(program: str, *arguments: str) -> None:
    done = await asyncio.to_thread(helm, program, *arguments)
    assert done.returncode == 0, done.stderr
