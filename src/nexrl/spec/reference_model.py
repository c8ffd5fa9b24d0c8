"""`spec.algorithm.reference`: how the reference model follows the policy."""

from typing import Annotated

from pydantic import Field

from nexrl.spec.section import Count
from nexrl.spec.variants import VariantSection


class ReferenceSpec(VariantSection):
    """How the reference model follows the policy. Give exactly one of `refreshEverySteps` and `decay`."""


class RefreshedReference(ReferenceSpec):
    """The policy, as it was after the last step whose number this divides."""

    refresh_every_steps: Count = Field(description="Steps after which the reference model becomes the policy again.")


class AveragedReference(ReferenceSpec):
    """A moving average of the policies."""

    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="Share of itself that the reference model keeps in a step; the rest is the new policy."
    )


ReferenceSpec.model_rebuild(force=True)
