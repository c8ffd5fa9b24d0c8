"""Calls to the replicas. Each call is attempted once; a replica whose call fails is evicted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from nexrl.errors import NexrlError, UnavailableError
from nexrl.rpc.client import connect
from nexrl.rpc.status import error_from_call
from nexrl.task_cancellation import is_current_task_cancelled
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.weights.manifest import Manifest
from nexrl.weights.manifest_proto import manifest_to_wire
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.rendezvous_proto import rendezvous_to_wire

log = logging.getLogger(__name__)


class TransferInterruptedError(UnavailableError):
    """The replica answered that its transfer failed because another member of the group failed."""


class ReplicaClients:
    """Calls replicas over one channel for each address."""

    def __init__(self, *, timeout_seconds: float) -> None:
        """`timeout_seconds`: for one call."""
        self._timeout_seconds = timeout_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._is_closed = False

    async def receive(self, address: str, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        """Have the replica at `address` receive a version. Returns the digest of what it received.

        Raises TransferInterruptedError if another member failed, else the NexrlError with which the replica failed.
        """
        request = pb.ReceiveWeightsRequest(
            sync_id=sync_id, rendezvous=rendezvous_to_wire(rendezvous), manifest=manifest_to_wire(manifest)
        )
        answer: pb.ReceiveWeightsResponse = await self._call(self._stub(address).ReceiveWeights, request)
        return answer.digest

    async def commit(self, address: str, sync_id: str, policy_version: int) -> None:
        """Have the replica at `address` serve what it received. Raises NexrlError if it does not."""
        request = pb.CommitWeightsRequest(sync_id=sync_id, policy_version=policy_version)
        await self._call(self._stub(address).CommitWeights, request)

    async def keep_only(self, addresses: set[str]) -> None:
        """Close the channels to all other addresses. A replica that returns gets a new channel, without back-off."""
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Close all channels, and cancel the calls."""
        self._is_closed = True
        await self.keep_only(set())

    async def _call(self, method: Callable[..., Awaitable[Any]], request: object) -> Any:
        try:
            return await method(request, timeout=self._timeout_seconds)
        except asyncio.CancelledError:
            # gRPC also raises this if the channel was closed during the call. Then only the replica failed.
            if self._is_closed or is_current_task_cancelled():
                raise
            raise UnavailableError("the replica left, or was evicted, during the call") from None
        except grpc.aio.AioRpcError as rpc_error:
            error: NexrlError = error_from_call(rpc_error)
            has_answered = rpc_status.from_call(rpc_error) is not None  # type: ignore[arg-type,no-untyped-call,unused-ignore]
            if has_answered and isinstance(error, UnavailableError):
                raise TransferInterruptedError(error.message) from None
            raise error from None

    def _stub(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return InferenceServiceStub(self._channels[address])
