"""nexrl.v1.InferenceService over a replica."""

from typing import Any

import grpc

from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceServicer
from nexrl.v1.trajectory_pb2 import Draw
from nexrl.weights.manifest_proto import manifest_from_wire
from nexrl.weights.rendezvous_proto import rendezvous_from_wire
from nexrl_inference.replica import Replica
from nexrl_inference.requests import Completion, GenerationRequest

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(InferenceServiceServicer):
    """Translates requests to calls of the replica, and its answers to responses."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        result = await self._replica.generate(
            GenerationRequest(
                request_id=request.request_id,
                prompt_ids=tuple(request.prompt_token_ids),
                max_new_tokens=request.max_new_tokens,
                n=request.n,
                temperature=request.temperature,
                top_p=request.top_p or 1.0,
                top_k=request.top_k,
                seeds=tuple(request.seeds),
                drawn_tokens=request.drawn_tokens,
                stop_token_ids=tuple(request.stop_token_ids),
                stop=tuple(request.stop),
            )
        )
        return pb.GenerateResponse(completions=[_completion(completion, request) for completion in result.completions])

    async def ReceiveWeights(self, request: pb.ReceiveWeightsRequest, context: Context) -> pb.ReceiveWeightsResponse:
        rendezvous, manifest = rendezvous_from_wire(request.rendezvous), manifest_from_wire(request.manifest)
        return pb.ReceiveWeightsResponse(digest=await self._replica.receive(request.sync_id, rendezvous, manifest))

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Context) -> pb.CommitWeightsResponse:
        await self._replica.commit(request.sync_id)
        return pb.CommitWeightsResponse()

    async def GetReplicaState(self, request: pb.GetReplicaStateRequest, context: Context) -> pb.GetReplicaStateResponse:
        running, queued = self._replica.load
        return pb.GetReplicaStateResponse(
            replica=self._replica.state(), digest=self._replica.digest, running=running, queued=queued
        )


def _completion(completion: Completion, request: pb.GenerateRequest) -> pb.GeneratedCompletion:
    return pb.GeneratedCompletion(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        finish_reason=completion.finish_reason,
        draw=_draw(completion, request),
    )


def _draw(completion: Completion, request: pb.GenerateRequest) -> Draw | None:
    if request.drawn_tokens:
        return None
    return Draw(
        seed=completion.seed,
        temperature=request.temperature,
        top_p=request.top_p or 1.0,
        top_k=request.top_k,
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        stop=request.stop,
    )
