"""Experiments of different owners that share a Redis and an authority, with no network policy between them.

Every RPC of the real controller, pool and weight sync refuses the other experiment, and nothing of the ledger changes.
test_redis_users.py has the users in Redis, tests/kubernetes/test_isolation.py all of it on a cluster.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from nexrl.rpc.client import connect
from nexrl.tls import Tls, experiment_name
from nexrl_controller import server as controller_server
from nexrl_weight_sync import server as weight_sync_server
from tests.support.certificates import OTHERS, OURS, Authority, environment
from tests.support.foreign_calls import answers, methods
from tests.support.patience import eventually
from tests.support.pool import running_pool
from tests.support.services import running_service, small_experiment

SAME_NAME_ELSEWHERE = experiment_name("other-team", "ours")
REFUSED, UNKNOWN = "PERMISSION_DENIED", "UNIMPLEMENTED"


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
        async with connect(address, shown) as channel:
            found = await answers(channel)
        assert Counter(found.values()).keys() <= {REFUSED, UNKNOWN}
        assert {found[path] for path in methods()[service]} == {REFUSED}
        async with connect(address, own) as channel:
            await eventually(Admitted(channel, unknown(found)).all_have_answered)


def unknown(found: Mapping[str, str]) -> set[str]:
    """The paths that the server does not have."""
    return {path for path, status in found.items() if status == UNKNOWN}


@dataclass
class Admitted:
    """Calls every RPC, as one who may. A watch does not end, so each call has a time, which is longer at each look."""

    channel: grpc.aio.Channel
    unknown: set[str]
    seconds: float = 1.0

    async def all_have_answered(self) -> bool:
        self.seconds *= 2
        admitted = await answers(self.channel, self.seconds)
        assert REFUSED not in admitted.values()
        return unknown(admitted) == self.unknown
