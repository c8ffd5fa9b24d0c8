"""What the trainer's service refuses before it reaches the learner."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import trainer_service_pb2 as pb
from nexrl_trainer.service import TrainerServicer

NOBODY: Any = None
BATCH = TrainBatch.pack([TrainSequence([4, 5, 6], [False, True, True], [0.0, -2.0, -2.0], 1.0, [0.0, -2.0, -2.0])])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["rollout_logprobs", "advantages", "reference_logprobs"])
async def test_a_value_that_is_not_finite_is_refused_with_its_tensor_and_token(name: str, value: float) -> None:
    changed: dict[str, Any] = {f"{name}_N": np.array([0.0, -2.0, value], np.float32)}
    batch = replace(BATCH, **changed)
    request = pb.ForwardBackwardRequest(request_id="f", tensors=encode_train_batch(batch))
    with pytest.raises(InvalidArgumentError) as refusal:
        await TrainerServicer(NOBODY).ForwardBackward(request, NOBODY)
    assert refusal.value.message == f"tensors[{name}]: {value} at token 2; must be finite where loss_mask is true"


async def test_values_at_tokens_that_are_not_trained_may_be_anything() -> None:
    batch = replace(BATCH, rollout_logprobs_N=np.array([np.nan, -2.0, -2.0], np.float32))
    request = pb.ForwardBackwardRequest(request_id="f", tensors=encode_train_batch(batch))
    with pytest.raises(AttributeError):  # it reaches the worker, which is none
        await TrainerServicer(NOBODY).ForwardBackward(request, NOBODY)
