"""The algorithm processor: leased trajectories in, train batch out. Runs ahead of the train worker.

Suffix: _S samples of the batch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from nexrl.activity import ActivityTracker
from nexrl.errors import LeaseLostError
from nexrl.rpc.client import call, new_request_id
from nexrl.spec.experiment import AlgorithmSpec
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl.v1.train_batch_pool_service_pb2_grpc import TrainBatchPoolServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl_trainer.advantages import ADVANTAGES, zero_variance_samples
from nexrl_trainer.batching import TrainBatch, TrainSequence
from nexrl_trainer.codec import encode_train_batch

WAIT_SECONDS = 20.0
CALL_SECONDS = 60.0

ReferenceLogprobs = Callable[[TrainBatch], NDArray[np.float32]]


class AlgorithmProcessor:
    """Turns each batch into a train batch. Subclass and override `fit` to change how.

    `reference` gives the frozen model's log-probabilities, where the loss has a KL term. Batches are written to
    `trajectories`, one file each (a serialized nexrl.v1.BatchLease).
    """

    def __init__(
        self,
        algorithm: AlgorithmSpec,
        channel: grpc.aio.Channel,
        model_tag: str,
        activity: ActivityTracker,
        trajectories: Path,
        reference: ReferenceLogprobs | None = None,
    ) -> None:
        self.algorithm = algorithm
        self._pool = TrajectoryPoolServiceStub(channel)
        self._train_pool = TrainBatchPoolServiceStub(channel)
        self._model_tag = model_tag
        self._activity = activity
        self._trajectories = trajectories
        self._reference = reference

    async def run(self) -> None:
        """Process batches until none can come any more."""
        while True:
            with self._activity.track("wait_batch", waiting_on="trajectory-pool"):
                answer = await self.lease_batch()
            if answer.exhausted:
                return
            if answer.HasField("lease"):
                with self._activity.track("process_batch"):
                    await self.put_train_batch(answer.lease, await asyncio.to_thread(self.fit, answer.lease))

    def fit(self, lease: pool_pb.BatchLease) -> train_pb.TrainBatch:
        """The train batch of one leased batch: advantages by group, masks, log-probabilities, metrics.

        `put_train_batch` adds which batch it is.
        """
        samples = [(g, sample) for g, group in enumerate(lease.groups) for sample in group.samples]
        # A sample counts once in its group's baseline, however many trajectories it has.
        rewards_S = np.array([sample.trajectories[-1].reward for _, sample in samples])
        groups_S = np.array([g for g, _ in samples])
        advantages_S = self._advantages(rewards_S, groups_S)
        equal_S = zero_variance_samples(rewards_S, groups_S)
        trajectories = [(s, trajectory) for s, (_, sample) in enumerate(samples) for trajectory in sample.trajectories]
        batch = TrainBatch.pack([_sequence(trajectory, advantages_S[s]) for s, trajectory in trajectories])
        if self.algorithm.zero_variance_groups == "drop":
            batch = batch.select(~equal_S[[s for s, _ in trajectories]])
        if self._reference is not None:
            batch = replace(batch, reference_logprobs_N=self._reference(batch))
        verdicts = [sample.verdict for _, sample in samples]
        metrics = batch_metrics(lease.batch_id, [t for _, t in trajectories], verdicts)
        metrics["zero_variance_group_fraction"] = _group_share(equal_S, groups_S)
        metrics["advantage_std"] = float(advantages_S.std())
        return train_pb.TrainBatch(tensors=encode_train_batch(batch), metrics=metrics)

    def _advantages(self, rewards_S: NDArray[np.float64], groups_S: NDArray[np.int64]) -> NDArray[np.float32]:
        if self.algorithm.type == "mock":
            return rewards_S.astype(np.float32)
        return ADVANTAGES[self.algorithm.advantage](rewards_S, groups_S)

    async def lease_batch(self) -> pool_pb.LeaseBatchResponse:
        """The next batch from the trajectory pool; waits for it, not for ever."""
        request = pool_pb.LeaseBatchRequest(
            request_id=new_request_id(),
            model_tag=self._model_tag,
            wait_seconds=WAIT_SECONDS,
            worker_id=self._activity.module_name,
        )
        try:
            return await call(self._pool.LeaseBatch, request, timeout_seconds=WAIT_SECONDS + CALL_SECONDS)
        except LeaseLostError as error:
            await self._report_lost(error, "lease_batch")
            return pool_pb.LeaseBatchResponse()

    async def put_train_batch(self, lease: pool_pb.BatchLease, train_batch: train_pb.TrainBatch) -> None:
        """Hand the train batch on, which acknowledges the batch; drop it when the lease was lost."""
        await asyncio.to_thread(self._write, lease)
        train_batch.batch_id, train_batch.model_tag = lease.batch_id, lease.model_tag
        train_batch.sample_ids[:] = [sample.sample_id for group in lease.groups for sample in group.samples]
        train_batch.data_cursor = lease.data_cursor
        request = train_pb.PutTrainBatchRequest(
            request_id=new_request_id(), train_batch=train_batch, batch_attempt=lease.attempt
        )
        try:
            await call(self._train_pool.PutTrainBatch, request, timeout_seconds=CALL_SECONDS)
        except LeaseLostError as error:
            await self._report_lost(error, "put_train_batch")

    async def _report_lost(self, error: LeaseLostError, work_context: str) -> None:
        """The batch is someone else's work now; or Redis has lost it, and the ledger will form another."""
        await self._activity.report(error, work_context=work_context, severity=SEVERITY_WARNING)

    def _write(self, lease: pool_pb.BatchLease) -> None:
        path = self._trajectories / f"batch_{lease.batch_id:06d}.pb"
        partial = path.with_suffix(".tmp")
        partial.write_bytes(lease.SerializeToString())
        partial.replace(path)


def batch_metrics(
    batch_id: int, trajectories: Sequence[pb.Trajectory], verdicts: "Sequence[pb.Verdict.ValueType]"
) -> dict[str, float]:
    """What is known of a batch before it is trained: rewards, lengths in tokens, staleness in steps, truncation."""
    oldest = [min(span.policy_version for span in t.spans) for t in trajectories if t.spans]
    lengths = [sum(t.loss_mask) for t in trajectories]
    metrics = {
        "samples": float(len(verdicts)),
        "reward_mean": fmean(t.reward for t in trajectories),
        "response_tokens": fmean(lengths),
        "truncated_fraction": fmean(verdict == pb.VERDICT_TRUNCATED for verdict in verdicts),
        "staleness_steps": fmean(batch_id - version for version in oldest) if oldest else 0.0,
        "staleness_steps_max": float(max((batch_id - version for version in oldest), default=0)),
    }
    return metrics | {f"reward/{name}": value for name, value in _component_means(trajectories).items()}


def _component_means(trajectories: Sequence[pb.Trajectory]) -> Mapping[str, float]:
    names = {name for t in trajectories for name in t.reward_components}
    return {
        name: fmean(t.reward_components[name] for t in trajectories if name in t.reward_components) for name in names
    }


def _sequence(trajectory: pb.Trajectory, advantage: float) -> TrainSequence:
    return TrainSequence(
        np.array(trajectory.token_ids), np.array(trajectory.loss_mask), np.array(trajectory.logprobs), float(advantage)
    )


def _group_share(chosen_S: NDArray[np.bool_], groups_S: NDArray[Any]) -> float:
    return len(np.unique(groups_S[chosen_S])) / len(np.unique(groups_S))
