"""`spec.model`: the model to train."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec.section import Location, Name, Section, Seed, refuse, written_out
from nexrl.spec.variants import VariantSection


class ScratchModelSpec(Section):
    """A Llama with random weights and one token per character, for tasks that a small CPU can learn."""

    alphabet: str = Field(
        min_length=1,
        max_length=512,
        description="Characters of the vocabulary, each once; <pad> <bos> <eos> <unk> are added.",
    )
    hidden_size: int = Field(
        default=64, ge=8, le=8192, description="Width of the residual stream; an even multiple of heads."
    )
    intermediate_size: int = Field(default=256, ge=8, le=32_768, description="Width of the feed-forward layer.")
    layers: int = Field(default=2, ge=1, le=128, description="Transformer blocks.")
    heads: int = Field(default=4, ge=1, le=128, description="Attention heads per block.")
    max_positions: int = Field(
        default=64, ge=2, le=131_072, description="Longest sequence (tokens), prompt and completion together."
    )

    @field_validator("alphabet")
    @classmethod
    def _has_no_repetition(cls, alphabet: str) -> str:
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if repeated:
            raise refuse(f"each character once; repeated: {' '.join(map(repr, repeated))}")
        return alphabet

    @field_validator("heads")
    @classmethod
    def _divides_hidden_size(cls, heads: int, info: ValidationInfo) -> int:
        hidden_size = info.data.get("hidden_size")
        # Rotary embeddings pair the dimensions of a head.
        if hidden_size is not None and hidden_size % (2 * heads) != 0:
            raise refuse(f"hiddenSize ({hidden_size}) must be an even multiple of heads ({heads})")
        return heads

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids: the special tokens of `nexrl.tokenizers`, and one for each character."""
        return 4 + len(set(self.alphabet))


ALL_LINEAR = "all-linear"
"""In `model.lora.targetModules`: each linear layer but the head."""


class LoraSpec(Section):
    """Training of low-rank adapters (arXiv 2106.09685) instead of the weights: W + alpha / rank * B @ A."""

    rank: int = Field(ge=1, le=1024, description="Rows of A, which are columns of B.")
    alpha: float = Field(gt=0, le=65_536, description="Scale of the adapters, times rank.")
    target_modules: tuple[Name, ...] = Field(
        default=(ALL_LINEAR,),
        min_length=1,
        max_length=256,
        description="Linear layers that get an adapter: each is a name, or the end of one, as q_proj. all-linear: all "
        "of them but the head.",
    )
    initial_adapter: Location | None = Field(
        default=None,
        description="Folder of an adapter in PEFT's format, relative to this file, that training begins with; none = "
        "adapters that change nothing.",
    )

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / self.rank

    @field_validator("target_modules")
    @classmethod
    def _names_layers_or_all(cls, target_modules: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in target_modules and len(target_modules) > 1:
            raise refuse(f"{ALL_LINEAR} stands alone")
        return target_modules


class ModelSpec(VariantSection):
    """The model to train. Give exactly one of `path` and `scratch`."""

    tag: str = Field(
        default="default",
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
        description="Name of the model. Trajectories, batches, weights and policy versions are kept per tag.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Number format of the weights in forward and backward passes."
    )
    lora: LoraSpec | None = Field(
        default=None,
        description="Adapters to train instead of the weights, which are frozen then; none = all weights are trained.",
    )

    if TYPE_CHECKING:  # each variant has one of path and scratch, and None for the other

        @property
        def path(self) -> str | None: ...

        @property
        def scratch(self) -> ScratchModelSpec | None: ...

        @property
        def seed(self) -> int: ...


class PathModel(ModelSpec):
    """Existing weights."""

    path: Annotated[Location, written_out(None)] = Field(
        description="Local Hugging Face folder, relative to this file, or `package:NAME` for the GGUF file inside an "
        "installed Python package.",
    )
    scratch: ClassVar[None] = None
    seed: ClassVar[int] = 0
    """Nothing is random."""


class ScratchModel(ModelSpec):
    """Random initial weights."""

    path: ClassVar[None] = None
    scratch: Annotated[ScratchModelSpec, written_out(None)] = Field(
        description="Shape of a model with random initial weights."
    )
    seed: Annotated[Seed, written_out(0)] = Field(default=0, description="Seed of random initial weights.")
