"""Batches: the sequences of one step, packed flat, and their split into padded micro-batches.

Suffixes: _N tokens of the batch, end to end; _B sequences; _T input positions of a micro-batch; _P trained (predicted)
tokens of a micro-batch, flat. Pure NumPy: what a step computes must not depend on how it is split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nexrl.errors import InvalidArgumentError, Violation

Aggregation = Literal["token", "sequence"]


@dataclass(frozen=True)
class TrainSequence:
    """One trajectory as the trainer sees it: prompt and completion, with `loss_mask` True on the policy's own tokens.

    All arrays have one entry per token. Log-probabilities count only where the mask is True.
    """

    token_ids: Sequence[int] | NDArray[Any]
    loss_mask: Sequence[bool] | NDArray[Any]
    rollout_logprobs: Sequence[float] | NDArray[Any]
    advantage: float
    reference_logprobs: Sequence[float] | NDArray[Any] | None = None


@dataclass(frozen=True)
class TrainBatch:
    """The sequences of one step, end to end.

    int64 `token_ids_N`, bool `loss_mask_N`, float32 `rollout_logprobs_N` and `advantages_N`, int64 `lengths_B`;
    float32 `reference_logprobs_N` only if the loss has a KL term.
    """

    token_ids_N: NDArray[np.int64]
    loss_mask_N: NDArray[np.bool_]
    rollout_logprobs_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    lengths_B: NDArray[np.int64]
    reference_logprobs_N: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        violations = list(self._violations())
        if violations:
            raise InvalidArgumentError(f"train batch: {violations[0]}", violations=violations)

    @classmethod
    def pack(cls, sequences: Sequence[TrainSequence]) -> "TrainBatch":
        """Lay the sequences end to end, in the order given. All or none must have reference log-probabilities."""
        references = [s.reference_logprobs for s in sequences if s.reference_logprobs is not None]
        if references and len(references) != len(sequences):
            raise InvalidArgumentError("train batch: reference_logprobs: either every sequence has them or none")
        lengths_B = np.array([len(s.token_ids) for s in sequences], np.int64)
        advantages_B = np.array([s.advantage for s in sequences], np.float32)
        return cls(
            token_ids_N=_end_to_end([s.token_ids for s in sequences], np.int64),
            loss_mask_N=_end_to_end([s.loss_mask for s in sequences], np.bool_),
            rollout_logprobs_N=_end_to_end([s.rollout_logprobs for s in sequences], np.float32),
            advantages_N=np.repeat(advantages_B, lengths_B),
            lengths_B=lengths_B,
            reference_logprobs_N=_end_to_end(references, np.float32) if references else None,
        )

    @property
    def token_count(self) -> int:
        """Trained tokens."""
        return int(self.loss_mask_N.sum())

    @property
    def sequence_of_tokens(self) -> NDArray[np.int64]:
        """The sequence that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths_B)), self.lengths_B)

    def select(self, rows_B: NDArray[np.bool_]) -> "TrainBatch":
        """The batch without the sequences whose entry is False: they leave both the loss and its denominator."""
        kept_N = np.repeat(rows_B, self.lengths_B)
        reference_N = self.reference_logprobs_N
        return TrainBatch(
            token_ids_N=self.token_ids_N[kept_N],
            loss_mask_N=self.loss_mask_N[kept_N],
            rollout_logprobs_N=self.rollout_logprobs_N[kept_N],
            advantages_N=self.advantages_N[kept_N],
            lengths_B=self.lengths_B[rows_B],
            reference_logprobs_N=None if reference_N is None else reference_N[kept_N],
        )

    def _violations(self) -> Iterator[Violation]:
        tokens = len(self.token_ids_N)
        for name in ("loss_mask_N", "rollout_logprobs_N", "advantages_N", "reference_logprobs_N"):
            values_N = getattr(self, name)
            if values_N is not None and values_N.shape != (tokens,):
                yield Violation(name, f"has shape {values_N.shape}; must have one entry per token, {tokens}")
        if np.any(self.lengths_B < 1) or self.lengths_B.sum() != tokens:
            yield Violation("lengths_B", f"must be positive and add up to the number of tokens, {tokens}")
        elif self.loss_mask_N.shape == (tokens,) and np.any(self.loss_mask_N[_starts(self.lengths_B)]):
            yield Violation("loss_mask_N", "the first token of a sequence has no context, so it cannot be trained")


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass needs.

    `input_ids_BT` (int64) is padded on the right; a causal model needs no attention mask then, because no real position
    can see a later one. Token `tokens_P[i]` of the batch (index into _N) is predicted at the flat input position
    `positions_P[i]` (index into B*T).
    """

    input_ids_BT: NDArray[np.int64]
    positions_P: NDArray[np.intp]
    tokens_P: NDArray[np.int64]


def token_weights(batch: TrainBatch, aggregation: Aggregation, denominator: int | None = None) -> NDArray[np.float32]:
    """The weight of each token in the loss; 0 outside the mask. Shape [N].

    "token": the mean over all trained tokens (DAPO, arXiv 2503.14476). "sequence": over sequences, of each one's token
    mean (GRPO, arXiv 2402.03300). `denominator`: trained tokens, or sequences with such, of the WHOLE step where the
    batch is only a part of it; by default what the batch has.
    """
    sequence_N = batch.sequence_of_tokens
    trained_B = np.bincount(sequence_N, weights=batch.loss_mask_N, minlength=len(batch.lengths_B))
    match aggregation:
        case "token":
            total = denominator or int(trained_B.sum())
            weights_N = batch.loss_mask_N / max(total, 1)
        case "sequence":
            total = denominator or int((trained_B > 0).sum())
            weights_N = batch.loss_mask_N / (max(total, 1) * np.maximum(trained_B, 1)[sequence_N])
    return weights_N.astype(np.float32)


def split_batch(batch: TrainBatch, max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` padded input tokens, shortest sequences first, otherwise in batch order.

    A sequence longer than the limit gets a micro-batch of its own; one with nothing to train is left out.
    """
    starts_B = _starts(batch.lengths_B)
    inputs_B = _input_lengths(batch, starts_B)
    order = np.argsort(inputs_B, kind="stable")
    order = order[inputs_B[order] > 0]
    return [_micro_batch(batch, starts_B[rows], inputs_B[rows]) for rows in _cut(order, inputs_B, max_tokens)]


