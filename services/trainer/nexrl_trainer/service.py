"""nexrl.v1.TrainerService: training as a service, over the same learner as the experiment's own loop.

nexrl.v1.TrainerReplicaService: the ranks of another replica of the trainer.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.tensor_proto import encode_tensor
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import decode_train_batch
from nexrl.v1 import trainer_replica_service_pb2 as replica_pb
from nexrl.v1 import trainer_service_pb2 as pb
from nexrl.v1.trainer_replica_service_pb2_grpc import TrainerReplicaServiceServicer
from nexrl.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from nexrl_trainer.hosted_ranks import HostedRanks
from nexrl_trainer.loop import ResultT, TrainWorker
from nexrl_trainer.step_metrics import known

Context = grpc.aio.ServicerContext[Any, Any]
MAX_ANSWERS = 1024


class TrainerServicer(TrainerServiceServicer):
    """Calls that change weights are refused while the experiment's loop trains, and answered once per request id."""

    def __init__(self, worker: TrainWorker) -> None:
        self._worker = worker
        self._answers: dict[str, Any] = {}

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        logprobs_N = await self._worker.forward(decode_train_batch(request.tensors))
        return pb.ForwardResponse(logprobs=encode_tensor(logprobs_N))

    async def ForwardBackward(self, request: pb.ForwardBackwardRequest, context: Context) -> pb.ForwardBackwardResponse:
        batch = decode_train_batch(request.tensors)
        _check_finite(batch)
        self._worker.learner.check_train_batch(batch)

        def accumulate() -> pb.ForwardBackwardResponse:
            metrics = self._worker.learner.forward_backward(batch)
            return pb.ForwardBackwardResponse(metrics=known(metrics))

        return await self._change(request.request_id, accumulate)

    async def OptimizerStep(self, request: pb.OptimizerStepRequest, context: Context) -> pb.OptimizerStepResponse:
        def update() -> pb.OptimizerStepResponse:
            metrics = self._worker.learner.optimizer_step()
            return pb.OptimizerStepResponse(policy_version=metrics.step, metrics=known(metrics))

        return await self._change(request.request_id, update)

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        self._refuse_while_training()
        async with self._worker.weights_lock:
            return pb.SaveCheckpointResponse(path=str(await self._worker.save_checkpoint()))

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Context) -> pb.LoadCheckpointResponse:
        self._refuse_while_training()
        async with self._worker.weights_lock:
            await self._worker.load_checkpoint(Path(request.path))
        return pb.LoadCheckpointResponse(policy_version=self._worker.learner.step)

    async def PublishWeights(self, request: pb.PublishWeightsRequest, context: Context) -> pb.PublishWeightsResponse:
        self._refuse_while_training()
        await self._worker.publish()
        return pb.PublishWeightsResponse(policy_version=self._worker.learner.step)

    async def GetTrainerState(self, request: pb.GetTrainerStateRequest, context: Context) -> pb.GetTrainerStateResponse:
        return pb.GetTrainerStateResponse(
            policy_version=self._worker.learner.step,
            total_steps=self._worker.spec.trainer.steps,
            activity=self._worker.doing,
            model_tag=self._worker.spec.model.tag,
        )

    async def _change(self, request_id: str, change: Callable[[], ResultT]) -> ResultT:
        self._refuse_while_training()
        async with self._worker.weights_lock:
            if request_id not in self._answers:
                answer = await self._worker.in_torch_thread(change)
                self._answers[request_id] = answer
                if len(self._answers) > MAX_ANSWERS:
                    del self._answers[next(iter(self._answers))]
            found: ResultT = self._answers[request_id]
            return found

    def _refuse_while_training(self) -> None:
        if not self._worker.is_done:
            raise FailedPreconditionError("the experiment's own loop is training; call again when it has ended")


class ReplicaServicer(TrainerReplicaServiceServicer):
    """The main process of a replica other than 0."""

    def __init__(self, hosted: HostedRanks) -> None:
        self._hosted = hosted

    async def RunRanks(
        self, request: replica_pb.RunRanksRequest, context: Context
    ) -> AsyncIterator[replica_pb.RunRanksResponse]:
        async for event in self._hosted.serve(request):
            yield event

    async def EndRanks(self, request: replica_pb.EndRanksRequest, context: Context) -> replica_pb.EndRanksResponse:
        self._hosted.end(request)
        return replica_pb.EndRanksResponse()


def _check_finite(batch: TrainBatch) -> None:
    """Raise InvalidArgumentError if a value at a trained token is not finite: it would spoil the gradient."""
    values = {"rollout_logprobs": batch.rollout_logprobs_N, "advantages": batch.advantages_N}
    if batch.reference_logprobs_N is not None:
        values["reference_logprobs"] = batch.reference_logprobs_N
    for name, values_N in values.items():
        wrong = np.flatnonzero(batch.loss_mask_N & ~np.isfinite(values_N))
        if len(wrong):
            found = f"{values_N[wrong[0]]} at token {wrong[0]}"
            raise InvalidArgumentError(f"tensors[{name}]: {found}; must be finite where loss_mask is true")
