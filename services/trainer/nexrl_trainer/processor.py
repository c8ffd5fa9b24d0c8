"""The algorithm processor: leased trajectories in, train batch out. Runs ahead of the train worker.

Suffix: _S samples of the batch.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nexrl.activity import ActivityTracker
from nexrl.algorithm import Batch, ForwardPass, PreparedBatch, Processor, ProcessorContext, Sample
from nexrl.batch_proto import decode_batch
from nexrl.client import BatchClient
from nexrl.code_reference import USER_CODE_ERRORS, load_reference
from nexrl.critic_columns import check_critic_columns
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, LeaseLostError, NexrlError, TrainingFailedError
from nexrl.exception_text import exception_text
from nexrl.run_layout import batch_path
from nexrl.spec.algorithm import AlgorithmSpec, Dpo, Grpo
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl_trainer.advantages import ADVANTAGES, advantage_function, compared_groups, zero_variance_samples
from nexrl_trainer.distillation import distilled
from nexrl_trainer.gae import rewarded
from nexrl_trainer.preference import paired, preference_pairs
from nexrl_trainer.reward_shaping import shaped_rewards
from nexrl_trainer.token_advantages import TOKEN_ADVANTAGES, token_advantages, zero_token_variance

Forward: TypeAlias = Callable[[TrainBatch], NDArray[np.float32]]
"""Log-probabilities of the trained tokens of a batch under some weights, 0 elsewhere. Shape [N]."""


class GroupProcessor(Processor):
    """algorithm.processor builtin: advantages from the rewards of samples that are compared with each other."""

    def fit(self, batch: Batch) -> PreparedBatch:
        """Compute one advantage per sample, which each of its trajectories gets, or one per token."""
        algorithm = self.context.algorithm
        rewards_S = shaped_rewards(batch, algorithm, self.context.reference_logprobs)
        groups_S = compared_groups(algorithm, batch.groups_B)
        if isinstance(algorithm, Ppo):
            return self._for_critic(batch, algorithm, rewards_S)
        if isinstance(algorithm, Grpo) and algorithm.advantage in TOKEN_ADVANTAGES:
            advantages = token_advantages(batch, rewards_S, groups_S, algorithm)
            equal_S = zero_token_variance(batch, groups_S, algorithm)
        else:
            # A sample counts once in its group's baseline, however many trajectories it has.
            advantages = list(self.context.advantage(rewards_S, groups_S)[:, np.newaxis])
            equal_S = zero_variance_samples(batch.rewards_B, groups_S)  # penalties, such as a KL estimate, are noise
        equal_S &= ~_stands_alone(batch, algorithm)
        dropped_S = _dropped(batch, equal_S, algorithm)
        sequences = [
            sequence
            for sample, advantage, is_dropped in zip(batch.samples, advantages, dropped_S, strict=True)
            if not is_dropped
            for sequence in _sequences(sample, advantage)
        ]
        metrics = {
            "zero_variance_group_fraction": _group_share(equal_S, groups_S, batch.refilled_groups),
            "advantage_std": float(np.concatenate(advantages).std()),
            "reward_penalty_mean": float((batch.rewards_B - rewards_S).mean()),
        }
        if isinstance(algorithm, Dpo):
            return paired(batch, preference_pairs(rewards_S, groups_S, ~dropped_S), metrics)
        prepared = PreparedBatch(sequences, metrics)
        if algorithm.teacher is None:
            return prepared
        return distilled(prepared, self.context.teacher_logprobs, algorithm.teacher.coefficient)

    def _for_critic(self, batch: Batch, algorithm: Ppo, rewards_S: NDArray[np.float64]) -> PreparedBatch:
        """Return rewards of tokens: the step that trains the batch asks the critic, and computes advantages."""
        equal_S = zero_variance_samples(batch.rewards_B, batch.groups_B) & ~_is_alone(batch)
        metrics = {
            "zero_variance_group_fraction": _group_share(equal_S, batch.groups_B, batch.refilled_groups),
            "reward_penalty_mean": float((batch.rewards_B - rewards_S).mean()),
        }
        return rewarded(batch, rewards_S, _dropped(batch, np.zeros_like(equal_S), algorithm), metrics)


class AlgorithmProcessor:
    """Leases batches, has `processor` make a train batch of each, and puts it.

    `reference` computes log-probabilities under the initial weights. Batches are written to `trajectories`, one file
    each (a serialized nexrl.v1.BatchLease).
    """

    def __init__(
        self,
        processor: Processor,
        client: BatchClient,
        activity: ActivityTracker,
        trajectories: Path,
        reference: Forward,
    ) -> None:
        self.processor = processor
        self._client = client
        self._activity = activity
        self._trajectories = trajectories
        self._reference = reference

    async def run(self) -> None:
        """Process batches until no further batch can follow."""
        while True:
            with self._activity.track("wait_batch", waiting_on="trajectory-pool"):
                answer = await self.lease_batch()
            if answer.exhausted:
                return
            if answer.HasField("lease"):
                with self._activity.track("process_batch"):
                    await self.put_train_batch(answer.lease, *await asyncio.to_thread(self.fit, answer.lease))

    def fit(self, lease: pool_pb.BatchLease) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the train batch of a leased batch, with metrics. Errors of user code are raised with its reference."""
        algorithm = self.processor.context.algorithm
        with _naming(algorithm.processor):
            prepared = self.processor.fit(decode_batch(lease))
            if not isinstance(prepared, PreparedBatch):
                raise InvalidArgumentError(f"fit returned {type(prepared).__name__}; a PreparedBatch is needed")
            batch = TrainBatch.pack(prepared.sequences)
            if isinstance(algorithm, Ppo):
                check_critic_columns(batch)
        if algorithm.needs_initial_model and batch.reference_logprobs_N is None:
            batch = replace(batch, reference_logprobs_N=self._reference(batch))
        return batch, {**batch_metrics(lease), **prepared.metrics}

    async def lease_batch(self) -> pool_pb.LeaseBatchResponse:
        try:
            return await self._client.lease()
        except LeaseLostError as error:
            await self._report_lost(error, "lease_batch")
            return pool_pb.LeaseBatchResponse()

    async def put_train_batch(self, lease: pool_pb.BatchLease, batch: TrainBatch, metrics: Mapping[str, float]) -> None:
        """Put the train batch; drop it if the lease was lost."""
        await asyncio.to_thread(self._write, lease)
        try:
            await self._client.put(lease, batch, metrics)
        except LeaseLostError as error:
            await self._report_lost(error, "put_train_batch")

    async def _report_lost(self, error: LeaseLostError, work_context: str) -> None:
        """Another processor has the batch now; or Redis lost it, and the ledger will form another."""
        await self._activity.report(error, work_context=work_context, severity=SEVERITY_WARNING)

    def _write(self, lease: pool_pb.BatchLease) -> None:
        path = batch_path(self._trajectories, lease.batch_id)
        partial = path.with_suffix(".tmp")
        partial.write_bytes(lease.SerializeToString())
        partial.replace(path)


