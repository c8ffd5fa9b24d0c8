"""Calls to the replicas: one attempt each, because a replica that must be asked twice is late."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from nexrl.cancellation import is_called_off
from nexrl.errors import NexrlError, UnavailableError
from nexrl.rpc.client import connect
from nexrl.rpc.status import error_from_call
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.weights.codec import manifest_to_wire, rendezvous_to_wire
from nexrl.weights.manifest import Manifest
from nexrl.weights.rendezvous import Rendezvous

log = logging.getLogger(__name__)


class TransferInterruptedError(UnavailableError):
    """The replica answers, but its transfer failed because some other member of the group did."""


class ReplicaClients:
    """Channels to the living replicas."""

    def __init__(self, *, timeout_seconds: float) -> None:
        """`timeout_seconds`: for one call."""
        self._timeout_seconds = timeout_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._is_closed = False

    async def receive(self, address: str, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        """Have the replica at `address` receive; gives the digest of what it received.

        Raises TransferInterruptedError when another member is to blame, else the NexrlError with which it failed.
        """
        request = pb.ReceiveWeightsRequest(
            sync_id=sync_id, rendezvous=rendezvous_to_wire(rendezvous), manifest=manifest_to_wire(manifest)
        )
        answer: pb.ReceiveWeightsResponse = await self._call(self._stub(address).ReceiveWeights, request)
        return answer.digest

    async def commit(self, address: str, sync_id: str, policy_version: int) -> None:
        """Have the replica at `address` serve what it received. Raises NexrlError when it does not."""
        request = pb.CommitWeightsRequest(sync_id=sync_id, policy_version=policy_version)
        await self._call(self._stub(address).CommitWeights, request)

    async def keep_only(self, addresses: set[str]) -> None:
        """Close the channels to all other addresses: a replica that returns must not meet the old one's back-off."""
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
            # So gRPC ends a call whose channel is closed, too: that is the replica's failure, and not the caller's end.
            if self._is_closed or is_called_off():
                raise
            raise UnavailableError("it left, or was put out, during the call") from None
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
