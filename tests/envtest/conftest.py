"""One bare API server for all tests here, with the CRD in it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from nexrl.k8s.api import Api, ApiError, Kind, connect_cluster
from nexrl.spec.crd import crd
from tests.support.api_server import api_server, assets
from tests.support.kubelet import Kubelet
from tests.support.patience import eventually

CRD = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.envtest)
            if assets() is None:
                item.add_marker(pytest.mark.skip(reason="needs openssl; kube-apiserver and etcd in KUBEBUILDER_ASSETS"))


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of the server's administrator."""
    with api_server(tmp_path_factory.mktemp("api-server")) as path:
        yield path


@pytest.fixture
async def api(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """A connection, once the CRD is served."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    async with connect_cluster() as connection:
        try:
            await connection.request("POST", CRD.path(), body=crd())
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        await eventually(lambda: _is_served(connection))
        yield connection
    # A request that is cancelled leaves a connection to say its goodbyes, which the loop must live to hear.
    await asyncio.sleep(0.1)


@pytest.fixture
async def namespace(api: Api) -> str:
    """A namespace that only this test uses."""
    name = f"test-{uuid4().hex[:8]}"
    await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    return name


@pytest.fixture
async def kubelet(api: Api, namespace: str) -> AsyncIterator[Kubelet]:
    """A played kubelet: pods come and go with their workloads."""
    kubelet = Kubelet(api, namespace)
    playing = asyncio.create_task(kubelet.play())
    yield kubelet
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


async def _is_served(connection: Api) -> bool:
    found = await connection.get(CRD, "", "experiments.nexrl.dev")
    conditions = (found or {}).get("status", {}).get("conditions") or []  # null at first
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
