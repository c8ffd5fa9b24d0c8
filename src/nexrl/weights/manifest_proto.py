"""Converts a Manifest to and from nexrl.v1.WeightManifest."""

from nexrl.errors import InvalidArgumentError
from nexrl.v1 import policy_pb2 as pb
from nexrl.v1 import tensor_pb2
from nexrl.weights.manifest import Manifest, TensorSpec

_TO_WIRE: dict[str, tensor_pb2.DataType.ValueType] = {
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "int32": tensor_pb2.DATA_TYPE_INT32,
    "int64": tensor_pb2.DATA_TYPE_INT64,
    "bool": tensor_pb2.DATA_TYPE_BOOL,
}
_FROM_WIRE = {number: name for name, number in _TO_WIRE.items()}


def manifest_to_wire(manifest: Manifest) -> pb.WeightManifest:
    """Return the manifest as a message."""
    return pb.WeightManifest(
        policy_version=manifest.policy_version,
        tensors=[
            pb.TensorSpec(name=tensor.name, data_type=_TO_WIRE[tensor.data_type], shape=tensor.shape)
            for tensor in manifest.tensors
        ],
        bucket_bytes=manifest.bucket_bytes,
        digest=manifest.digest,
        base_digest=manifest.base_digest,
    )


def manifest_from_wire(message: pb.WeightManifest) -> Manifest:
    """Return the manifest in `message`. Raises InvalidArgumentError if it is not valid."""
    return Manifest(
        policy_version=message.policy_version,
        tensors=tuple(_tensor_from_wire(tensor) for tensor in message.tensors),
        bucket_bytes=message.bucket_bytes,
        digest=message.digest,
        base_digest=message.base_digest,
    )


def _tensor_from_wire(message: pb.TensorSpec) -> TensorSpec:
    if message.data_type not in _FROM_WIRE:
        allowed = ", ".join(map(str, _FROM_WIRE))
        raise InvalidArgumentError(f"manifest: {message.name}: data_type {message.data_type} is not one of {allowed}")
    return TensorSpec(message.name, _FROM_WIRE[message.data_type], tuple(message.shape))
