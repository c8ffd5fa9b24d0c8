"""Size and shape of a model, read without loading a weight: configuration, safetensors headers, GGUF metadata."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.spec.model import ModelSpec, ScratchModelSpec

_PACKAGE = "package:"
_MAX_HEADER_BYTES = 100 * 2**20
"""The limit of the safetensors format."""


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on. A tied head is counted once.

    `parameters` and `tensors` are counts; the widths are elements. `feed_forward` is what one token uses: of a mixture
    of experts, the width of one expert times the experts per token.
    """

    parameters: int
    tensors: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool

    @property
    def outside_layers(self) -> int:
        """Parameters of embedding, head and last norm."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        return (self.parameters - self.outside_layers) // self.layers


def size_of(model: ModelSpec) -> ModelSize:
    """Return the size of the experiment's model.

    Raises InvalidArgumentError for a folder that is no model, FailedPreconditionError for a GGUF file if the package
    `gguf` is not installed.
    """
    if model.scratch is not None:
        return _of_scratch(model.scratch, model.scratch.vocabulary_size)
    assert model.path is not None
    return _of_gguf(model.path) if model.path.startswith(_PACKAGE) else _of_folder(Path(model.path))


def llama_size(config: Mapping[str, Any]) -> ModelSize:
    """Return the size of a dense Llama or Qwen2 from the keys of its config.json; no file is needed."""
    shape = _shape(config)
    width, kv_width = shape["heads"] * shape["head_size"], shape["kv_heads"] * shape["head_size"]
    hidden, layers = shape["hidden"], shape["layers"]
    biases = width + 2 * kv_width if config.get("attention_bias") else 0
    layer = 2 * hidden * (width + kv_width) + 3 * hidden * shape["feed_forward"] + 2 * hidden + biases
    heads = 1 if shape["is_tied"] else 2
    parameters = heads * shape["vocabulary"] * hidden + layers * layer + hidden
    return ModelSize(parameters, layers * (12 if biases else 9) + heads + 1, **shape)


def _of_scratch(scratch: ScratchModelSpec, vocabulary: int) -> ModelSize:
    return llama_size(
        {
            "hidden_size": scratch.hidden_size,
            "intermediate_size": scratch.intermediate_size,
            "num_hidden_layers": scratch.layers,
            "num_attention_heads": scratch.heads,
            "vocab_size": vocabulary,
            "tie_word_embeddings": True,
        }
    )


def _of_folder(folder: Path) -> ModelSize:
    try:
        config = json.loads((folder / "config.json").read_text())
        shape = _shape(config.get("text_config", config))
        tensors = {name: count for path in _weight_files(folder) for name, count in _counts(path)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidArgumentError(
            f"model.path: {folder}: its size cannot be read ({type(error).__name__}: {error}); use a Hugging Face "
            "folder with config.json and safetensors files, of an architecture whose config has Llama's keys"
        ) from error
    if shape["is_tied"]:
        tensors.pop("lm_head.weight", None)
    if not tensors:
        raise InvalidArgumentError(
            f"model.path: {folder} has no model.safetensors and no index of several; use a folder that has"
        )
    return ModelSize(sum(tensors.values()), len(tensors), **shape)


def _of_gguf(path: str) -> ModelSize:
    try:
        from gguf import GGUFReader

        from nexrl.tokenizers import locate
    except ImportError as error:
        raise FailedPreconditionError(
            f"model.path: {path}: reading a GGUF file requires the package {error.name}; install nexrl[trainer]"
        ) from error
    folder, arguments = locate(path)
    try:
        return _of_gguf_reader(GGUFReader(folder / arguments["gguf_file"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidArgumentError(
            f"model.path: {path}: the GGUF file cannot be read ({type(error).__name__}: {error}); use one of a "
            "decoder-only language model"
        ) from error


def _of_gguf_reader(reader: Any) -> ModelSize:
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    config = {ours: fields[theirs].contents() for ours, theirs in _GGUF.items() if theirs in fields}
    config["vocab_size"] = tensors["token_embd.weight"] // config["hidden_size"]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return ModelSize(sum(tensors.values()), len(tensors), **_shape(config))


_GGUF = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
"""Keys of config.json, and the keys of GGUF after the name of the architecture."""


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    experts = config.get("num_experts_per_tok") or 1
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * config["hidden_size"]
    shape = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "feed_forward": experts * (max(width) if isinstance(width, list) else width),  # a list has one for each layer
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "vocabulary": config["vocab_size"],
        "is_tied": bool(config.get("tie_word_embeddings", False)),
    }
    if wrong := [
        name for name, value in shape.items() if not isinstance(value, int) or (value < 1 and name != "is_tied")
    ]:
        raise ValueError(f"{', '.join(wrong)}: not a number of at least 1")
    return shape


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers opens. Others are optimizer state, adapters, or copies in another format."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [path for path in [folder / "model.safetensors"] if path.is_file()]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _counts(path: Path) -> Iterator[tuple[str, int]]:
    """Yield name and number of elements of each tensor of a safetensors file: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, math.prod(tensor["shape"])
