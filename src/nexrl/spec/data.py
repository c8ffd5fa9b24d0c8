"""`spec.data` and `spec.validation.data`: the sources of tasks."""

from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from nexrl.spec.sampler import SamplerSpec
from nexrl.spec.section import Count, Location, Name, Reference, Seed
from nexrl.spec.variants import VariantSection


class DataSpec(VariantSection):
    """A source of tasks."""

    TAGS: ClassVar = ("type",)

    type: str = Field(description="Kind of source.")
    seed: Seed = Field(
        default=0, description="Seed of the order of the tasks, and of their content where they are generated."
    )
    shuffle: bool = Field(
        default=True, description="Whether each epoch has its own random order, derived from seed and epoch."
    )
    epochs: Count | None = Field(
        default=None,
        description="Passes over the tasks before the data ends; none = endless. Validation makes one pass.",
    )
    sampler: SamplerSpec | None = Field(
        default=None,
        description="Which tasks are granted when their turn comes; none = all of them. Training data only.",
    )


class MockDataSpec(DataSpec):
    """Generated digit strings, each its own answer, for trying out the system."""

    type: Literal["mock"] = Field(description="Generated digit strings.")
    size: Count = Field(default=64, description="Number of tasks.")


class FileDataSpec(DataSpec):
    """Tasks in a file of the user."""

    path: Location = Field(description="The file, relative to this one.")
    prompt_field: Name = Field(default="prompt", description="Field (column) that holds the prompt: text.")
    answer_field: str = Field(
        default="answer",
        max_length=128,
        description='Field (column) that holds the answer: text or a number; "" = tasks have none.',
    )


class JsonlDataSpec(FileDataSpec):
    """A file with one JSON object per line."""

    type: Literal["jsonl"] = Field(description="A file with one JSON object per line.")


class ParquetDataSpec(FileDataSpec):
    """A Parquet file with one row per task."""

    type: Literal["parquet"] = Field(description="A Parquet file.")


class ReasoningGymDataSpec(DataSpec):
    """Tasks that the package reasoning-gym generates."""

    type: Literal["reasoning_gym"] = Field(description="A generator of the package reasoning-gym.")
    name: Name = Field(description="Dataset of reasoning-gym, such as chain_sum.")
    config: dict[str, JsonValue] = Field(
        default_factory=dict, description="Parameters of that dataset, in its own spelling."
    )
    size: int = Field(default=1000, ge=1, le=100_000, description="Number of tasks to generate.")


class PythonDataSpec(DataSpec):
    """Tasks from a function of yours."""

    type: Literal["python"] = Field(description="A Python function.")
    factory: Reference = Field(
        description="`module:function`. It takes `train` or `validation` and returns a sequence of mappings with "
        "prompt and answer. The module is looked up beside this file first.",
    )
