"""Calls to a replica that never answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from nexrl.errors import UnavailableError
from nexrl.weights.packing import snapshot
from nexrl.weights.rendezvous import Rendezvous
from nexrl_weight_sync.replicas import ReplicaClients
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.weights import BUCKET_BYTES, example_tensors

Call = Callable[[ReplicaClients, str], Awaitable[object]]


class Silent(grpc.GenericRpcHandler):
    """Has every method, and answers none."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.address = ""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._never)

    async def _never(self, request: object, context: object) -> None:
        self.is_asked.set()
        await asyncio.Event().wait()


def receive(clients: ReplicaClients, address: str) -> Awaitable[object]:
    manifest = snapshot(example_tensors(0), policy_version=0, bucket_bytes=BUCKET_BYTES).manifest
    return clients.receive(address, "sync", Rendezvous(1, "127.0.0.1", 1, 1, 2, 5.0), manifest)


def commit(clients: ReplicaClients, address: str) -> Awaitable[object]:
    return clients.commit(address, "sync", 0)


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[Silent]:
    silent, server = Silent(), grpc.aio.server()
    server.add_generic_rpc_handlers((silent,))
    silent.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield silent
    await server.stop(None)


@pytest.mark.parametrize("call", [receive, commit])
async def test_a_replica_that_is_put_out_during_a_call_is_away(replica: Silent, call: Call) -> None:
    clients = ReplicaClients(timeout_seconds=2 * LIMIT_SECONDS)
    calling = asyncio.ensure_future(call(clients, replica.address))
    await replica.is_asked.wait()
    await clients.keep_only(set())
    with pytest.raises(UnavailableError, match="during the call"):
        await finished(calling, "the call ends, long before its own timeout")


@pytest.mark.parametrize("call", [receive, commit])
@pytest.mark.parametrize("ends", ["caller", "service"])
async def test_a_call_that_is_no_longer_wanted_is_nobodys_failure(replica: Silent, call: Call, ends: str) -> None:
    clients = ReplicaClients(timeout_seconds=2 * LIMIT_SECONDS)
    calling = asyncio.ensure_future(call(clients, replica.address))
    await replica.is_asked.wait()
    if ends == "caller":
        calling.cancel()
    else:
        await clients.close()
    with pytest.raises(asyncio.CancelledError):
        await finished(calling, "the call ends, long before its own timeout")
    await clients.close()
