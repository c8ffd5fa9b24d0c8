"""`spec.data.sampler`: which tasks are granted when their turn comes."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec.section import Reference, code, refuse
from nexrl.spec.variants import VariantSection

LEAST_PROBABILITY = 0.01
"""Not 0: a task that is never granted again could never show that the policy has changed."""
Probability = Annotated[float, Field(ge=LEAST_PROBABILITY, le=1)]


class SamplerSpec(VariantSection):
    """Leaves out a share of the tasks whose turn it is. The order of the others stays."""

    TAGS: ClassVar = ("type",)

    type: str = Field(description="What the share depends on.")


class DifficultySamplerSpec(SamplerSpec):
    """By the mean reward of the samples of the task's newest grant. A task without one is granted."""

    type: Literal["difficulty"] = Field(description="Fewer grants of tasks that are too easy or too hard.")
    easy_reward: float = Field(default=1.0, description="Tasks with at least this mean reward are easy.")
    easy_probability: Probability = Field(
        default=0.1, description="Share of the turns of an easy task that is granted."
    )
    hard_reward: float = Field(default=0.0, description="Tasks with at most this mean reward are hard.")
    hard_probability: Probability = Field(default=0.5, description="Share of the turns of a hard task that is granted.")

    @field_validator("hard_reward")
    @classmethod
    def _is_below_easy(cls, hard_reward: float, info: ValidationInfo) -> float:
        if hard_reward >= info.data.get("easy_reward", math.inf):
            raise refuse("must be below easyReward: no task is both easy and hard")
        return hard_reward


class PythonSamplerSpec(SamplerSpec):
    """By a function of yours."""

    type: Literal["python"] = Field(description="A Python function.")
    function: Annotated[Reference, code("a function", "task", "reward")] = Field(
        description="`module:function`. It takes a task (`id`, `prompt`, `answer`, `metadata`) and the mean reward of "
        "the samples of its newest grant, None before the first. It returns the share of the task's turns that is "
        "granted, 0.01 to 1.",
    )
