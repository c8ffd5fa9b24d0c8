"""`spec.algorithm.critic`: the second model of PPO."""

from pydantic import Field

from nexrl.spec.section import CountOrZero, Limit, Section


class CriticSpec(Section):
    """The critic: a model as the policy is at the start, with one output instead of its head, and an optimizer of its own."""

    learning_rate: float = Field(
        default=1e-5, gt=0, le=1, description="Highest learning rate of the critic. Its schedule is that of the policy."
    )
    value_clip: Limit | None = Field(
        default=0.2,
        description="A value counts as at most this far from the value at the start of the step, if that makes its loss larger. none = no "
        "limit.",
    )
    warmup_steps: CountOrZero = Field(
        default=0, description="First steps, in which the critic alone is trained: until then its values say nothing."
    )
