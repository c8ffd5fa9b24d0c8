"""`spec.algorithm` of type ppo, and its second model, the critic."""

from typing import Literal, Self

from pydantic import Field, model_validator

from nexrl.spec.advantages import WITHOUT_ADVANTAGES
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.section import CountOrZero, Limit, Ratio, Section, refuse_key


class CriticSpec(Section):
    """A model as the policy is at the start, with one output instead of its head, and an optimizer of its own."""

    learning_rate: float = Field(
        default=1e-5, gt=0, le=1, description="Highest learning rate of the critic. Schedule as algorithm.learningRate."
    )
    value_clip: Limit | None = Field(
        default=0.2,
        description="A value counts as at most this far from the value at the start of the step, if that makes its "
        "loss larger. none = no limit.",
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
    critic_only_steps: CountOrZero = Field(
        default=0,
        description="First steps, in which only the critic is trained: the values of a new critic predict nothing. The "
        "schedule of the policy's learning rate begins after them.",
    )
    critic: CriticSpec = Field(default_factory=CriticSpec, description="The second model, which predicts returns.")

    @model_validator(mode="after")
    def _learns_from_advantages(self) -> Self:
        if self.loss in WITHOUT_ADVANTAGES:
            raise refuse_key(
                "loss", self.loss, "it does not use advantages, so the critic has no effect; use type grpo"
            )
        if self.teacher is not None:
            raise refuse_key("teacher", self.teacher.path, "type ppo takes its advantages from the critic; remove it")
        if self.zero_variance_groups == "refill":
            reason = "type ppo compares no samples, so equal rewards are no reason to refill a group; remove it"
            raise refuse_key("zeroVarianceGroups", self.zero_variance_groups, reason)
        return self
