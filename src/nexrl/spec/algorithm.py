"""`spec.algorithm`: advantages, loss and optimizer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from nexrl.spec.section import Count, CountOrZero, NameOrReference, Ratio, Reference, code, written_out
from nexrl.spec.variants import VariantSection

GROUP_BASELINES = ("group_mean", "group_mean_std", "rloo")
"""Advantages that compare the samples of a group."""


class AlgorithmSpec(VariantSection):
    """Advantages, loss and optimizer."""

    TAGS: ClassVar = ("type", "loss", "aggregation")

    type: str = Field(description="What the advantages are.")
    loss: str = Field(description="Policy loss.")
    processor: Annotated[
        str,
        NameOrReference(("builtin", "external")),
        code("a subclass of nexrl.algorithm.Processor", "context", method="def fit"),
    ] = Field(
        default="builtin",
        description="What makes a train batch from a batch. builtin: the trainer computes advantages by group. "
        "external: a process of yours leases the batches through gRPC, see nexrl.client. `module:Class`: a "
        "nexrl.algorithm.Processor of yours, in the trainer.",
    )
    aggregation: str = Field(
        description="Weight of each token in the loss, the entropy bonus and the KL penalty of a batch."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, le=10, description="Weight of the entropy bonus.")
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Weight of the KL penalty against the initial model; 0 = no reference model.",
    )
    kl_estimator: Literal["k3", "k3_unbiased"] = Field(
        default="k3",
        description="Estimator of the KL penalty. k3: Schulman's, unbiased for samples of the current policy. "
        "k3_unbiased: k3 times the importance ratio, also unbiased for samples of an older policy (DeepSeek-V3.2).",
    )
    zero_variance_groups: Literal["keep", "drop"] = Field(
        default="drop",
        description="Whether groups in which all rewards are equal take part in forward and backward passes.",
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Highest learning rate of AdamW.")
    warmup_steps: CountOrZero = Field(
        default=0, description="Steps over which the learning rate rises linearly from 0."
    )
    final_learning_rate_ratio: Ratio = Field(
        default=1.0,
        description="Learning rate at the last step, as a share of the highest; it falls linearly. 1 = constant.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        default=(0.9, 0.999),
        min_length=2,
        max_length=2,
        description="AdamW's decay rates of the first and second moment.",
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="AdamW's epsilon, added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="AdamW's decoupled weight decay.")
    decay_norms_and_biases: bool = Field(
        default=True, description="Whether weight decay also applies to weights of one dimension: norms and biases."
    )
    gradient_clip: float = Field(
        default=1.0, gt=0, le=1e6, description="Largest norm of the gradient; a larger gradient is scaled down to it."
    )


class Grpo(AlgorithmSpec):
    """Group-relative policy optimisation: `advantage` says how the rewards of a group become advantages."""

    type: Literal["grpo"] = Field(default="grpo", description="Group-relative policy optimisation.")
    advantage: Annotated[
        str,
        NameOrReference(GROUP_BASELINES),
        code("a function", "rewards_B", "groups_B"),
        written_out("group_mean"),
    ] = Field(
        default="group_mean",
        description="group_mean: reward minus the mean of the group (Dr.GRPO). group_mean_std: that, divided by the "
        "group's standard deviation (GRPO). rloo: reward minus the mean of the others (RLOO). `module:name`: a "
        "nexrl.algorithm.Advantage of yours.",
    )


class MockAlgorithm(AlgorithmSpec):
    """The rewards, as they are, are the advantages."""

    type: Literal["mock"] = Field(description="Rewards as they are.")


class PpoClip(AlgorithmSpec):
    """PPO's clipped surrogate."""

    loss: Literal["ppo_clip"] = Field(default="ppo_clip", description="PPO's clipped surrogate.")
    clip_low: Annotated[Ratio, written_out(0.2)] = Field(
        default=0.2, description="Lowest probability ratio is 1 - clipLow."
    )
    clip_high: Annotated[float, written_out(0.28, 4.0)] = Field(
        default=0.28, ge=0, le=100, description="Highest probability ratio is 1 + clipHigh."
    )


class Cispo(AlgorithmSpec):
    """REINFORCE, weighted by a probability ratio that is cut at an upper limit (CISPO)."""

    loss: Literal["cispo"] = Field(description="CISPO.")
    clip_high: float = Field(default=4.0, ge=0, le=100, description="Highest probability ratio is 1 + clipHigh.")


class Reinforce(AlgorithmSpec):
    """REINFORCE without a probability ratio."""

    loss: Literal["reinforce"] = Field(description="REINFORCE.")


class OwnLoss(AlgorithmSpec):
    """A nexrl.algorithm.Loss of yours."""

    loss: Reference = Field(description="`module:name` of a loss of yours.")
    loss_config: dict[str, JsonValue] = Field(
        default_factory=dict, max_length=64, description="Keyword arguments of your loss."
    )


class TokenAggregation(AlgorithmSpec):
    """Every token of the batch has the same weight (DAPO)."""

    aggregation: Literal["token"] = Field(default="token", description="By token.")


class SequenceAggregation(AlgorithmSpec):
    """Every trajectory of the batch has the same weight (GRPO)."""

    aggregation: Literal["sequence"] = Field(description="By trajectory.")


class ConstantAggregation(AlgorithmSpec):
    """Every token weighs 1 / (constantTokens x trajectories of the batch) (Dr.GRPO)."""

    aggregation: Literal["constant"] = Field(description="By a constant.")
    constant_tokens: Count = Field(description="Tokens in the denominator, usually rollout.maxNewTokens.")


AlgorithmSpec.model_rebuild(force=True)
