"""The operator's copy of the objects of the cluster, where only the order of answers counts."""

import asyncio
from typing import Any, cast

from nexrl.k8s.api import JOB, Api
from nexrl_operator.cache import Cache

Object = dict[str, Any]


def job(name: str, version: int) -> Object:
    metadata = {"name": name, "namespace": "rl", "resourceVersion": str(version)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}


class SlowServer:
    """A fake API server: when released, it answers a list with the objects of version 100. Its watch sends nothing."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def list(self, *_: object, **__: object) -> Object:
        self.asked.set()
        await self.answers.wait()
        return {"items": [job("seen", 90)], "metadata": {"resourceVersion": "100"}}

    async def watch(self, *_: object, **__: object) -> Any:
        await asyncio.Event().wait()
        yield


async def test_what_was_written_while_the_server_listed_is_not_lost() -> None:
    heard: list[str] = []
    cache = Cache(JOB, "rl", "", lambda item: heard.append(item["metadata"]["name"]))
    server = SlowServer()
    cache.note(job("gone", 80))
    running = asyncio.create_task(cache.run(cast("Api", server)))
    await server.asked.wait()
    cache.note(job("written", 101))
    server.answers.set()
    await cache.synced.wait()
    assert {item["metadata"]["name"] for item in cache} == {"seen", "written"}
    assert set(heard) == {"seen", "gone"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
