"""`spec.algorithm.overlongPenalty`: a penalty on the reward of long samples."""

from typing import Self

from pydantic import Field, model_validator

from nexrl.spec.section import Count, CountOrZero, Limit, Section, refuse_key


class OverlongPenaltySpec(Section):
    """A penalty that grows linearly with the tokens that a sample generated (DAPO's soft overlong punishment)."""

    after_tokens: CountOrZero = Field(description="Generated tokens without a penalty.")
    full_tokens: Count = Field(description="Generated tokens from which the penalty is full.")
    penalty: Limit = Field(default=1.0, description="The full penalty, subtracted from the reward.")

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.full_tokens <= self.after_tokens:
            raise refuse_key("fullTokens", self.full_tokens, f"must be above afterTokens ({self.after_tokens})")
        return self
