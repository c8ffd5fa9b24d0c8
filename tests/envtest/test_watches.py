"""A cache misses no change when its connection is cut, falls silent, or is too old."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from nexrl.k8s.api import CONFIG_MAP, Api, Object, connect_cluster
from nexrl_operator import cache as cache_module
from nexrl_operator.cache import Cache
from tests.support.patience import eventually


class Proxy:
    """Passes bytes on to the API server; can cut all connections, or let them hang."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._passes = _passing()
        self._hung: list[asyncio.Event] = []
        self.connections = 0
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listens on its port, while the block runs."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield
            self.go_on()

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def hang(self) -> None:
        """Pass nothing on, on the connections that there are; new ones are good."""
        self._passes.clear()
        self._hung.append(self._passes)
        self._passes = _passing()

    def go_on(self) -> None:
        """End all connections; what hung is lost."""
        self.cut()
        for passes in self._hung:
            passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        passes = self._passes
        to_server, from_server = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, from_server]
        await asyncio.gather(_copy(reader, from_server, passes), _copy(to_server, writer, passes))


def _passing() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(65536):
            await passes.wait()
            writer.write(content)
            await writer.drain()
    writer.close()


@pytest.fixture
async def proxy(kubeconfig: Path, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """A proxy, which KUBECONFIG names from now on."""
    text = await asyncio.to_thread(kubeconfig.read_text)
    found = re.search(r"https://127\.0\.0\.1:(\d+)", text)
    assert found is not None
    made = Proxy(int(found[1]))
    async with made.listening():
        path = tmp_path / "kubeconfig"
        await asyncio.to_thread(path.write_text, text.replace(found[1], str(made.port)))
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield made


@asynccontextmanager
async def caching(label: str) -> AsyncIterator[tuple[Cache, list[str]]]:
    heard: list[str] = []
    cache = Cache(CONFIG_MAP, "default", f"test={label}", lambda item: heard.append(item["metadata"]["name"]))
    async with connect_cluster() as api:
        running = asyncio.create_task(cache.run(api))
        await cache.synced.wait()
        yield cache, heard
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def make(api: Api, name: str, label: str) -> Object:
    metadata = {"name": name, "namespace": "default", "labels": {"test": label}}
    return await api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


async def until_known(cache: Cache, name: str, *, is_there: bool = True) -> None:
    async def is_known() -> bool:
        return (cache.get("default", name) is not None) == is_there

    await eventually(is_known)


async def test_what_changed_while_the_connection_was_cut_is_heard_of(api: Api, proxy: Proxy) -> None:
    label = uuid4().hex[:8]
    async with caching(label) as (cache, heard):
        await make(api, f"{label}-1", label)
        await until_known(cache, f"{label}-1")
        for number in range(2, 5):
            proxy.cut()
            await make(api, f"{label}-{number}", label)
            await until_known(cache, f"{label}-{number}")
        assert heard == [f"{label}-{number}" for number in range(1, 5)]  # each once


async def test_a_connection_that_falls_silent_is_given_up(
    api: Api, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "SILENCE_SECONDS", 1.0)
    label = uuid4().hex[:8]
    async with caching(label) as (cache, _):
        await make(api, f"{label}-1", label)
        await until_known(cache, f"{label}-1")
        proxy.hang()
        await make(api, f"{label}-2", label)
        await until_known(cache, f"{label}-2")


async def test_a_watch_that_is_left_keeps_no_connection_though_nobody_answers_on_it(api: Api, proxy: Proxy) -> None:
    label = uuid4().hex[:8]
    async with caching(label) as (cache, _):
        await make(api, f"{label}-1", label)
        await until_known(cache, f"{label}-1")
        proxy.hang()
    connections = await asyncio.to_thread(psutil.Process().net_connections, "tcp")
    assert not [each for each in connections if each.raddr and each.raddr.port == proxy.port]


async def test_what_was_deleted_while_a_watch_was_too_old_is_noticed_by_the_list(api: Api, proxy: Proxy) -> None:
    label = uuid4().hex[:8]
    async with caching(label) as (cache, heard):
        await make(api, f"{label}-1", label)
        await until_known(cache, f"{label}-1")
        proxy.hang()
        cache._version = ""  # what a 410 does
        await api.delete(CONFIG_MAP, "default", f"{label}-1")
        proxy.go_on()
        await until_known(cache, f"{label}-1", is_there=False)
        assert heard.count(f"{label}-1") == 2


async def test_what_a_watch_brings_late_undoes_no_answer_of_a_write(api: Api, proxy: Proxy) -> None:
    label = uuid4().hex[:8]
    name = f"{label}-1"
    async with caching(label) as (cache, heard):
        made = await make(api, name, label)
        await until_known(cache, name)
        proxy.hang()
        await api.merge(CONFIG_MAP, "default", name, {"data": {"number": "1"}})
        newest = await api.merge(CONFIG_MAP, "default", name, {"data": {"number": "2"}})
        cache.note(newest)
        cache._on_change = lambda item: heard.append(cache.get("default", name)["data"]["number"])  # type: ignore[index]
        proxy.go_on()
        await make(api, f"{label}-2", label)
        await until_known(cache, f"{label}-2")
        assert heard == [name, "2", "2", "2"]
        await api.delete(CONFIG_MAP, "default", name)
        await until_known(cache, name, is_there=False)
        cache.note(made)  # the response arrives after the object was deleted
        assert cache.get("default", name) is None


async def test_a_quiet_cluster_is_asked_nothing(api: Api, proxy: Proxy) -> None:
    async with caching(uuid4().hex[:8]):
        await asyncio.sleep(0.5)
        before = proxy.connections
        await asyncio.sleep(3)
        assert proxy.connections == before
