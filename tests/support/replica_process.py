"""A replica without an engine, in a process. It serves until the process or its parent process is killed.

Its behaviour is one of:
- sound: it has no fault;
- flip: it receives one wrong byte in version 1;
- die: it kills itself after the first bucket of version 1;
- misfit: it expects another model;
- leave: it deregisters while it loads version 1, and the load never ends.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import torch

from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.v1 import policy_pb2
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights import nccl
from nexrl.weights.manifest import Manifest, TensorSpec
from nexrl.weights.published import PublishedVersions
from nexrl.weights.receiver import StagedWeights, WeightReceiver
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Group
from nexrl_inference.replica import Replica
from nexrl_inference.requests import GenerationRequest, GenerationResult
from nexrl_inference.service import InferenceServicer
from tests.support.standin_nccl import StandInCommunicator, standin_gpu


class NoEngine:
    """An engine that loads any weights at once, and cannot generate."""

    active_rows = 0
    waiting_requests = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        raise NotImplementedError

    async def load(self, weights: StagedWeights) -> None:
        pass


class LeavingEngine(NoEngine):
    """An engine whose replica deregisters while it loads version 1. The load never ends."""

    def __init__(self, weight_sync: str, model_tag: str, replica_id: str) -> None:
        self._weight_sync = weight_sync
        self._request = pb.DeregisterReplicaRequest(
            request_id=new_request_id(), model_tag=model_tag, replica_id=replica_id
        )

    async def load(self, weights: StagedWeights) -> None:
        if weights.manifest.policy_version == 1:
            async with connect(self._weight_sync) as channel:
                await call(WeightSyncServiceStub(channel).DeregisterReplica, self._request, timeout_seconds=10)
            await asyncio.Event().wait()


def misbehave(behaviour: str) -> None:
    """Patch the transport of this process: `flip` and `die` take effect in version 1."""
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


def main(
    weight_sync: str,
    model_tag: str,
    identity: policy_pb2.Replica,
    specs: Sequence[TensorSpec],
    behaviour: str,
    shared: Path | None = None,
) -> None:
    """Run the replica of a model with these tensors. `shared` is a folder like spec.weightSync.path.

    `identity` has its name. If it has a GPU, the replica can use the stand-in of NCCL.
    """
    torch.set_num_threads(1)
    misbehave(behaviour)
    nccl.Communicator = StandInCommunicator  # type: ignore[attr-defined,assignment]
    other = (*specs[1:], TensorSpec("other", "float32", (3,)))
    receiver = WeightReceiver(
        other if behaviour == "misfit" else specs, gpu=standin_gpu(identity.gpu) if identity.gpu else None
    )
    published = PublishedVersions(shared, model_tag) if shared else None
    engine = LeavingEngine(weight_sync, model_tag, identity.replica_id) if behaviour == "leave" else NoEngine()
    asyncio.run(serve(weight_sync, model_tag, Replica(engine, receiver, identity, published), identity))


async def serve(weight_sync: str, model_tag: str, replica: Replica, identity: policy_pb2.Replica) -> None:
    """Serve `replica` and keep it registered until the parent process ends."""
    server = grpc.aio.server(interceptors=[EdgeInterceptor()])
    add_InferenceServiceServicer_to_server(InferenceServicer(replica), server)
    identity.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    parent = multiprocessing.parent_process()
    assert parent is not None
    registered = asyncio.create_task(replica.keep_registered(connect(weight_sync), model_tag))
    gone = asyncio.create_task(asyncio.to_thread(parent.join))
    await asyncio.wait([registered, gone], return_when=asyncio.FIRST_COMPLETED)
    os._exit(1)
