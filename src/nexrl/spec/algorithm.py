"""`spec.algorithm`: advantages, loss and optimizer."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from nexrl.spec.advantages import ADVANTAGES, DESCRIPTION, DISTILLATION, WITHOUT_ADVANTAGES
from nexrl.spec.correction import CorrectionSpec
from nexrl.spec.overlong_penalty import OverlongPenaltySpec
from nexrl.spec.reference_model import ReferenceSpec
from nexrl.spec.section import (
    Count,
    CountOrZero,
    Limit,
    NameOrReference,
    Ratio,
    Reference,
    code,
    refuse_key,
    written_out,
)
from nexrl.spec.teacher import TeacherSpec
from nexrl.spec.variants import VariantSection

MAX_KL_COEFFICIENT = 100.0
MAX_ENTROPY_COEFFICIENT = 10.0


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
    reference: ReferenceSpec | None = Field(
        default=None,
        description="How the reference model of klCoefficient and loss dpo follows the policy; none = it is frozen.",
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
    teacher: TeacherSpec | None = Field(
        default=None,
        description="A frozen model whose log-probabilities are compared with those of the policy, token by token. "
        "Samples of equal rewards are trained then, too. Rank 0 of the trainer has it, in model.dtype. none = no "
        "distillation.",
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
    zero_variance_groups: Literal["keep", "drop", "refill"] = Field(
        default="drop",
        description="What becomes of samples that are compared with each other if their rewards are all equal, before "
        "any penalty. keep: they are trained. drop: they are in no pass, so the batch is smaller. refill: the pool "
        "drops a group of them when it ends, and grants another task in its place (DAPO's dynamic sampling).",
    )
    refill_limit: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=10,
        description="Groups that may be refilled before a batch is formed, as a multiple of the groups of a batch; "
        "beyond it such groups fill up the batch, and are in no pass. Only zeroVarianceGroups refill uses it.",
    )
    mini_batches: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Parts of a batch of whole trajectories, each with its own update and denominator (PPO).",
    )
    epochs: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Times that a batch is trained, one after the other, before the next (PPO)."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw: AdamW. muon: Muon for the matrices of the layers, with half of the moments, and AdamW for "
        "embeddings, head, norms and biases. Its updates are scaled to the size of AdamW's, so learningRate and "
        "weightDecay mean the same for both (arXiv 2502.16982). Not with model.lora.",
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

    @property
    def needs_reference(self) -> bool:
        """True if a train batch needs log-probabilities under the reference model."""
        return self.kl_coefficient > 0 or self.loss == "dpo"

    @property
    def needs_initial_model(self) -> bool:
        """True if these are known before the step that trains the batch: the reference model is frozen."""
        return self.needs_reference and self.reference is None

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
    def _refills_what_it_limits(self) -> Self:
        if self.zero_variance_groups != "refill" and self.refill_limit != 10:
            raise refuse_key("refillLimit", self.refill_limit, "needs zeroVarianceGroups refill, which it limits")
        return self

    @model_validator(mode="after")
    def _has_a_penalty_to_adapt(self) -> Self:
        if self.kl_target is not None and self.kl_coefficient == 0:
            raise refuse_key("klTarget", self.kl_target, "needs klCoefficient, which it multiplies; set one above 0")
        return self

    @model_validator(mode="after")
    def _compares_with_what_moves(self) -> Self:
        if self.reference is not None and not self.needs_reference:
            described = self.reference.model_dump()
            raise refuse_key("reference", described, "nothing compares with it; set klCoefficient above 0, or loss dpo")
        return self

    @model_validator(mode="after")
    def _asks_the_teacher(self) -> Self:
        if self.teacher is not None and self.processor == "external":
            raise refuse_key("processor", self.processor, "only the trainer asks the teacher; remove teacher")
        if self.teacher is None and getattr(self, "advantage", None) == DISTILLATION:
            raise refuse_key("teacher", None, f"is missing; advantage {DISTILLATION} needs it")
        if self.teacher is not None and self.loss in WITHOUT_ADVANTAGES:
            raise refuse_key("teacher", self.teacher.path, f"loss {self.loss} does not use advantages; remove teacher")
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
        str, NameOrReference(ADVANTAGES), code("a function", "rewards_B", "groups_B"), written_out("group_mean")
    ] = Field(default="group_mean", description=DESCRIPTION)
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
    """Maximum likelihood of the trained tokens, whatever their advantages. A group of one is always trained."""

    loss: Literal["cross_entropy"] = Field(description="Cross-entropy.")


class Dpo(AlgorithmSpec):
    """Direct preference optimization: in each group, better samples are preferred to worse ones (DPO)."""

    loss: Literal["dpo"] = Field(description="DPO.")
    beta: Limit = Field(default=0.1, description="Weight of the log ratio to the reference model.")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="Share of pairs whose order counts as wrong (conservative DPO)."
    )

    @model_validator(mode="after")
    def _keeps_pairs_together(self) -> Self:
        if self.mini_batches > 1:
            raise refuse_key("miniBatches", self.mini_batches, "loss dpo needs both samples of a pair; use 1")
        if self.correction != CorrectionSpec():
            raise refuse_key("correction", self.correction.model_dump(), "loss dpo has no ratio to correct; remove it")
        return self


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
