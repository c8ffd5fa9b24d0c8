"""A tiny model whose adapter is trained."""

from pathlib import Path
from typing import Any, Literal

from nexrl.models import build_model
from nexrl.spec.model import LoraSpec, ModelSpec, PathModel, ScratchModel, ScratchModelSpec
from nexrl.tokenizers import build_tokenizer

DataType = Literal["float32", "bfloat16"]
TINY = ScratchModelSpec(
    alphabet="0123456789=", hidden_size=16, intermediate_size=32, layers=2, heads=2, max_positions=32
)


def adapter_model(path: Path | None = None, *, dtype: DataType = "float32", seed: int = 0, **lora: Any) -> ModelSpec:
    """Return the section `model` with `lora`: of the tiny model, or of the Hugging Face folder `path`."""
    spec = LoraSpec(**{"rank": 2, "alpha": 4.0, **lora})
    if path is not None:
        return PathModel(path=str(path), dtype=dtype, lora=spec)
    return ScratchModel(scratch=TINY, dtype=dtype, seed=seed, lora=spec)


def save_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny model, with these changes of its shape, as a Hugging Face folder. Returns the folder."""
    source = ScratchModel(scratch=TINY.model_copy(update=changes))
    build_model(source, seed).save_pretrained(folder)
    build_tokenizer(source).save_pretrained(folder)
    return folder
