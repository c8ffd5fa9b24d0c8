"""Train batches survive the wire, and what arrives shares nothing with what was sent."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.v1.train_batch_pool_service_pb2 import TrainBatch as TrainBatchMessage
from nexrl_trainer.batching import TrainBatch
from nexrl_trainer.codec import decode_train_batch, encode_train_batch


@pytest.mark.guide("B3", "B7", "B10")
def test_a_train_batch_is_read_as_it_was_written(build_batch: Callable[..., TrainBatch]) -> None:
    batch = build_batch(seed=0)
    sent = TrainBatchMessage(batch_id=3, model_tag="default", metrics={"reward_mean": 0.5})
    for name, tensor in encode_train_batch(batch).items():
        sent.tensors[name].CopyFrom(tensor)
    received = TrainBatchMessage.FromString(sent.SerializeToString())
    read = decode_train_batch(received.tensors)
    for field in fields(TrainBatch):
        np.testing.assert_array_equal(getattr(read, field.name), getattr(batch, field.name), strict=True)
    assert (received.batch_id, received.model_tag, dict(received.metrics)) == (3, "default", {"reward_mean": 0.5})


@pytest.mark.guide("B4", "B5")
def test_the_size_of_a_batch_is_the_length_of_its_lengths(build_batch: Callable[..., TrainBatch]) -> None:
    tensors = encode_train_batch(build_batch(seed=0, sequences=6))
    assert list(tensors["lengths"].shape) == [6]
    del tensors["lengths"]
    with pytest.raises(InvalidArgumentError, match="lengths: int64"):
        decode_train_batch(tensors)


@pytest.mark.guide("B6")
def test_a_batch_that_was_read_is_a_deep_copy(build_batch: Callable[..., TrainBatch]) -> None:
    tensors = encode_train_batch(build_batch(seed=0))
    changed, untouched = decode_train_batch(tensors), decode_train_batch(tensors)
    before_N = untouched.advantages_N.copy()
    changed.advantages_N[:] = 99
    np.testing.assert_array_equal(untouched.advantages_N, before_N)
