"""Weights that stay as they are, for a replica without weight sync."""

import json
from pathlib import Path

from nexrl.errors import NotFoundError
from nexrl.models import build_model, iter_weights
from nexrl.spec.experiment import ModelSpec
from nexrl.weights.packing import snapshot
from nexrl.weights.receiver import StagedWeights
from nexrl.weights.shared import SharedBuffers

INITIAL = "initial"
MARKER = "checkpoint.json"
BUCKET_BYTES = 64 * 2**20


def fixed_weights(model: ModelSpec, weights: str) -> StagedWeights:
    """The weights in the folder of a checkpoint or, of INITIAL, those that training began with.

    Raises NotFoundError for a folder without a complete checkpoint.
    """
    version = 0
    if weights != INITIAL:
        marker = Path(weights) / MARKER
        if not marker.is_file():
            raise NotFoundError(f"weights: {weights} is not a complete checkpoint: no {MARKER}")
        version = int(json.loads(marker.read_text())["metadata"]["step"])
        model = model.model_copy(update={"path": weights, "scratch": None})
    packed = snapshot(iter_weights(build_model(model, model.seed)), policy_version=version, bucket_bytes=BUCKET_BYTES)
    shared = SharedBuffers(packed.manifest)
    for buffer, content in zip(shared, packed.buffers, strict=True):
        buffer.copy_(content)
    return StagedWeights(weights, packed.manifest, shared, packed.manifest.digest)
