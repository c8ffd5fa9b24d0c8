"""How large a request of each RPC may be."""

from collections.abc import Mapping

MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest message that either side accepts: protobuf's limit, because a train batch can be nearly that large."""
MEBIBYTE = 2**20
MAX_SMALLER_BYTES = 64 * MEBIBYTE
SMALLER_ROLES = ("controller", "weight-sync", "inference", "rollout")
"""Roles without train batches: gRPC reads no message above MAX_SMALLER_BYTES there."""
DEFAULT_BYTES = MEBIBYTE
LARGER_BYTES: Mapping[str, int] = {
    # Prompts of a million tokens, tasks, and thousands of samples by name.
    "/nexrl.v1.DataLoaderService/AddTask": 16 * MEBIBYTE,
    "/nexrl.v1.DataLoaderService/RenewLeases": 16 * MEBIBYTE,
    "/nexrl.v1.DataLoaderService/ReturnSamples": 16 * MEBIBYTE,
    "/nexrl.v1.InferenceService/Generate": 16 * MEBIBYTE,
    "/nexrl.v1.TrainBatchPoolService/AckTrainBatch": 16 * MEBIBYTE,
    "/nexrl.v1.TrainBatchPoolService/FailTrainBatch": 16 * MEBIBYTE,
    # Results of several samples, of at most 8 MiB each.
    "/nexrl.v1.TrajectoryPoolService/PutSamples": 64 * MEBIBYTE,
    "/nexrl.v1.ValidatorService/PutValidationSamples": 64 * MEBIBYTE,
    # A manifest that names each of up to 400,000 weights.
    "/nexrl.v1.InferenceService/ReceiveWeights": 64 * MEBIBYTE,
    "/nexrl.v1.WeightSyncService/PrepareSync": 64 * MEBIBYTE,
    # Train batches.
    "/nexrl.v1.TrainBatchPoolService/PutTrainBatch": MAX_MESSAGE_BYTES,
    "/nexrl.v1.TrainerService/Forward": MAX_MESSAGE_BYTES,
    "/nexrl.v1.TrainerService/ForwardBackward": MAX_MESSAGE_BYTES,
}


def request_limit_bytes(method: str) -> int:
    """Return the most bytes that one message to `method` may have. gRPC for Python has one limit for a whole server."""
    return LARGER_BYTES.get(method, DEFAULT_BYTES)
