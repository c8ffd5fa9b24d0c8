"""A replica without an engine, as a process that serves until it is killed or weight sync is gone for long.

Its behaviour: sound; flip (receives one wrong byte in version 1); die (kills itself after the first bucket of
version 1); misfit (expects another model).
"""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import torch

from nexrl.errors import NexrlError
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1 import policy_pb2
from nexrl.v1 import weight_sync_service_pb2 as weight_sync_pb
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights.codec import manifest_from_wire, rendezvous_from_wire
from nexrl.weights.manifest import Manifest, TensorSpec
from nexrl.weights.receiver import WeightReceiver
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Group

if TYPE_CHECKING:  # the generated class is abstract to type checkers only; a fake has the methods that are called
    from builtins import object as InferenceServiceServicer  # noqa: N812
else:
    from nexrl.v1.inference_service_pb2_grpc import InferenceServiceServicer

ALONE_SECONDS = 30.0


class Servicer(InferenceServiceServicer):
    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver

    async def ReceiveWeights(self, request: pb.ReceiveWeightsRequest, context: Any) -> pb.ReceiveWeightsResponse:
        rendezvous, manifest = rendezvous_from_wire(request.rendezvous), manifest_from_wire(request.manifest)
        return pb.ReceiveWeightsResponse(digest=await self._receiver.receive(request.sync_id, rendezvous, manifest))

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Any) -> pb.CommitWeightsResponse:
        staged = await self._receiver.take(request.sync_id)
        if staged is not None:
            self._receiver.mark_served(staged)
        return pb.CommitWeightsResponse()


def misbehave(behaviour: str) -> None:
    """Make the transport of this process do what `behaviour` says, in version 1."""
    receive, receive_version = Group.receive, WeightReceiver.receive
    arriving: list[int] = []

    async def noted(receiver: WeightReceiver, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        arriving[:] = [manifest.policy_version]
        return await receive_version(receiver, sync_id, rendezvous, manifest)

    def with_a_flipped_byte(group: Group, buffers: Sequence[torch.Tensor]) -> None:
        receive(group, buffers)
        if arriving == [1]:
            buffers[0][0] ^= 1

    def until_death(group: Group, buffers: Sequence[torch.Tensor]) -> None:
        if arriving == [1]:
            broadcast = group._broadcast

            def last_broadcast(buffer: torch.Tensor) -> None:
                broadcast(buffer)
                os.kill(os.getpid(), signal.SIGKILL)

            group._broadcast = last_broadcast  # type: ignore[method-assign]
        receive(group, buffers)

    WeightReceiver.receive = noted  # type: ignore[method-assign,assignment]
    Group.receive = {"flip": with_a_flipped_byte, "die": until_death}.get(behaviour, receive)  # type: ignore[method-assign,assignment]


def main(weight_sync: str, model_tag: str, replica_id: str, specs: Sequence[TensorSpec], behaviour: str) -> None:
    """Run the replica of a model with these tensors."""
    torch.set_num_threads(1)
    misbehave(behaviour)
    other = (*specs[1:], TensorSpec("other", "float32", (3,)))
    receiver = WeightReceiver(other if behaviour == "misfit" else specs)
    asyncio.run(serve(weight_sync, model_tag, replica_id, receiver))


async def serve(weight_sync: str, model_tag: str, replica_id: str, receiver: WeightReceiver) -> None:
    """Serve `receiver`, and stay registered."""
    server = grpc.aio.server(interceptors=[EdgeInterceptor()])
    add_InferenceServiceServicer_to_server(Servicer(receiver), server)  # type: ignore[arg-type]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stub = WeightSyncServiceStub(connect(weight_sync))
    heard = time.monotonic()
    while time.monotonic() - heard < ALONE_SECONDS:
        replica = policy_pb2.Replica(
            replica_id=replica_id, address=address, http_url="http://x", policy_version=receiver.policy_version
        )
        request = weight_sync_pb.RegisterReplicaRequest(
            request_id=new_request_id(), model_tag=model_tag, replica=replica, digest=receiver.digest
        )
        try:
            answer = await call(stub.RegisterReplica, request, timeout_seconds=5)
            heard = time.monotonic()
            await asyncio.sleep(answer.lease_seconds / 3)
        except NexrlError:
            await asyncio.sleep(0.1)
