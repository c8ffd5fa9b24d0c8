"""`spec.algorithm.correction`: what is left out of the loss."""

from typing import Annotated

from pydantic import Field

from nexrl.spec.section import Limit, Ratio, Section


class RatioBand(Section):
    """Ratios of the trainer's probability to the one that the rollout recorded; both ends are inside."""

    low: Annotated[float, Field(ge=0, le=1)] = Field(description="Lowest ratio.")
    high: Annotated[float, Field(ge=1, le=1e9)] = Field(description="Highest ratio.")


class CorrectionSpec(Section):
    """Which tokens are left out because trainer and engine, or two policy versions, disagree about them."""

    token_band: RatioBand | None = Field(
        default=None, description="A token whose ratio is outside is left out (IcePop uses 0.5 to 5)."
    )
    sequence_band: RatioBand | None = Field(
        default=None, description="A trajectory whose geometric mean of ratios is outside is left out."
    )
    veto_ratio: Ratio = Field(
        default=0.0, description="A trajectory with a token of a lower ratio is left out; 0 = none is."
    )
    negative_drift: Limit | None = Field(
        default=None,
        description="A trajectory with a negative advantage is left out if the mean of log p_rollout - log p over its "
        "tokens is larger (off-policy sequence masking of DeepSeek-V3.2).",
    )


def correction_is_off(algorithm: str) -> str:
    """Return the CEL condition that the section at the path `algorithm` corrects nothing."""
    of = f"{algorithm}.correction"
    return f"!has({of}.tokenBand) && !has({of}.sequenceBand) && {of}.vetoRatio == 0.0 && !has({of}.negativeDrift)"
