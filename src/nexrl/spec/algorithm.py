"""`spec.algorithm`: advantages, loss and optimizer."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from nexrl.spec.section import (
    Count,
    CountOrZero,
    NameOrReference,
    Ratio,
    Reference,
    Section,
    code,
    refuse_key,
    written_out,
)
from nexrl.spec.variants import VariantSection

GROUP_BASELINES = (
    "group_mean",
    "group_mean_std",
    "rloo",
    "group_mean_batch_std",
    "max_rl",
    "pass_at_k",
    "turn_mean_std",
)
"""Advantages that compare the samples of a group."""
BATCH_BASELINES = ("batch_mean_std", "return_to_go")
"""Advantages that compare all samples of the batch, whatever their groups."""

MAX_KL_COEFFICIENT = 100.0
MAX_ENTROPY_COEFFICIENT = 10.0

Limit = Annotated[float, Field(gt=0, le=1e9)]


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
    entropy_coefficient: float = Field(
        default=0.0, ge=0, le=MAX_ENTROPY_COEFFICIENT, description="Weight of the entropy bonus."
    )
    entropy_target: Limit | None = Field(
        default=None,
        description="Entropy per token, in nats, which entropyCoefficient follows, from its value here: it rises by "
        "0.005 after a step with less entropy, falls after one with more, and the bonus is off after such a step "
        "(Skywork-OR1). none = the coefficient is fixed.",
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=MAX_KL_COEFFICIENT,
        description="Weight of the KL penalty against the initial model (with model.lora its base); 0 = none.",
    )
    kl_target: Limit | None = Field(
        default=None,
        description="KL penalty per token (the metric reference_kl) which klCoefficient follows, from its value here, "
        "by at most 2 % in a step (the adaptive coefficient of PPO for language models). none = it is fixed.",
    )
    kl_estimator: Literal["k2", "k3", "k3_unbiased"] = Field(
        default="k3",
        description="Estimator of the KL penalty. k2: half the squared log ratio, whose gradient is that of the "
        "divergence for samples of the current policy. k3: Schulman's, whose value is unbiased for them. k3_unbiased: "
        "k3 times the importance ratio, value and gradient unbiased also for samples of an older policy "
        "(DeepSeek-V3.2).",
    )
    kl_reward_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Weight of a KL penalty in the reward of a sample: the sum of log p_rollout - log p_initial over "
        "the tokens that it generated (k1); with model.lora, initial is its base. 0 = none. Only processor builtin "
        "uses it.",
    )
    overlong_penalty: OverlongPenaltySpec | None = Field(
        default=None, description="A penalty on the reward of long samples. Only processor builtin uses it."
    )
    truncated_samples: Literal["keep", "drop"] = Field(
        default="keep",
        description="Whether samples that were cut at the token limit are trained (DAPO's overlong filtering drops "
        "them). Their rewards count in the baseline either way. Only processor builtin uses it.",
    )
    correction: CorrectionSpec = Field(
        default_factory=CorrectionSpec,
        description="Tokens and trajectories that are left out of the loss because they are too far off-policy. The "
        "weights of the others do not change.",
    )
    zero_variance_groups: Literal["keep", "drop"] = Field(
        default="drop",
        description="Whether samples that are compared with each other take part in forward and backward passes if "
        "their rewards are all equal, before any penalty.",
    )
    mini_batches: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Parts of a batch, each with an update of its own (PPO). A part has whole trajectories, in their "
        "order, and its own denominator.",
    )
    epochs: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Times that a batch is trained, one after the other, before the next (PPO)."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw: AdamW. muon: Muon for the matrices of the layers, with half of the moments, and AdamW for "
        "embeddings, head, norms and biases. Its updates are scaled to the size of AdamW's, so learningRate and "
        "weightDecay mean the same for both (arXiv 2502.16982). One rank, without model.lora.",
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Highest learning rate.")
    warmup_steps: CountOrZero = Field(
        default=0, description="Steps over which the learning rate rises linearly from 0."
    )
    final_learning_rate_ratio: Ratio = Field(
        default=1.0, description="Learning rate at the last step, as a share of the highest. 1 = constant."
    )
    learning_rate_decay: Literal["linear", "cosine"] = Field(
        default="linear", description="How the learning rate falls to that share: on a line, or on half a cosine."
    )
    decay_steps: Count | None = Field(
        default=None,
        description="Last steps, in which the learning rate falls; until then it is the highest (warm-up, stable, "
        "decay). none = all steps after the warm-up.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        default=(0.9, 0.999),
        min_length=2,
        max_length=2,
        description="AdamW's decay rates of the first and second moment.",
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="AdamW's epsilon, added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Decoupled weight decay.")
    decay_norms_and_biases: bool = Field(
        default=True, description="Whether weight decay also applies to weights of one dimension: norms and biases."
    )
    gradient_clip: float = Field(
        default=1.0, gt=0, le=1e6, description="Largest norm of the gradient; a larger gradient is scaled down to it."
    )

    @model_validator(mode="after")
    def _falls_if_it_says_how(self) -> Self:
        says_how = self.learning_rate_decay != "linear" or self.decay_steps is not None
        if says_how and self.final_learning_rate_ratio == 1:
            raise refuse_key(
                "finalLearningRateRatio",
                1,
                "the learning rate is constant, so learningRateDecay and decaySteps change nothing; use a lower ratio",
            )
        return self

    @model_validator(mode="after")
    def _has_a_penalty_to_adapt(self) -> Self:
        if self.kl_target is not None and self.kl_coefficient == 0:
            reason = "needs klCoefficient, which it multiplies; set one above 0, such as 0.05"
            raise refuse_key("klTarget", self.kl_target, reason)
        return self

    @model_validator(mode="after")
    def _divides_by_no_penalty(self) -> Self:
        has_penalty = self.overlong_penalty is not None or self.kl_reward_coefficient > 0
        if has_penalty and getattr(self, "advantage", None) == "max_rl":
            raise refuse_key(
                "advantage",
                "max_rl",
                "it divides by the mean reward, which overlongPenalty or klRewardCoefficient can bring near 0; use "
                "another advantage, or no penalty",
            )
        return self


class Grpo(AlgorithmSpec):
    """Group-relative policy optimisation: `advantage` says how the rewards of a group become advantages."""

    type: Literal["grpo"] = Field(default="grpo", description="Group-relative policy optimisation.")
    advantage: Annotated[
        str,
        NameOrReference(GROUP_BASELINES + BATCH_BASELINES),
        code("a function", "rewards_B", "groups_B"),
        written_out("group_mean"),
    ] = Field(
        default="group_mean",
        description="group_mean: reward minus the mean of the group (Dr.GRPO). group_mean_std: that, divided by the "
        "group's standard deviation (GRPO). rloo: reward minus the mean of the others (RLOO). max_rl: reward minus the "
        "mean of the group, divided by that mean, for rewards of 0 and 1 (MaxRL). group_mean_batch_std: reward minus "
        "the mean of the group, divided by the standard deviation of these differences in the batch (REINFORCE++ with "
        "baseline). pass_at_k: for sets of passK samples of the group, each with its best reward: the mean over the "
        "sets that contain the sample, minus the mean over all, divided by their standard deviation (Pass@k training). "
        "batch_mean_std: reward minus the mean of the batch, divided by its standard deviation "
        "(REINFORCE++). return_to_go: for each token the rewards from it on, minus their mean over the tokens of the "
        "batch, divided by their standard deviation (REINFORCE++ with rewards of tokens). turn_mean_std: for each turn "
        "its reward minus the mean over the turns of the group, divided by their standard deviation, added up from "
        "the turn on (GRPO with process supervision). `module:name`: a nexrl.algorithm.Advantage of yours.",
    )
    pass_k: Annotated[int, Field(ge=1, le=1023)] | None = Field(
        default=None,
        description="k of advantage pass_at_k, below trajectoryPool.groupSize: all samples of a group together would "
        "have nothing to be compared with. Only that advantage has it.",
    )

    discount: Ratio = Field(
        default=1.0,
        description="Weight of a reward for each generated token between it and the token whose return it counts in; "
        "only advantage return_to_go has one.",
    )

    @model_validator(mode="after")
    def _discounts_returns(self) -> Self:
        if self.discount != 1 and self.advantage != "return_to_go":
            raise refuse_key("discount", self.discount, "only advantage return_to_go has it; remove it")
        return self

    @model_validator(mode="after")
    def _has_k_if_it_needs_one(self) -> Self:
        if self.advantage == "pass_at_k" and self.pass_k is None:
            raise refuse_key("passK", None, "is missing; advantage pass_at_k needs it, below trajectoryPool.groupSize")
        if self.advantage != "pass_at_k" and self.pass_k is not None:
            raise refuse_key("passK", self.pass_k, "only advantage pass_at_k has it; remove it")
        return self


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
    dual_clip: Annotated[float, Field(gt=1, le=100)] | None = Field(
        default=None,
        description="A token with a negative advantage counts at most as much as with this ratio (usual: 3). "
        "none = no limit.",
    )


class DecoupledPpo(AlgorithmSpec):
    """PPO's clip around the policy at the start of the step, weighted by its ratio to the rollout's (decoupled PPO)."""

    loss: Literal["decoupled_ppo"] = Field(description="Decoupled PPO.")
    clip_low: Ratio = Field(
        default=0.2, description="Lowest ratio to the policy at the start of the step is 1 - clipLow."
    )
    clip_high: float = Field(
        default=0.28, ge=0, le=100, description="Highest ratio to the policy at the start of the step is 1 + clipHigh."
    )
    weight_limit: Limit = Field(
        default=2.0,
        description="Highest ratio of the policy at the start of the step to the rollout's; a larger one counts as "
        "this (truncated importance sampling).",
    )

    @model_validator(mode="after")
    def _limits_a_ratio_once(self) -> Self:
        if self.correction.token_band is not None:
            raise refuse_key(
                "correction",
                {"tokenBand": self.correction.token_band.model_dump()},
                "tokenBand and weightLimit of loss decoupled_ppo are two limits of the same ratio; remove tokenBand",
            )
        return self


class Gspo(AlgorithmSpec):
    """PPO's clipped surrogate with the geometric mean of a trajectory's ratios (GSPO; use aggregation sequence)."""

    loss: Literal["gspo"] = Field(description="GSPO.")
    clip_low: Ratio = Field(default=3e-4, description="Lowest ratio of a trajectory is 1 - clipLow.")
    clip_high: float = Field(default=4e-4, ge=0, le=100, description="Highest ratio of a trajectory is 1 + clipHigh.")


class Cispo(AlgorithmSpec):
    """REINFORCE, weighted by a probability ratio that is cut at an upper limit (CISPO; AIPO with rho 1 + clipHigh)."""

    loss: Literal["cispo"] = Field(description="CISPO.")
    clip_high: float = Field(default=4.0, ge=0, le=100, description="Highest probability ratio is 1 + clipHigh.")


class DppoTv(AlgorithmSpec):
    """A token is left out if its probability has moved too far in the direction of its advantage (DPPO, TV)."""

    loss: Literal["dppo_tv"] = Field(description="DPPO with total variation.")
    clip_low: Ratio = Field(default=0.2, description="Largest fall of the probability, for negative advantages.")
    clip_high: Ratio = Field(default=0.2, description="Largest rise of the probability, for positive advantages.")


class Sapo(AlgorithmSpec):
    """A probability ratio that is bounded by a sigmoid instead of a clip (SAPO)."""

    loss: Literal["sapo"] = Field(description="SAPO.")
    positive_temperature: Limit = Field(
        default=1.0, description="Steepness of the sigmoid for positive advantages; larger is closer to a clip."
    )
    negative_temperature: Limit = Field(default=1.05, description="Steepness of the sigmoid for negative advantages.")


class Reinforce(AlgorithmSpec):
    """REINFORCE without a probability ratio."""

    loss: Literal["reinforce"] = Field(description="REINFORCE.")


class CrossEntropy(AlgorithmSpec):
    """Maximum likelihood of the trained tokens, whatever their advantages; use it with zeroVarianceGroups keep."""

    loss: Literal["cross_entropy"] = Field(description="Cross-entropy.")


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
