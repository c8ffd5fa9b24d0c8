"""Experiments of different owners that share a Redis and an authority, with no network policy between them.

Every RPC of the real controller, pool and weight sync refuses the other experiment, and nothing of the ledger changes.
tests/kubernetes/test_network.py has the network policies, test_redis_users.py the users in Redis.
"""

import asyncio
import importlib
import pkgutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import nexrl.v1
from nexrl.rpc.client import connect
from nexrl.tls import Tls, experiment_name
from nexrl_controller import server as controller_server
from nexrl_weight_sync import server as weight_sync_server
from tests.support.certificates import OTHERS, OURS, Authority, environment
from tests.support.pool import running_pool
from tests.support.services import running_service, small_experiment

CALL_SECONDS = 20.0
OWN_SECONDS = 2.0
SAME_NAME_ELSEWHERE = experiment_name("other-team", "ours")
REFUSED, UNKNOWN = "PERMISSION_DENIED", "UNIMPLEMENTED"


def methods() -> dict[str, list[str]]:
    """Return the paths of all RPCs by service."""
    found = {}
    for module in pkgutil.iter_modules(nexrl.v1.__path__, "nexrl.v1."):
        if module.name.endswith("_service_pb2"):
            for service in importlib.import_module(module.name).DESCRIPTOR.services_by_name.values():
                found[service.name] = [f"/{service.full_name}/{method.name}" for method in service.methods]
    return found


async def answers(address: str, tls: Tls, seconds: float) -> dict[str, str]:
    """Call every RPC there is with an empty message; return the status of each."""

    async def status(channel: grpc.aio.Channel, path: str) -> str:
        call: Any = channel.unary_unary(path)
        try:
            await call(b"", timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    paths = [path for service in methods().values() for path in service]
    async with connect(address, tls) as channel:
        return dict(zip(paths, await asyncio.gather(*(status(channel, path) for path in paths)), strict=True))


@pytest.fixture
def authority() -> Authority:
    """One for both owners, as a release of the chart has."""
    return Authority()


@pytest.fixture
async def services(
    authority: Authority, tmp_path: Path, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[dict[str, str]]:
    """The addresses of our experiment's processes, by a service of each."""
    for name, value in environment(authority.write(tmp_path / "ours")).items():
        monkeypatch.setenv(name, value)
    experiment = small_experiment(experiment_name)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(running_pool(tmp_path, redis_url, experiment))
        sync = await stack.enter_async_context(
            running_service(tmp_path, weight_sync_server.start, experiment, redis_url=redis_url)
        )
        peers = {"trajectory_pool": pool.address, "weight_sync": sync.address}
        controller = await stack.enter_async_context(
            running_service(tmp_path, controller_server.start, experiment, redis_url=redis_url, **peers)
        )
        yield {
            "TrajectoryPoolService": pool.address,
            "WeightSyncService": sync.address,
            "ControllerService": controller.address,
        }


@pytest.mark.parametrize("name", [OTHERS, SAME_NAME_ELSEWHERE], ids=["same namespace", "same name elsewhere"])
async def test_every_rpc_of_an_experiment_refuses_another_owners(
    services: dict[str, str], authority: Authority, tmp_path: Path, name: str
) -> None:
    shown = replace(authority.write(tmp_path / "shown", name), name=OURS)  # it calls our servers by their name
    own = Tls(tmp_path / "ours/ca.crt", OURS, tmp_path / "ours/tls.crt", tmp_path / "ours/tls.key")
    for service, address in services.items():
        found = await answers(address, shown, CALL_SECONDS)
        assert Counter(found.values()).keys() <= {REFUSED, UNKNOWN}
        assert {found[path] for path in methods()[service]} == {REFUSED}
        admitted = await answers(address, own, OWN_SECONDS)
        assert REFUSED not in admitted.values()
        assert {path for path, status in admitted.items() if status == UNKNOWN} == {
            path for path, status in found.items() if status == UNKNOWN
        }
