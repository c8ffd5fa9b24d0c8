"""The model that a replica starts with: empty, to be filled by weight sync, or with weights that stay as they are."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from nexrl.errors import NotFoundError
from nexrl.models import build_empty_model, build_model
from nexrl.spec.experiment import ModelSpec

INITIAL = "initial"
MARKER = "checkpoint.json"


def build_with_weights(model: ModelSpec, weights: str) -> tuple[PreTrainedModel, int]:
    """The model, and the policy version of its weights: -1 for none, where `weights` is empty.

    `weights`: the folder of a checkpoint, or INITIAL for those that training began with. Raises NotFoundError for a
    folder without a complete checkpoint.
    """
    if not weights:
        return build_empty_model(model), -1
    if weights == INITIAL:
        return build_model(model, model.seed), 0
    marker = Path(weights) / MARKER
    if not marker.is_file():
        raise NotFoundError(f"weights: {weights} is not a complete checkpoint: no {MARKER}")
    version = int(json.loads(marker.read_text())["metadata"]["step"])
    return build_model(model.model_copy(update={"path": weights, "scratch": None}), model.seed), version
