"""How large a request of each RPC may be."""

from collections.abc import Mapping

MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest request, and largest response: protobuf's limit, because a train batch can be nearly that large."""
MEBIBYTE = 2**20
MAX_PIECE_BYTES = 64 * MEBIBYTE
"""Largest message that a server reads. A larger request is sent in pieces (`nexrl.rpc.client.call_in_pieces`)."""
ROLES_WITH_SMALL_REQUESTS = ("controller", "rollout")
"""Roles of which no method takes more than DEFAULT_BYTES."""
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
    # Train batches, in pieces. Such a method is unary: the server handles one request in pieces at a time.
    "/nexrl.v1.TrainBatchPoolService/PutTrainBatch": MAX_MESSAGE_BYTES,
    "/nexrl.v1.TrainerService/Forward": MAX_MESSAGE_BYTES,
    "/nexrl.v1.TrainerService/ForwardBackward": MAX_MESSAGE_BYTES,
}


def request_limit_bytes(method: str) -> int:
    """Return the most bytes that one request to `method` may have."""
    return LARGER_BYTES.get(method, DEFAULT_BYTES)


def message_limit_bytes(role: str) -> int:
    """Return the most bytes of a message that a server of this role reads, the largest that one of its methods needs.

    gRPC knows the size of a message before it reads it, and has one limit for all methods of a server.
    """
    return DEFAULT_BYTES if role in ROLES_WITH_SMALL_REQUESTS else MAX_PIECE_BYTES