def _input_lengths(batch: TrainBatch, starts_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each sequence before its last trained one: nothing after them is predicted, so nothing after is fed."""
    trained = np.flatnonzero(batch.loss_mask_N)
    sequence = batch.sequence_of_tokens[trained]
    inputs_B = np.zeros(len(batch.lengths_B), np.int64)
    inputs_B[sequence] = trained - starts_B[sequence]  # ascending, so the last one of a sequence stays
    return inputs_B


def _cut(order: NDArray[np.intp], inputs_B: NDArray[np.int64], max_tokens: int) -> Iterator[NDArray[np.intp]]:
    first = 0
    for end, row in enumerate(order):
        # Ascending lengths: this row is as long as the padded micro-batch would be with it.
        if end > first and (end - first + 1) * inputs_B[row] > max_tokens:
            yield order[first:end]
            first = end
    if first < len(order):
        yield order[first:]


def _micro_batch(batch: TrainBatch, starts_B: NDArray[np.int64], inputs_B: NDArray[np.int64]) -> MicroBatch:
    columns_T = np.arange(int(inputs_B.max()))
    is_input_BT = columns_T < inputs_B[:, None]
    tokens_BT = np.where(is_input_BT, starts_B[:, None] + columns_T, 0)
    is_trained_BT = is_input_BT & batch.loss_mask_N[tokens_BT + 1]
    return MicroBatch(
        input_ids_BT=np.where(is_input_BT, batch.token_ids_N[tokens_BT], 0),
        positions_P=np.flatnonzero(is_trained_BT),
        tokens_P=tokens_BT[is_trained_BT] + 1,
    )


def _starts(lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths_B) - lengths_B


def _end_to_end(arrays: Sequence[Sequence[Any] | NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)
