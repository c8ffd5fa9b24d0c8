"""Low-rank adapters (LoRA, arXiv 2106.09685) of a frozen base: layers, names and shapes, files, merging.

The trainer trains W + scale * B @ A for the weight W [out, in] of each adapted layer. An adapter's tensors are
`<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank], in float32. These are the names of PEFT's
files without their prefix. Only the trainer needs PEFT.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from nexrl.errors import FailedPreconditionError
from nexrl.models import build_model, iter_weights
from nexrl.spec.model import ALL_LINEAR, LoraSpec, ModelSpec
from nexrl.spec.section import written
from nexrl.tokenizers import invalid_source
from nexrl.weights.manifest import TensorSpec
from nexrl.weights.packing import tensor_bytes

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names of an adapter's files."""
BASE_FILE = "base_model.json"
"""In a checkpoint: the section `model` of the experiment, and the digest of the base."""

_PREFIX = "base_model.model."
_PLAIN = ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias")
"""Settings of PEFT that would change what an adapter computes."""


def adapted_layers(model: PreTrainedModel, lora: LoraSpec) -> dict[str, nn.Linear]:
    """Return the layers that get an adapter, by name. `model` is the base, without adapters.

    Raises InvalidArgumentError for a target that names no linear layer, or something else, or the head.
    """
    head = model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if lora.target_modules == (ALL_LINEAR,):
        return linear
    found: dict[str, nn.Linear] = {}
    for target in lora.target_modules:
        matches = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
        if not matches or not set(matches) <= linear.keys():
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            allowed = f"linear layers of {model.config.model_type} but the head ({', '.join(kinds)}), or {ALL_LINEAR}"
            raise invalid_source("model.lora.targetModules", target, allowed)
        found |= {name: linear[name] for name in matches}
    return found


def adapter_specs(layers: Mapping[str, nn.Linear], rank: int) -> tuple[TensorSpec, ...]:
    """Return name, type and shape of the tensors of an adapter of these layers."""
    return tuple(
        TensorSpec(name, "float32", shape)
        for layer, linear in layers.items()
        for name, shape in zip(names_of(layer), _shapes(linear, rank), strict=True)
    )


def names_of(layer: str) -> tuple[str, str]:
    """Return the names of A and B of a layer."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@torch.no_grad()
def merged(weight: Tensor, layer: str, adapter: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the weight of a layer with the adapter, computed in float32, in the type of `weight`."""
    lora_a, lora_b = (adapter[name] for name in names_of(layer))
    return (weight.float() + (lora_b @ lora_a) * scale).to(weight.dtype)


def digest_of_base(model: PreTrainedModel, lora: LoraSpec) -> str:
    """Return the BLAKE3 digest, in hexadecimal, of the frozen weights, their names, shapes and types, and the scale.

    Adapters of one base have the same meaning wherever this digest is the same.
    """
    digest = blake3(f"{lora.scale!r}".encode())
    for name, tensor in iter_weights(model):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor.cpu()))
    return digest.hexdigest()


def initial_adapter(lora: LoraSpec, layers: Mapping[str, nn.Linear]) -> dict[str, Tensor] | None:
    """Return the tensors of `model.lora.initialAdapter`, or None without one.

    Raises InvalidArgumentError if the folder has no adapter, or one of other layers, another shape or other settings.
    """
    if lora.initial_adapter is None:
        return None
    folder = Path(lora.initial_adapter)
    problem = _misfit(folder, lora, layers)
    if problem:
        raise invalid_source("model.lora.initialAdapter", lora.initial_adapter, f"a folder of PEFT whose {problem}")
    return read_adapter(folder)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter in PEFT's format. Raises OSError or SafetensorError if there is none."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return {name.removeprefix(_PREFIX): tensor.float() for name, tensor in tensors.items()}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of an adapter in PEFT's format. PEFT writes the other file, its configuration."""
    named = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def write_base(folder: Path, model: ModelSpec, digest: str) -> None:
    """Write what the adapter in `folder` belongs to."""
    (folder / BASE_FILE).write_text(json.dumps({"model": written(model), "digest": digest}, indent=2))


def read_base(folder: Path) -> tuple[ModelSpec, str]:
    """Return the section `model`, and the digest of the base, of the adapter in a checkpoint."""
    content = json.loads((folder / BASE_FILE).read_text())
    model: ModelSpec = TypeAdapter(ModelSpec).validate_json(json.dumps(content["model"]), by_alias=True)
    return model, content["digest"]


def merged_model(checkpoint: Path) -> PreTrainedModel:
    """Return the base of the adapter in a checkpoint with the adapter merged, on the CPU.

    Raises FailedPreconditionError if the base is not the one that was trained.
    """
    source, digest = read_base(checkpoint)
    lora, model = source.lora, build_model(source, source.seed)
    assert lora is not None
    if digest_of_base(model, lora) != digest:
        raise FailedPreconditionError(
            f"checkpoint {checkpoint}: its base, model.path {source.path}, has other weights now; restore these files"
        )
    adapter = read_adapter(checkpoint)
    for name, layer in adapted_layers(model, lora).items():
        layer.weight.data.copy_(merged(layer.weight, name, adapter, lora.scale))
    return model


def _shapes(linear: nn.Linear, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (rank, linear.in_features), (linear.out_features, rank)


def _misfit(folder: Path, lora: LoraSpec, layers: Mapping[str, nn.Linear]) -> str:
    """Return what an adapter for this base must have and the one in `folder` has not; "" if it fits."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        shapes = {name: tuple(tensor.shape) for name, tensor in read_adapter(folder).items()}
    except (OSError, ValueError, SafetensorError) as error:
        return f"{CONFIG_FILE} and {WEIGHTS_FILE} can be read ({error})"
    wanted = {spec.name: spec.shape for spec in adapter_specs(layers, lora.rank)}
    return next(_problems(config, lora), "") or next(_differences(shapes, wanted), "")


def _problems(config: Mapping[str, Any], lora: LoraSpec) -> Iterator[str]:
    plain = dict.fromkeys(_PLAIN, None)
    expected = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none", **plain}
    for key, value in expected.items():
        if (config.get(key) or None) != value:
            yield f"{key} is {value}, as in model.lora, not {config.get(key)}"


def _differences(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            yield f"{name} is {wanted.get(name, 'absent')}, as in this base, not {found.get(name, 'absent')}"
