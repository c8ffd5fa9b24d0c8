"""Calls everything that an experiment serves, with the credentials of a stranger.

Runs in a test, and as a program in a pod: JSON on stdin, the answers on stdout.
"""

import asyncio
import importlib
import json
import pkgutil
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

import nexrl.v1
from nexrl.rpc.client import connect
from nexrl.tls import Tls

CALL_SECONDS = 20.0
FILES = {"ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key", "token": "token"}


def methods() -> dict[str, list[str]]:
    """Return the paths of all RPCs by service."""
    found = {}
    for module in pkgutil.iter_modules(nexrl.v1.__path__, "nexrl.v1."):
        if module.name.endswith("_service_pb2"):
            for service in importlib.import_module(module.name).DESCRIPTOR.services_by_name.values():
                found[service.name] = [f"/{service.full_name}/{method.name}" for method in service.methods]
    return found


async def answers(channel: grpc.aio.Channel, seconds: float = CALL_SECONDS) -> dict[str, str]:
    """Call every RPC there is with an empty message; return the status of each."""

    async def status(path: str) -> str:
        call: Any = channel.unary_unary(path)
        try:
            await call(b"", timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    paths = [path for service in methods().values() for path in service]
    return dict(zip(paths, await asyncio.gather(*map(status, paths)), strict=True))


async def answers_of(port: str, address: str, tls: Tls) -> dict[str, str]:
    """Return what is answered at a port, by the name it has in a pod: by RPC, or for HTTP the status."""
    if port in ("grpc", "grpc-token"):
        async with connect(address, tls) as channel:
            return await answers(channel)
    if port == "health":
        async with grpc.aio.insecure_channel(address) as channel:
            return await answers(channel)
    path = "metrics" if port == "metrics" else "v1/models"
    url = f"{'http' if port == 'metrics' else 'https'}://{address}/{path}"
    return {path: await asyncio.to_thread(http_status, url, tls)}


def http_status(url: str, tls: Tls) -> str:
    """Return the status of a GET; "no connection" if there is none. A stranger does not check who the server is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.certificate:
        context.load_cert_chain(tls.certificate, tls.key)
    headers = {"Authorization": f"Bearer {tls.token.read_text()}"} if tls.token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=20, context=context
        ) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return str(error.code)
    except OSError:
        return "no connection"


def written(folder: Path, name: str, content: Mapping[str, str]) -> Tls:
    """Write what a caller shows to `folder`, and return the settings to call the experiment `name` with it."""
    folder.mkdir()
    for part, text in content.items():
        (folder / FILES[part]).write_text(text)
    paths = {part: folder / FILES[part] for part in content}
    return Tls(paths["ca"], name, paths.get("certificate"), paths.get("key"), paths.get("token"))


async def answers_at(addresses: Mapping[str, str], tls: Tls) -> dict[str, dict[str, set[str]]]:
    """Return what is answered at these addresses, which name their ports: by port and RPC all statuses."""
    found: dict[str, dict[str, set[str]]] = {}
    calls = [answers_of(port, address, tls) for address, port in addresses.items()]
    for port, answered in zip(addresses.values(), await asyncio.gather(*calls), strict=True):
        for path, status in answered.items():
            found.setdefault(port, {}).setdefault(path, set()).add(status)
    return found


async def main() -> None:
    """Call `addresses` of the experiment `name` as each of `callers`, and print what each is answered."""
    asked = json.load(sys.stdin)
    found: dict[str, dict[str, dict[str, set[str]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for caller, content in asked["callers"].items():
            found[caller] = await answers_at(asked["addresses"], written(Path(folder, caller), asked["name"], content))
    json.dump(found, sys.stdout, default=sorted)


if __name__ == "__main__":
    asyncio.run(main())
