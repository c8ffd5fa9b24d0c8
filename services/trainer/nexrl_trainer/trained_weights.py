"""What of a model is trained, and so is published and saved: all weights, or an adapter on top of frozen ones."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nexrl.adapters import (
    WEIGHTS_FILE,
    adapted_layers,
    digest_of_base,
    initial_adapter,
    names_of,
    read_adapter,
    read_base,
    write_adapter,
    write_base,
)
from nexrl.checkpoint_files import tensor_files
from nexrl.errors import FailedPreconditionError
from nexrl.models import iter_weights
from nexrl.spec.model import ModelSpec
from nexrl_trainer.model_files import (
    MODEL,
    check_kinds,
    ranked_file,
    saved_weights,
    write_configuration,
    write_index,
    write_weights,
    writers,
)
from nexrl_trainer.tensor_slices import SavedTensors

_ADAPTER = "default"
"""PEFT's name of the only adapter."""


class TrainedWeights(Protocol):
    """The trained weights of a model. After the model is sharded, the tensors are its shards."""

    base_digest: str
    """Digest of the frozen weights that an adapter belongs to; "" if all weights are trained."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint contains, by name. A tied tensor may have several names."""

    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Return what replicas receive, each tensor once, by name."""

    def writers(self, size: int) -> dict[str, int]:
        """Return which of `size` ranks writes each of `tensors`."""

    def write(self, folder: Path, weights: Mapping[str, Tensor], rank: int, size: int) -> dict[str, dict[str, int]]:
        """Write the whole tensors that are this rank's. Return the bytes of each tensor, by file and name in it."""

    def write_rest(self, folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
        """Write what others need to open the tensors in `files`, which all ranks have written."""

    def saved(self, path: Path) -> SavedTensors:
        """Return the tensors of a checkpoint. Raises FailedPreconditionError if it is of another kind of model."""


class WholeModel(TrainedWeights):
    """All weights are trained. The files are those of transformers."""

    base_digest = ""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        return self._model.state_dict(keep_vars=True)

    def published(self) -> Iterable[tuple[str, Tensor]]:
        return iter_weights(self._model)

    def writers(self, size: int) -> dict[str, int]:
        return writers(self.tensors(), size)

    def write(self, folder: Path, weights: Mapping[str, Tensor], rank: int, size: int) -> dict[str, dict[str, int]]:
        file = ranked_file(MODEL, rank, size)
        return {file: write_weights(folder / file, self._model, weights)}

    def write_rest(self, folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
        write_configuration(folder, self._model)
        if len(files) > 1:
            write_index(folder, files)

    def saved(self, path: Path) -> SavedTensors:
        if (path / WEIGHTS_FILE).exists():
            raise FailedPreconditionError(f"checkpoint {path} is an adapter, but model.lora is not set; set it as then")
        return saved_weights(path, tensor_files(path, MODEL), self._model)


@dataclass(frozen=True)
class AdapterSettings:
    """The model's section, which has `lora`, and the seed of a new adapter."""

    model: ModelSpec
    seed: int


class Adapter(TrainedWeights):
    """A LoRA adapter is trained, in float32, and the base is frozen.

    The files are those of PEFT, and one that says what the base is (`nexrl.adapters.BASE_FILE`). PEFT replaces the
    adapted layers in the model, so that the model stays one of transformers.
    """

    def __init__(self, model: PreTrainedModel, settings: AdapterSettings) -> None:
        """Put a new adapter, or `initialAdapter`, into `model`, which holds the base.

        Raises InvalidArgumentError for settings that do not fit the model.
        """
        # Imported here: it takes longer than all else that a trainer without adapters imports after torch.
        from peft import LoraConfig, inject_adapter_in_model

        assert settings.model.lora is not None
        lora, self._source = settings.model.lora, settings.model
        layers = adapted_layers(model, lora)
        initial = initial_adapter(lora, layers)
        self.base_digest = digest_of_base(model, lora)
        alpha: Any = lora.alpha  # PEFT divides it by the rank, but its type is int
        self._config = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(layers), task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            inject_adapter_in_model(self._config, model, _ADAPTER)
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in layers}
        for tensor in self.tensors().values():
            tensor.data = tensor.data.float()  # PEFT gives it the type of the base
        if initial is not None:
            self._copy(initial)

    def tensors(self) -> dict[str, Tensor]:
        # Looked up in each call: sharding replaces the parameters.
        return {
            name: matrix[_ADAPTER].weight
            for layer, module in self._layers.items()
            for name, matrix in zip(names_of(layer), (module.lora_A, module.lora_B), strict=True)
        }

    def published(self) -> Iterable[tuple[str, Tensor]]:
        return [(name, tensor.detach()) for name, tensor in self.tensors().items()]

    def writers(self, size: int) -> dict[str, int]:
        return dict.fromkeys(self.tensors(), 0)  # an adapter is small

    def write(self, folder: Path, weights: Mapping[str, Tensor], rank: int, size: int) -> dict[str, dict[str, int]]:
        if rank > 0:
            return {}
        write_adapter(folder, weights)
        return {WEIGHTS_FILE: {name: tensor.nbytes for name, tensor in weights.items()}}

    def write_rest(self, folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
        self._config.save_pretrained(str(folder))
        write_base(folder, self._source, self.base_digest)

    def saved(self, path: Path) -> SavedTensors:
        if not (path / WEIGHTS_FILE).exists():
            raise FailedPreconditionError(
                f"checkpoint {path} is no adapter, but model.lora is set; leave it out as then"
            )
        _, digest = read_base(path)
        if digest != self.base_digest:
            raise FailedPreconditionError(
                f"checkpoint {path} is of an adapter for another base (digest {digest}, not {self.base_digest}): "
                "model.path and model.lora.alpha must be as then"
            )
        found = SavedTensors.of(path, read_adapter(path))
        check_kinds(path, self.tensors(), found)
        return found

    @contextmanager
    def off(self) -> Iterator[None]:
        """While the block runs, the model computes what its base does."""
        scales = {name: module.scaling[_ADAPTER] for name, module in self._layers.items()}
        try:
            for module in self._layers.values():
                module.scaling[_ADAPTER] = 0.0
            yield
        finally:
            for name, module in self._layers.items():
                module.scaling[_ADAPTER] = scales[name]

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
