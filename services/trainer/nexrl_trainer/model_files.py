"""The model's own files in a checkpoint: a Hugging Face folder, whose tensors several ranks write and read.

Hugging Face saves some weights under other names and in other shapes than the model has them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from nexrl.errors import FailedPreconditionError
from nexrl_trainer.tensor_slices import SavedTensors, kind

MODEL = "model"
INDEX = "model.safetensors.index.json"


def ranked_file(name: str, rank: int, size: int) -> str:
    """Return the name of the file that a rank writes: `name` itself if there is one rank."""
    return f"{name}.safetensors" if size == 1 else f"{name}-{rank + 1:05}-of-{size:05}.safetensors"


def writers(tensors: Mapping[str, Tensor], size: int) -> dict[str, int]:
    """Return the rank that writes each tensor, balanced by bytes.

    One rank writes all tensors of a layer, because Hugging Face may save several as one, and all names of a tied one.
    """
    first_names: dict[int, str] = {}
    groups: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_group(first_names.setdefault(id(tensor), name)), []).append(name)
    bytes_of = {group: sum(tensors[name].nbytes for name in names) for group, names in groups.items()}
    loads = [0] * size
    found: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: -bytes_of[group]):
        rank = loads.index(min(loads))
        loads[rank] += bytes_of[group]
        found |= dict.fromkeys(groups[group], rank)
    return found


def write_weights(file: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Write whole weights, by the model's own names, as Hugging Face does. Return the bytes by the file's names."""
    left_out = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in weights.items() if name not in left_out}
    saved = revert_weight_conversion(model, remove_tied_weights_from_state_dict(kept, model))
    save_file({name: tensor.contiguous() for name, tensor in saved.items()}, file, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in saved.items()}


def write_configuration(folder: Path, model: PreTrainedModel) -> None:
    """Write what Hugging Face needs besides the weights."""
    with TemporaryDirectory(dir=folder) as empty:  # it would delete the weights that it has not written
        model.save_pretrained(empty, state_dict={})
        for file in Path(empty).iterdir():
            file.rename(folder / file.name)


def write_index(folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Write which file has which tensor. `files`: the bytes of each tensor, by file."""
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files.values())},
        "weight_map": {name: file for file, sizes in files.items() for name in sizes},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def saved_weights(path: Path, files: Sequence[Path], model: PreTrainedModel) -> SavedTensors:
    """Return the weights of a checkpoint's files by the names that the model has for them.

    Raises FailedPreconditionError if they are those of another model. They are read later, slice by slice. Where
    Hugging Face saves other names or shapes than the model has, all of them are read here.
    """
    wanted = model.state_dict(keep_vars=True)
    saved = SavedTensors.in_files(path, files)
    if not _has_own_names(wanted, saved, model):
        saved = _whole_weights(path)
    check_kinds(path, wanted, saved)
    return saved


def _has_own_names(wanted: Mapping[str, Tensor], saved: SavedTensors, model: PreTrainedModel) -> bool:
    """Return whether the files have each tensor as the model has it, under one of its names."""
    probes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in wanted.items()}
    converted = revert_weight_conversion(model, dict(probes))
    as_they_are = {name for name, probe in probes.items() if converted.get(name) is probe}
    found = {id(wanted[name]) for name in saved if name in as_they_are}
    return saved.keys() <= as_they_are and {id(tensor) for tensor in wanted.values()} == found


def _whole_weights(path: Path) -> SavedTensors:
    """Return all weights by the model's own names."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    model, report = loaded
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in report["missing_keys"]}
    return SavedTensors.of(path, tensors)


def check_kinds(path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, str]) -> None:
    """Raise FailedPreconditionError if the saved tensors have not the names, shapes and types of those wanted."""
    found = {id(wanted[name]) for name in saved if name in wanted}
    for name in sorted(wanted.keys() | saved.keys()):
        if name not in saved and id(wanted[name]) in found:
            continue  # another name of a tied weight
        kind_wanted = kind(wanted[name].dtype, wanted[name].shape) if name in wanted else "nothing"
        if saved.get(name, "nothing") != kind_wanted:
            raise FailedPreconditionError(
                f"checkpoint {path} is of another model: {name} is {saved.get(name, 'nothing')}, not {kind_wanted}"
            )


def _group(name: str) -> str:
    """Return the layer of a tensor; its own name if it is in none."""
    layer = re.match(r".*?\.\d+\.", name)
    return layer[0] if layer else name
