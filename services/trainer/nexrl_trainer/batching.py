"""Batches: the sequences of one step, packed flat.

Suffixes: _N tokens of the batch, end to end; _B sequences.
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


def _starts(lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths_B) - lengths_B


def _end_to_end(arrays: Sequence[Sequence[Any] | NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)
