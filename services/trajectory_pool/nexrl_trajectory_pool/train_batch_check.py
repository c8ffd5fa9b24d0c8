"""Checks received train batches: the pool stores only those that the trainer can train."""

from collections.abc import Mapping

from nexrl.critic_columns import critic_violation
from nexrl.errors import InvalidArgumentError, Violation
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.critic import Ppo
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import decode_train_batch
from nexrl.v1 import tensor_pb2 as pb


def check_train_batch(
    tensors: Mapping[str, pb.Tensor], vocabulary_size: int | None, algorithm: AlgorithmSpec, max_tokens: int
) -> None:
    """Raise InvalidArgumentError if the trainer cannot train a batch of these tensors, at any attempt."""
    violation = _violation(decode_train_batch(tensors), vocabulary_size, algorithm, max_tokens)
    if violation:
        raise InvalidArgumentError(str(violation), violations=[violation])


def _violation(
    batch: TrainBatch, vocabulary_size: int | None, algorithm: AlgorithmSpec, max_tokens: int
) -> Violation | None:
    if algorithm.needs_initial_model and batch.reference_logprobs_N is None:
        return Violation("tensors[reference_logprobs]", "missing; algorithm.klCoefficient and loss dpo need it")
    longest = int(batch.lengths_B.max(initial=0))
    if longest > max_tokens:
        return Violation("tensors[lengths]", f"{longest} tokens; at most {max_tokens} (inference.maxTokensPerRow)")
    lowest, highest = (int(batch.token_ids_N.min(initial=0)), int(batch.token_ids_N.max(initial=0)))
    if lowest < 0:
        return Violation("tensors[token_ids]", f"{lowest}; must be at least 0")
    if vocabulary_size is not None and highest >= vocabulary_size:
        return Violation("tensors[token_ids]", f"{highest}; the model has {vocabulary_size} tokens")
    return critic_violation(batch) if isinstance(algorithm, Ppo) else None
