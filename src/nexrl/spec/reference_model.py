"""`spec.algorithm.reference`: how the reference model follows the policy."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nexrl.spec.section import Count
from nexrl.spec.variants import VariantSection


class ReferenceSpec(VariantSection):
    """How the reference model follows the policy."""

    TAGS: ClassVar = ("type",)

    type: str = Field(description="How it follows.")


class RefreshedReference(ReferenceSpec):
    """It becomes the policy every few steps."""

    type: Literal["refreshed"] = Field(description="The policy of some steps ago.")
    every_steps: Count = Field(description="It becomes the policy after each step whose number this divides.")


class AveragedReference(ReferenceSpec):
    """It is a moving average of the policies."""

    type: Literal["average"] = Field(description="A moving average.")
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="Share of itself that the reference model keeps in a step; the rest is the new policy."
    )
