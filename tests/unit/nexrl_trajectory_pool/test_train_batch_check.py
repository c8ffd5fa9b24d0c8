"""A train batch that no trainer could train is refused by the name of its tensor."""

import re
from typing import Any

import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import tensor_pb2 as pb
from nexrl_trajectory_pool.train_batch_check import check_train_batch

PLAIN, PENALIZED = AlgorithmSpec(), AlgorithmSpec(kl_coefficient=0.1)


def tensors(token: int = 6, **columns: Any) -> dict[str, pb.Tensor]:
    sequence = TrainSequence([5, token], [False, True], [0.0, -1.0], 1.0, **columns)
    return encode_train_batch(TrainBatch.pack([sequence]))


@pytest.mark.parametrize(
    ("token", "algorithm", "message"),
    [
        (7, PLAIN, "tensors[token_ids]: 7; the model has 7 tokens"),
        (-1, PLAIN, "tensors[token_ids]: -1; must be at least 0"),
        (6, PENALIZED, "tensors[reference_logprobs]: missing; algorithm.klCoefficient and loss dpo need it"),
        (6, AlgorithmSpec(loss="dpo"), "tensors[reference_logprobs]: missing"),
    ],
)
def test_a_batch_that_no_trainer_can_train_is_refused(token: int, algorithm: AlgorithmSpec, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)) as refusal:
        check_train_batch(tensors(token), 7, algorithm, 2)
    assert [violation.field for violation in refusal.value.violations] == [message.partition(":")[0]]


@pytest.mark.parametrize("vocabulary_size", [7, None])
def test_a_batch_that_a_trainer_can_train_is_accepted(vocabulary_size: int | None) -> None:
    check_train_batch(tensors(), vocabulary_size, PLAIN, 2)
    check_train_batch(tensors(reference_logprobs=[0.0, -1.0]), vocabulary_size, PENALIZED, 2)
    check_train_batch(encode_train_batch(TrainBatch.pack([])), vocabulary_size, PLAIN, 2)
    follower = AlgorithmSpec.model_validate({"kl_coefficient": 0.1, "reference": {"type": "average", "decay": 0.9}})
    check_train_batch(tensors(), vocabulary_size, follower, 2)  # only the step knows its reference


def test_a_sequence_for_which_the_model_has_too_few_positions_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"tensors\[lengths\]: 2 tokens; at most 1 \(inference\.maxTokensPerRow\)"
    ):
        check_train_batch(tensors(), 7, PLAIN, 1)


def test_a_batch_without_what_a_critic_learns_from_is_refused() -> None:
    algorithm = AlgorithmSpec.model_validate({"type": "ppo"})
    with pytest.raises(InvalidArgumentError, match=r"columns\[rewards\]: algorithm.type ppo needs the reward of each"):
        check_train_batch(tensors(), 7, algorithm, 2)
