"""A validator service for tests of RPC calls. The test chooses its answers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from nexrl.rpc.client import call, connect
from nexrl.rpc.interceptor import HANDLED
from nexrl.rpc.server import ServiceProcess
from nexrl.v1 import validator_service_pb2 as pb
from nexrl.v1 import weight_sync_service_pb2 as stream_pb
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub, add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from tests.support.rollout import Fake

SERVICE = "nexrl.v1.ValidatorService"
Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[pb.StartValidationRequest], Awaitable[pb.StartValidationResponse]]


async def answer_seven(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
    return pb.StartValidationResponse(samples=7)


class ValidatorServicer(Fake):
    """StartValidation calls `behaviour` and records the request ids. WatchReplicas sends one message, then fails."""

    def __init__(self, behaviour: Behaviour = answer_seven) -> None:
        super().__init__()
        self.behaviour = behaviour
        self.request_ids: list[str] = []

    async def StartValidation(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
        self.request_ids.append(request.request_id)
        return await self.behaviour(request)

    async def WatchReplicas(
        self, request: stream_pb.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[stream_pb.WatchReplicasResponse]:
        yield stream_pb.WatchReplicasResponse(committed_version=1)
        raise ZeroDivisionError("a secret")


def serving(servicer: ValidatorServicer, *, is_ready: bool = True) -> Callable[[ServiceProcess], Awaitable[None]]:
    async def start(process: ServiceProcess) -> None:
        process.add(add_ValidatorServiceServicer_to_server, servicer, SERVICE)
        process.add(add_WeightSyncServiceServicer_to_server, servicer, "nexrl.v1.WeightSyncService")
        if is_ready:
            await process.set_ready()

    return start


async def start_validation(address: str, *, timeout_seconds: float = 10) -> pb.StartValidationResponse:
    async with connect(address) as channel:
        request = pb.StartValidationRequest(request_id="one")
        return await call(ValidatorServiceStub(channel).StartValidation, request, timeout_seconds=timeout_seconds)


def handled(code: str, service: str = SERVICE, method: str = "StartValidation") -> float:
    return float(HANDLED.labels(service, method, code)._value.get())


def raising(error: BaseException) -> Behaviour:
    async def behaviour(request: pb.StartValidationRequest) -> pb.StartValidationResponse:
        raise error

    return behaviour
