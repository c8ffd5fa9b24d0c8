"""Weights that never change, for a replica without weight sync."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nexrl.adapters import BASE_FILE, adapted_layers, adapter_specs, initial_adapter, read_adapter, read_base
from nexrl.errors import FailedPreconditionError, NotFoundError
from nexrl.models import build_empty_model, build_model, iter_weights
from nexrl.run_layout import CHECKPOINT_MARKER
from nexrl.spec.model import ModelSpec
from nexrl.weights.manifest import Manifest
from nexrl.weights.packing import snapshot
from nexrl.weights.receiver import StagedWeights

INITIAL = "initial"
BUCKET_BYTES = 64 * 2**20


def fixed_weights(model: ModelSpec, weights: str, allocate: Callable[[Manifest], Sequence[Tensor]]) -> StagedWeights:
    """Read the weights from the folder of a checkpoint or, for INITIAL, build those that training began with.

    `allocate`: the backend's, see `Backend`. Raises NotFoundError for a folder without a complete checkpoint.
    """
    version = 0
    if weights != INITIAL:
        marker = Path(weights) / CHECKPOINT_MARKER
        if not marker.is_file():
            raise NotFoundError(f"weights: {weights} is not a complete checkpoint: no {CHECKPOINT_MARKER}")
        version = int(json.loads(marker.read_text())["metadata"]["step"])
    tensors = _weights(model, weights) if model.lora is None else _adapter(model, weights).items()
    packed = snapshot(tensors, policy_version=version, bucket_bytes=BUCKET_BYTES)
    if model.lora is not None and weights != INITIAL:
        packed = packed.of_base(read_base(Path(weights))[1])
    buffers = allocate(packed.manifest)
    for buffer, content in zip(buffers, packed.buffers, strict=True):
        buffer.copy_(content)
    return StagedWeights(weights, packed.manifest, buffers, packed.manifest.digest)


def _weights(model: ModelSpec, weights: str) -> Iterable[tuple[str, Tensor]]:
    if weights != INITIAL:
        model = model.model_copy(update={"path": weights, "scratch": None})
    return iter_weights(build_model(model, model.seed))


def _adapter(model: ModelSpec, weights: str) -> Mapping[str, Tensor]:
    """Return the adapter in a checkpoint, or the initial one. A new adapter changes nothing: its B is 0."""
    if weights != INITIAL:
        if not (Path(weights) / BASE_FILE).is_file():
            raise FailedPreconditionError(f"weights: {weights} is no adapter, but model.lora is set; leave it out")
        return read_adapter(Path(weights))
    assert model.lora is not None
    layers = adapted_layers(build_empty_model(model), model.lora)
    zeros = {spec.name: torch.zeros(spec.shape) for spec in adapter_specs(layers, model.lora.rank)}
    return initial_adapter(model.lora, layers) or zeros
