"""The connection to an API server, as the environment of a user or a pod describes it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from nexrl.k8s.api import SECRET, connect_cluster


@asynccontextmanager
async def recording_server(seen: list[web.Request]) -> AsyncIterator[str]:
    """Answers every request with an empty object, and records it. Yields its URL."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def write_kubeconfig(path: Path, server: str) -> Path:
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    clusters, users = [{"name": "test", "cluster": {"server": server}}], [{"name": "test", "user": {}}]
    content = {"clusters": clusters, "users": users, "contexts": [context], "current-context": "test"}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **content}))
    return path


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


async def test_a_password_in_netrc_is_not_sent_to_the_api_server(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login somebody password secret\n")
    environment.setenv("NETRC", str(tmp_path / "netrc"))
    seen: list[web.Request] = []
    async with recording_server(seen) as url:
        environment.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", url)))
        async with connect_cluster() as api:
            await api.get(SECRET, "default", "any")
    assert [request.headers.get("Authorization") for request in seen] == [None]


async def test_a_proxy_in_the_environment_is_used(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    seen: list[web.Request] = []
    async with recording_server(seen) as url:
        environment.setenv("http_proxy", url)
        path = write_kubeconfig(tmp_path / "kubeconfig", "http://api.example")
        environment.setenv("KUBECONFIG", str(path))
        async with connect_cluster() as api:
            await api.get(SECRET, "default", "any")
    assert [request.host for request in seen] == ["api.example"]
