"""The HTTP API of a replica under TLS: the same door as for RPCs."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from nexrl.rpc.server import ServiceProcess
from nexrl.tls import OPERATOR, Tls
from nexrl_inference.server import serve_http
from tests.support.certificates import OTHERS, OURS, Authority, environment
from tests.support.services import running_service


@dataclass
class Api:
    """A replica's API that says hello."""

    folder: Path
    authority: Authority
    url: str = ""
    is_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, process: ServiceProcess) -> None:
        application = web.Application()
        for path in ("/health", "/v1/models"):
            application.router.add_get(path, self._hello)
        self.url = await serve_http(process, application)
        self.is_up.set()

    async def get(self, path: str, tls: Tls | None = None) -> int:
        """The answer's status, to a client with this certificate, or with none."""
        trusted = ssl.create_default_context(cafile=str(tls.ca if tls else self.folder / "ours/ca.crt"))
        if tls and tls.certificate:
            trusted.load_cert_chain(tls.certificate, tls.key)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}{path}", ssl=trusted, server_hostname=OURS) as answer,
        ):
            if answer.status != 200:
                assert (await answer.json())["error"]["code"] == answer.status
            return answer.status

    async def _hello(self, request: web.Request) -> web.Response:
        return web.Response(text="hello")


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    authority = Authority()
    for name, value in environment(authority.write(tmp_path / "ours")).items():
        monkeypatch.setenv(name, value)
    async with running_service(tmp_path, (api := Api(tmp_path, authority)).start):
        await api.is_up.wait()
        yield api


async def test_the_experiment_and_the_operator_are_let_in_and_nobody_else(api: Api, tmp_path: Path) -> None:
    assert api.url.startswith("https://")
    assert await api.get("/v1/models", api.authority.write(tmp_path / "mine")) == 200
    assert await api.get("/v1/models", api.authority.write(tmp_path / "operator", OPERATOR)) == 200
    assert await api.get("/v1/models", api.authority.write(tmp_path / "others", OTHERS)) == 403
    assert await api.get("/v1/models") == 401


async def test_a_probe_needs_no_certificate(api: Api) -> None:
    assert await api.get("/health") == 200


@pytest.mark.parametrize(("days", "is_of_stranger"), [(-0.001, False), (1, True)], ids=["expired", "stranger"])
async def test_a_certificate_that_is_no_good_is_worse_than_none(
    api: Api, tmp_path: Path, days: float, is_of_stranger: bool
) -> None:
    shown = (Authority() if is_of_stranger else api.authority).write(tmp_path / "shown", days=days)
    (tmp_path / "shown/ca.crt").write_bytes((tmp_path / "ours/ca.crt").read_bytes())
    with pytest.raises(aiohttp.ClientError):
        await api.get("/health", shown)


async def test_the_newest_certificate_is_shown_and_the_newest_authority_trusted(api: Api, tmp_path: Path) -> None:
    old, successor = api.authority.write(tmp_path / "old"), Authority()
    assert await api.get("/v1/models", old) == 200
    new = successor.write(tmp_path / "ours")
    assert await api.get("/v1/models", new) == 200
    with pytest.raises(aiohttp.ClientError):
        await api.get("/v1/models", old)
    (tmp_path / "old/ca.crt").write_bytes((tmp_path / "ours/ca.crt").read_bytes())
    with pytest.raises(aiohttp.ClientError):  # it knows the server now, but the server no longer knows it
        await api.get("/v1/models", old)


async def test_a_broken_file_changes_nothing_until_it_is_whole(api: Api, tmp_path: Path) -> None:
    mine = api.authority.write(tmp_path / "mine")
    (tmp_path / "ours/tls.crt").write_bytes(b"broken")
    assert await api.get("/v1/models", mine) == 200
    api.authority.write(tmp_path / "ours")
    assert await api.get("/v1/models", mine) == 200
