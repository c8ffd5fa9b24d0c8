"""Train batches on the wire: TrainBatch arrays <-> the named tensors of nexrl.v1.TrainBatch."""

from collections.abc import Mapping

import numpy as np

from nexrl.columns import OWN_TENSORS
from nexrl.errors import InvalidArgumentError
from nexrl.tensor_proto import decode_tensors, encode_tensors
from nexrl.train_batch import TrainBatch
from nexrl.v1 import tensor_pb2 as pb

_REQUIRED = {
    "token_ids": np.int64,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "advantages": np.float32,
    "lengths": np.int64,
}
_OPTIONAL = {"reference_logprobs": np.float32}


def encode_train_batch(batch: TrainBatch) -> dict[str, pb.Tensor]:
    """Return the named tensors of `batch`."""
    arrays = {
        "token_ids": batch.token_ids_N,
        "loss_mask": batch.loss_mask_N,
        "rollout_logprobs": batch.rollout_logprobs_N,
        "advantages": batch.advantages_N,
        "lengths": batch.lengths_B,
    }
    if batch.reference_logprobs_N is not None:
        arrays["reference_logprobs"] = batch.reference_logprobs_N
    return encode_tensors({**arrays, **batch.columns})


def decode_train_batch(tensors: Mapping[str, pb.Tensor]) -> TrainBatch:
    """Return the batch of named tensors. Raises InvalidArgumentError that names what is missing or has another type."""
    arrays = decode_tensors(tensors)
    known = _REQUIRED | {name: dtype for name, dtype in _OPTIONAL.items() if name in arrays}
    wrong = [name for name, dtype in known.items() if name not in arrays or arrays[name].dtype != dtype]
    if wrong:
        wanted = ", ".join(f"{name}: {np.dtype(known[name])}" for name in wrong)
        raise InvalidArgumentError(f"tensors: missing or of another type; needed are {wanted}")
    return TrainBatch(
        token_ids_N=arrays["token_ids"].copy(),
        loss_mask_N=arrays["loss_mask"].copy(),
        rollout_logprobs_N=arrays["rollout_logprobs"].copy(),
        advantages_N=arrays["advantages"].copy(),
        lengths_B=arrays["lengths"].copy(),
        reference_logprobs_N=arrays["reference_logprobs"].copy() if "reference_logprobs" in arrays else None,
        columns={name: array.copy() for name, array in arrays.items() if name not in OWN_TENSORS},
    )
