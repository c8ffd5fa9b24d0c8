"""`spec.algorithm` of type ppo, and its second model, the critic."""

from typing import Literal, Self

from pydantic import Field, model_validator

from nexrl.spec.advantages import WITHOUT_ADVANTAGES
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.section import CountOrZero, Limit, Ratio, Section, refuse_key


class CriticSpec(Section):
    """A model as the policy is at the start, with one output instead of its head, and an optimizer of its own."""

    learning_rate: float = Field(
        default=1e-5, gt=0, le=1, description="Highest learning rate of the critic. Its schedule is that of the policy."
    )
    value_clip: Limit | None = Field(
        default=0.2,
        description="A value counts as at most this far from the value at the start of the step, if that makes its "
        "loss larger. none = no limit.",
    )
    warmup_steps: CountOrZero = Field(
        default=0, description="First steps, in which the critic alone is trained: until then its values say nothing."
    )


class Ppo(AlgorithmSpec):
    """Proximal policy optimisation with a critic: advantages of tokens by generalized advantage estimation (GAE).

    Samples of equal rewards are trained, too, and groups of one.
    """

    type: Literal["ppo"] = Field(description="PPO with a critic.")
    discount: Ratio = Field(
        default=1.0,
        description="Weight of a reward for each generated token between it and the token whose return it counts in.",
    )
    gae_lambda: Ratio = Field(
        default=1.0,
        description="Weight of the later steps in the estimate of an advantage (GAE). 1 = the whole return minus the "
        "value; a lower one relies more on the critic, and varies less.",
    )
    critic: CriticSpec = Field(default_factory=CriticSpec, description="The second model, which foretells returns.")

    @model_validator(mode="after")
    def _learns_from_advantages(self) -> Self:
        if self.loss in WITHOUT_ADVANTAGES:
            raise refuse_key(
                "loss", self.loss, "it does not use advantages, so the critic has no effect; use type grpo"
            )
        if self.teacher is not None:
            raise refuse_key("teacher", self.teacher.path, "type ppo takes its advantages from the critic; remove it")
        if self.zero_variance_groups == "refill":
            reason = "the critic tells samples of equal rewards apart; use keep or drop"
            raise refuse_key("zeroVarianceGroups", self.zero_variance_groups, reason)
        return self
