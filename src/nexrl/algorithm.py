"""Losses, advantages and algorithm processors: what user code for the trainer is written against.

Suffixes: _T trained tokens of one call, flat (no padding, no masked token); _B samples of the batch.

The experiment file names such code as `module:name`, in `algorithm.loss`, `algorithm.advantage` and
`algorithm.processor`. Only the trainer imports it, so it may use PyTorch. This module does not import PyTorch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nexrl.train_batch import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

    from nexrl.spec.algorithm import AlgorithmSpec


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at. Every tensor has shape [T]; all are float32 except `sequence_T` and some `columns`.

    `logprobs_T` come from the model being trained and carry the gradient. `rollout_logprobs_T` were recorded when the
    tokens were sampled. Both are at the sampling temperature. `weights_T` carries the mask, the aggregation and the
    denominator of the whole step.

    `sequence_T` (int64) numbers the sequences of this call from 0. All trained tokens of a sequence are in the same
    call, in their order. So a loss may compute with whole sequences:

        sums_S = values_T.new_zeros(int(sequence_T.max()) + 1).index_add(0, sequence_T, values_T)

    `columns` has the columns of the trajectories and those that the algorithm processor added. A column with one value
    per sequence has that value at each of its tokens. Floats are float32, integers int64. A column that some sequences
    of the batch lack is float32, and NaN at their tokens.
    """

    logprobs_T: "Tensor"
    rollout_logprobs_T: "Tensor"
    advantages_T: "Tensor"
    weights_T: "Tensor"
    sequence_T: "Tensor"
    columns: "Mapping[str, Tensor]" = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is a scalar to call backward on; `clipped_T` (bool) marks tokens whose ratio met a limit, for metrics."""

    loss: "Tensor"
    clipped_T: "Tensor"


class Loss(Protocol):
    """A policy loss. `algorithm.lossConfig` becomes its keyword arguments.

    The loss must be a sum over tokens, each weighted with `weights_T`: a step is split into several calls, and their
    losses are added. The split never cuts a sequence. Divide by nothing that depends on the number of tokens or
    sequences of the call. The trainer adds entropy bonus and KL penalty itself.
    """

    def __call__(self, inputs: LossInputs, **config: Any) -> LossOutputs:
        """Return the loss of these tokens."""
        ...


Advantage: TypeAlias = Callable[[NDArray[np.floating[Any]], NDArray[np.integer[Any]]], NDArray[np.float32]]
"""Computes one advantage per sample.

Called as `advantage(rewards_B, groups_B)`. `groups_B` holds any labels: samples with equal labels are compared with
each other. With `algorithm.zeroVarianceGroups` drop or refill, groups whose rewards are all equal are not trained,
whatever their advantage.
"""


@dataclass(frozen=True)
class Trajectory:
    """What the policy saw and generated in one conversation. Arrays have one entry per token.

    `token_ids` int64, `loss_mask` bool (True on the policy's own tokens), `rollout_logprobs` float32. `columns` hold
    what the rollout worker added: an array per token, or an array of shape () for the whole trajectory.
    Trajectories of a batch may differ in them: see `nexrl.train_batch.TrainBatch.pack`. `token_rewards` are the parts
    of the reward that belong to each token.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def sequence(
        self, advantage: float | NDArray[Any], columns: Mapping[str, NDArray[Any] | float] | None = None
    ) -> TrainSequence:
        """Return the trajectory as the trainer takes it, with its own columns and these."""
        return TrainSequence(
            self.token_ids,
            self.loss_mask,
            self.rollout_logprobs,
            advantage,
            columns={**self.columns, **(columns or {})},
        )


@dataclass(frozen=True)
class Sample:
    """One attempt at a task. It has several trajectories if its conversation was restarted or edited."""

    sample_id: str
    trajectories: Sequence[Trajectory]
    is_truncated: bool = False

    @property
    def reward(self) -> float:
        """The reward of its last trajectory."""
        return self.trajectories[-1].reward


@dataclass(frozen=True)
class Batch:
    """The samples of one step: `groups` of samples that are compared with each other.

    Step `batch_id` trains it, which makes policy version `batch_id + 1`.
    """

    batch_id: int
    groups: Sequence[Sequence[Sample]]
    refilled_groups: int = 0
    """Groups that the pool dropped while it filled this batch (`algorithm.zeroVarianceGroups: refill`)."""

    @property
    def samples(self) -> Sequence[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group]

    @property
    def groups_B(self) -> NDArray[np.int64]:
        """The number of each sample's group, in the order of `samples`."""
        return np.repeat(np.arange(len(self.groups)), [len(group) for group in self.groups])

    @property
    def rewards_B(self) -> NDArray[np.float64]:
        """The reward of each sample, in the order of `samples`."""
        return np.array([sample.reward for sample in self.samples], np.float64)


@dataclass(frozen=True)
class PreparedBatch:
    """What a processor makes of a batch: the sequences to train, and metrics of the step.

    A sample whose trajectories are not among the sequences is not trained; it counts as used all the same.
    """

    sequences: Sequence[TrainSequence]
    metrics: Mapping[str, float] = field(default_factory=dict)


ForwardPass: TypeAlias = Callable[[Sequence[TrainSequence]], list[NDArray[np.float32]]]
"""Computes the log-probability of each trained token, 0 elsewhere: one array per sequence, one entry per token."""


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor may use.

    `advantage` is what `algorithm.advantage` names. `policy_logprobs` runs the model with the weights that the trainer
    holds at that moment: those of version `batch_id` in mode sync, an older version where batches are prepared ahead.
    It waits while the trainer makes a step. `reference_logprobs` runs the initial model, which the first call builds.
    `teacher_logprobs` runs `algorithm.teacher`; it raises FailedPreconditionError without one.
    """

    algorithm: "AlgorithmSpec"
    advantage: Advantage
    policy_logprobs: ForwardPass
    reference_logprobs: ForwardPass
    teacher_logprobs: ForwardPass


class Processor(ABC):
    """Makes train batches. Subclass it, override `fit`, and name the class in `algorithm.processor`.

    The trainer makes one object and calls `fit` in a thread, one batch after the other, ahead of training. If
    `algorithm.klCoefficient` is not 0, or the loss is dpo, the trainer adds reference log-probabilities to sequences
    without them. For loss dpo, the column `pair` has the number of each sequence's pair, negative for the worse sample.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def fit(self, batch: Batch) -> PreparedBatch:
        """Return what to train of `batch`. It may be called again for the same batch after a restart."""