def build_processor(
    algorithm: AlgorithmSpec, folder: Path, policy: Forward, reference: Forward, teacher: Forward | None = None
) -> Processor:
    """Return the processor that `algorithm.processor` names; user code is looked up in `folder`.

    `policy` and `reference` compute log-probabilities under the current and under the initial weights, `teacher` those
    under the teacher, if there is one. Raises InvalidArgumentError if user code cannot be loaded.
    """
    context = ProcessorContext(
        algorithm,
        advantage_function(algorithm, folder),
        _by_sequence(policy),
        _by_sequence(reference),
        _by_sequence(teacher or _no_teacher),
    )
    if algorithm.processor == "builtin":
        return GroupProcessor(context)
    found = load_reference(algorithm.processor, folder)
    if not (isinstance(found, type) and issubclass(found, Processor)):
        raise InvalidArgumentError(
            f"algorithm.processor {algorithm.processor}: not a subclass of nexrl.algorithm.Processor"
        )
    try:
        return found(context)
    except USER_CODE_ERRORS as error:
        raise InvalidArgumentError(f"algorithm.processor {algorithm.processor}: {exception_text(error)}") from error


def batch_metrics(lease: pool_pb.BatchLease) -> dict[str, float]:
    """Return the metrics of a batch before training: rewards, lengths in tokens, staleness in steps, truncation."""
    samples = [sample for group in lease.groups for sample in group.samples]
    trajectories = [trajectory for sample in samples for trajectory in sample.trajectories]
    oldest = [min(span.policy_version for span in t.spans) for t in trajectories if t.spans]
    lengths = [sum(t.loss_mask) for t in trajectories]
    metrics = {
        "samples": float(len(samples)),
        "refilled_groups": float(lease.refilled_groups),
        "reward_mean": fmean(t.reward for t in trajectories),
        "response_tokens": fmean(lengths),
        "truncated_fraction": fmean(sample.verdict == pb.VERDICT_TRUNCATED for sample in samples),
        "staleness_steps": fmean(lease.batch_id - version for version in oldest) if oldest else 0.0,
        "staleness_steps_max": float(max((lease.batch_id - version for version in oldest), default=0)),
    }
    return metrics | {f"reward/{name}": value for name, value in _component_means(trajectories).items()}


