"""A played node for a bare API server: its kubelet runs the commands of `exec` on this machine."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from nexrl.k8s.api import EXEC_PROTOCOL, POD, STATUS, STDERR, STDOUT, Api, Kind
from nexrl.k8s.volume import MOUNT
from nexrl.tls import CredentialFiles
from tests.support.certificates import Authority

NODE = Kind("v1", "Node", "nodes")
PLAY_SECONDS = 0.05
MERGE = "application/merge-patch+json"


class Node:
    """Runs the pods that read volumes. `volume` is the folder that they find at MOUNT."""

    def __init__(self, api: Api, namespace: str, volume: Path) -> None:
        self._api = api
        self._namespace = namespace
        self._name = f"node-of-{namespace}"
        self.volume = volume
        self.pods: list[dict[str, Any]] = []
        """The pods that it has started."""
        self.waiting: dict[str, str] | None = None
        """Reason and message if pods cannot start."""
        self.cuts_off = False
        """Whether connections end before their commands do."""

    async def register(self, port: int) -> None:
        """Tell the API server where the kubelet listens."""
        await self._api.request("POST", NODE.path(), body={"metadata": {"name": self._name}})
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        path = NODE.path("", self._name, "status")
        await self._api.request("PATCH", path, body={"status": status}, content_type=MERGE)

    async def play(self) -> None:
        """Start pods until the task is cancelled."""
        while True:
            pods = (await self._api.list(POD, self._namespace))["items"]
            for pod in (pod for pod in pods if not pod["spec"].get("nodeName")):
                await self._start(pod)
            await asyncio.sleep(PLAY_SECONDS)

    async def execute(self, request: web.Request) -> web.WebSocketResponse:
        """Run a command as the kubelet does."""
        socket = web.WebSocketResponse(protocols=[EXEC_PROTOCOL])
        await socket.prepare(request)
        if not self.cuts_off:
            python, *arguments = (part.replace(MOUNT, str(self.volume)) for part in request.query.getall("command"))
            assert python == "python3"
            process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE)
            await asyncio.gather(_copy(process.stdout, STDOUT, socket), _copy(process.stderr, STDERR, socket))
            await socket.send_bytes(STATUS + json.dumps(await _status(process)).encode())
        await socket.close()
        return socket

    async def _start(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": self._name}}
        await self._api.request("POST", POD.path(self._namespace, name, "binding"), body=binding)
        state = {"waiting": self.waiting} if self.waiting else {"running": {}}
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            **{"ready": not self.waiting, "restartCount": 0, "image": "test", "imageID": "", "state": state},
        }
        status = {"phase": "Pending" if self.waiting else "Running", "containerStatuses": [container]}
        path = POD.path(self._namespace, name, "status")
        await self._api.request("PATCH", path, body={"status": status}, content_type=MERGE)
        self.pods.append(pod)


@asynccontextmanager
async def played_node(api: Api, namespace: str, folder: Path) -> AsyncIterator[Node]:
    """Run a node for the pods of one namespace. `folder` gets its certificate and its volume."""
    (folder / "volume").mkdir()
    node = Node(api, namespace, folder / "volume")
    application = web.Application()
    application.router.add_get("/exec/{namespace}/{pod}/{container}", node.execute)
    runner = web.AppRunner(application)
    await runner.setup()
    tls = CredentialFiles(Authority().write(folder, names=["localhost"])).server_context()
    tls.verify_mode = 0  # type: ignore[assignment]  # the API server of the tests has no certificate for kubelets
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    await node.register(runner.addresses[0][1])
    playing = asyncio.create_task(node.play())
    try:
        yield node
    finally:
        playing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        await runner.cleanup()


async def _copy(stream: asyncio.StreamReader | None, channel: bytes, socket: web.WebSocketResponse) -> None:
    assert stream is not None
    while content := await stream.read(32_768):
        await socket.send_bytes(channel + content)


async def _status(process: Process) -> dict[str, Any]:
    code = await process.wait()
    return {"status": "Failure", "message": f"exit code {code}"} if code else {"status": "Success"}
