"""Train batches: the sequences of one step, packed flat.

Suffixes: _N tokens of the batch, end to end; _B sequences; _T tokens of one sequence.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nexrl.columns import column_array, column_name_fault
from nexrl.errors import InvalidArgumentError, Violation


@dataclass(frozen=True)
class TrainSequence:
    """One trajectory as the trainer sees it: prompt and completion, with `loss_mask` True on the policy's own tokens.

    All arrays have one entry per token. Log-probabilities count only where the mask is True. `advantage` is one value
    for the sequence or one per token. Each of `columns` has one value for the sequence or one per token, too; a loss
    gets them in `LossInputs.columns`.
    """

    token_ids: Sequence[int] | NDArray[Any]
    loss_mask: Sequence[bool] | NDArray[Any]
    rollout_logprobs: Sequence[float] | NDArray[Any]
    advantage: float | NDArray[Any]
    reference_logprobs: Sequence[float] | NDArray[Any] | None = None
    columns: Mapping[str, ArrayLike] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch:
    """The sequences of one step, end to end.

    int64 `token_ids_N`, bool `loss_mask_N`, float32 `rollout_logprobs_N` and `advantages_N`, int64 `lengths_B`;
    float32 `reference_logprobs_N` only if the loss has a KL term. Each of `columns` has shape [N] or [B].
    """

    token_ids_N: NDArray[np.int64]
    loss_mask_N: NDArray[np.bool_]
    rollout_logprobs_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    lengths_B: NDArray[np.int64]
    reference_logprobs_N: NDArray[np.float32] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        violations = list(self._violations())
        if violations:
            raise InvalidArgumentError(f"train batch: {violations[0]}", violations=violations)

    @classmethod
    def pack(cls, sequences: Iterable[TrainSequence]) -> "TrainBatch":
        """Lay the sequences end to end, in the order given.

        Columns may differ. Numbers are promoted as in NumPy: booleans to integers, and both to float32. A column that
        is per token in one sequence is per token in all. A sequence without a column has NaN there, and the column is
        float32.

        Raises InvalidArgumentError if an array has not one entry per token, or if only some of the sequences have
        reference log-probabilities.
        """
        sequences = list(sequences)
        violations = [violation for i, s in enumerate(sequences) for violation in _violations(f"sequences[{i}]", s)]
        if violations:
            raise InvalidArgumentError(f"train batch: {violations[0]}", violations=violations)
        references = [s.reference_logprobs for s in sequences if s.reference_logprobs is not None]
        if references and len(references) != len(sequences):
            raise InvalidArgumentError("train batch: reference_logprobs: either every sequence has them or none")
        lengths_B = np.array([len(s.token_ids) for s in sequences], np.int64)
        return cls(
            token_ids_N=_end_to_end([s.token_ids for s in sequences], np.int64),
            loss_mask_N=_end_to_end([s.loss_mask for s in sequences], np.bool_),
            rollout_logprobs_N=_end_to_end([s.rollout_logprobs for s in sequences], np.float32),
            advantages_N=_end_to_end([_spread(s.advantage, len(s.token_ids)) for s in sequences], np.float32),
            lengths_B=lengths_B,
            reference_logprobs_N=_end_to_end(references, np.float32) if references else None,
            columns=_packed_columns(sequences),
        )

    @property
    def token_count(self) -> int:
        """Trained tokens."""
        return int(self.loss_mask_N.sum())

    @cached_property
    def sequence_of_tokens(self) -> NDArray[np.int64]:
        """The sequence that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths_B)), self.lengths_B)

    def parts(self, count: int) -> "list[TrainBatch]":
        """Split the batch into `count` batches of whole sequences, in their order; fewer if it has fewer sequences."""
        part_B = np.arange(len(self.lengths_B)) * count // max(len(self.lengths_B), 1)
        return [self.select(part_B == part) for part in np.unique(part_B)] or [self]

    def select(self, rows_B: NDArray[np.bool_]) -> "TrainBatch":
        """Return the batch without the sequences whose entry is False."""
        kept_N = np.repeat(rows_B, self.lengths_B)
        reference_N = self.reference_logprobs_N
        return TrainBatch(
            token_ids_N=self.token_ids_N[kept_N],
            loss_mask_N=self.loss_mask_N[kept_N],
            rollout_logprobs_N=self.rollout_logprobs_N[kept_N],
            advantages_N=self.advantages_N[kept_N],
            lengths_B=self.lengths_B[rows_B],
            reference_logprobs_N=None if reference_N is None else reference_N[kept_N],
            columns={
                name: column[kept_N if len(column) == len(kept_N) else rows_B] for name, column in self.columns.items()
            },
        )

    def columns_of(self, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns at these tokens (index into _N). A sequence's value is repeated at each of its tokens."""
        rows = self.sequence_of_tokens[tokens] if self.columns else tokens
        return {
            name: column[tokens if len(column) == len(self.token_ids_N) else rows]
            for name, column in self.columns.items()
        }

    def _violations(self) -> Iterator[Violation]:
        tokens, sequences = len(self.token_ids_N), len(self.lengths_B)
        for name in ("loss_mask_N", "rollout_logprobs_N", "advantages_N", "reference_logprobs_N"):
            values_N = getattr(self, name)
            if values_N is not None and values_N.shape != (tokens,):
                yield Violation(name, f"has shape {values_N.shape}; must have one entry per token, {tokens}")
        if np.any(self.lengths_B < 1) or self.lengths_B.sum() != tokens:
            yield Violation("lengths_B", f"must be positive and add up to the number of tokens, {tokens}")
        elif self.loss_mask_N.shape == (tokens,) and np.any(self.loss_mask_N[_starts(self.lengths_B)]):
            yield Violation("loss_mask_N", "the first token of a sequence has no context, so it cannot be trained")
        for name, column in self.columns.items():
            if fault := column_name_fault(name):
                yield Violation(f"columns[{name}]", fault)
            elif column.shape not in ((tokens,), (sequences,)):
                needed = f"one entry per token, {tokens}, or per sequence, {sequences}"
                yield Violation(f"columns[{name}]", f"has shape {column.shape}; must have {needed}")


def _violations(path: str, sequence: TrainSequence) -> Iterator[Violation]:
    """Arrays of the sequence that have another length than its tokens."""
    tokens = len(sequence.token_ids)
    for name in ("loss_mask", "rollout_logprobs", "reference_logprobs"):
        values = getattr(sequence, name)
        if values is not None and len(values) != tokens:
            yield Violation(f"{path}.{name}", f"has {len(values)} entries; must have one per token, {tokens}")
    per_token_or_one = {"advantage": sequence.advantage, **{f"columns[{n}]": c for n, c in sequence.columns.items()}}
    for name, value in per_token_or_one.items():
        if np.shape(value) not in ((), (tokens,)):
            yield Violation(f"{path}.{name}", f"has shape {np.shape(value)}; must have one entry, or {tokens}")


def _packed_columns(sequences: Sequence[TrainSequence]) -> dict[str, NDArray[Any]]:
    names = sorted({name for sequence in sequences for name in sequence.columns})
    return {name: _packed_column(name, sequences) for name in names}


def _packed_column(name: str, sequences: Sequence[TrainSequence]) -> NDArray[Any]:
    absent = np.float32(np.nan)
    columns = [column_array(name, sequence.columns.get(name, absent)) for sequence in sequences]
    if any(column.ndim for column in columns):
        columns = [np.broadcast_to(c, len(s.token_ids)) for c, s in zip(columns, sequences, strict=True)]
    # NumPy promotes int64 and float32 to float64.
    return column_array(name, np.concatenate([np.atleast_1d(column) for column in columns]))


def _starts(lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths_B) - lengths_B


def _spread(value: float | NDArray[Any], tokens: int) -> NDArray[np.float32]:
    return np.broadcast_to(np.asarray(value, np.float32), (tokens,))


def _end_to_end(arrays: Sequence[Sequence[Any] | NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)