def _component_means(trajectories: Sequence[pb.Trajectory]) -> Mapping[str, float]:
    names = {name for t in trajectories for name in t.reward_components}
    return {
        name: fmean(t.reward_components[name] for t in trajectories if name in t.reward_components) for name in names
    }


@contextmanager
def _naming(processor: str) -> Iterator[None]:
    """Add the name of the user's processor to errors that its code raises. Errors of the built-in one do not change."""
    try:
        yield
    except USER_CODE_ERRORS as error:
        if ":" not in processor:
            raise
        if isinstance(error, NexrlError):
            raise type(error)(f"algorithm.processor {processor}: {error.message}") from error
        message = f"algorithm.processor {processor}: {exception_text(error)}"
        raise TrainingFailedError(message) from error


def _no_teacher(batch: TrainBatch) -> NDArray[np.float32]:
    raise FailedPreconditionError("teacher_logprobs: the experiment has no teacher; set algorithm.teacher")


def _by_sequence(forward: Forward) -> ForwardPass:
    def by_sequence(sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        batch = TrainBatch.pack(sequences)
        return np.split(forward(batch), np.cumsum(batch.lengths_B)[:-1]) if sequences else []

    return by_sequence


def _sequences(sample: Sample, advantage: NDArray[np.float32]) -> Iterator[TrainSequence]:
    """Yield the trajectories of the sample with its advantage: one value, or one per generated token."""
    if len(advantage) == 1:  # also of a sample of one token, whose advantage the loss mask confines to it
        yield from (trajectory.sequence(float(advantage[0])) for trajectory in sample.trajectories)
        return
    parts = np.split(advantage, np.cumsum([int(each.loss_mask.sum()) for each in sample.trajectories])[:-1])
    for trajectory, part in zip(sample.trajectories, parts, strict=True):
        advantages_T = np.zeros(len(trajectory.token_ids), np.float32)
        advantages_T[trajectory.loss_mask] = part
        yield trajectory.sequence(advantages_T)


def _dropped(batch: Batch, equal_S: NDArray[np.bool_], algorithm: AlgorithmSpec) -> NDArray[np.bool_]:
    """Return which samples count in the baseline and are not trained."""
    truncated_S = np.array([sample.is_truncated for sample in batch.samples])
    dropped_S = np.zeros_like(equal_S)
    if algorithm.zero_variance_groups != "keep" and algorithm.teacher is None:  # a teacher tells equal samples apart
        dropped_S |= equal_S
    if algorithm.truncated_samples == "drop":
        dropped_S |= truncated_S
    return dropped_S


def _stands_alone(batch: Batch, algorithm: AlgorithmSpec) -> NDArray[np.bool_]:
    """Return which samples have none beside them, and need none. Advantages of ours do: they would be 0."""
    is_compared = isinstance(algorithm, Grpo) and algorithm.advantage in ADVANTAGES
    if is_compared and algorithm.loss != "cross_entropy":
        return np.zeros(len(batch.samples), np.bool_)
    return _is_alone(batch)


def _is_alone(batch: Batch) -> NDArray[np.bool_]:
    sizes = np.array([len(group) for group in batch.groups])
    alone_S: NDArray[np.bool_] = np.repeat(sizes == 1, sizes)
    return alone_S


def _group_share(equal_S: NDArray[np.bool_], groups_S: NDArray[Any], refilled: int) -> float:
    """Return the share of groups of equal rewards, with those that the pool has `refilled`."""
    return (len(np.unique(groups_S[equal_S])) + refilled) / (len(np.unique(groups_S)) + refilled)
