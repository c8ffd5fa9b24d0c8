"""The experiment as a whole: its sections, and the rules between them.

Keys are camelCase in files and snake_case in Python. Each section is in the module of its name. Whether a path exists
or a package is installed depends on the machine: `nexrl.spec.machine` checks that.

A rule between fields is a validator of the later field: it reports at that field, and also runs if other fields are
wrong.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec import demonstrations
from nexrl.spec.advantages import BATCH_BASELINES, GROUP_BASELINES, TURN_BASELINE
from nexrl.spec.algorithm import AlgorithmSpec, Grpo
from nexrl.spec.cluster import CodeFiles, ControllerSpec, StorageSpec
from nexrl.spec.critic import Ppo
from nexrl.spec.data import DataSpec
from nexrl.spec.inference import InferenceSpec
from nexrl.spec.model import ModelSpec, ScratchModel
from nexrl.spec.monitor import FailurePolicySpec, LoggerSpec, MonitorSpec
from nexrl.spec.redis import RedisSpec
from nexrl.spec.rollout import DemonstrationRollout, RolloutSpec
from nexrl.spec.section import LIVE, NEVER, NEXT_START, Name, Section, Text, refuse_key
from nexrl.spec.trainer import CheckpointSpec, ResumeSpec, TrainerSpec
from nexrl.spec.trajectory_pool import TrainBatchPoolSpec, TrajectoryPoolSpec
from nexrl.spec.validation import ValidationSpec
from nexrl.spec.weight_sync import WeightSyncSpec

API_VERSION = "nexrl.dev/v1alpha1"
FOLDER_ANNOTATION = "nexrl.dev/folder"
"""Annotation with the folder of the user's file: a resolved copy of the file finds the user's modules there."""
LEDGER_ANNOTATION = "nexrl.dev/ledger"
"""Annotation with the name of the experiment's keys in Redis, if that is not `metadata.name`: two namespaces may have
experiments of the same name."""
GENERATION_ANNOTATION = "nexrl.dev/generation"
"""Annotation with the `metadata.generation` at which an experiment on a cluster was started. If it differs from the
last one, the experiment was suspended and resumed: both change the spec."""


class Metadata(Section):
    """Name of the experiment, and whatever a cluster or its users attach to it."""

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
        description="Name of the experiment (RFC 1035 label); also of its folder under runs/ and of its objects "
        "on a cluster.",
    )
    namespace: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=63,
        description="Kubernetes namespace; unused on one machine.",
    )
    labels: dict[str, Text] = Field(default_factory=dict, description="Labels, as on any Kubernetes object.")
    annotations: dict[str, Text] = Field(default_factory=dict, description="Annotations, as on any Kubernetes object.")


class ExperimentSpec(Section):
    """What to train, on what, how."""

    project: Name = Field(default="nexrl", description="Project under which metrics are logged.")
    suspend: Annotated[bool, LIVE] = Field(
        default=False, description="Whether the experiment keeps its state and runs nothing."
    )
    managed_by: Annotated[Literal["nexrl.dev/experiment-controller", "kueue.x-k8s.io/multikueue"], NEVER] = Field(
        default="nexrl.dev/experiment-controller",
        description="What reconciles the experiment on a cluster. Unused on one machine.",
    )
    active_deadline_seconds: Annotated[int | None, LIVE] = Field(
        default=None,
        ge=1,
        le=315_360_000,
        description="Longest time from start, or resumption, to end on a cluster; then the experiment fails.",
    )
    startup_deadline_seconds: Annotated[int | None, LIVE] = Field(
        default=7200,
        ge=1,
        le=315_360_000,
        description="Longest time from start, or resumption, until it trains on a cluster; then the experiment fails. "
        "null = no limit.",
    )
    ttl_seconds_after_finished: Annotated[int | None, LIVE] = Field(
        default=None,
        ge=0,
        le=315_360_000,
        description="Time after the end at which a cluster deletes the experiment and its volume; none = never.",
    )
    code: CodeFiles = Field(
        default_factory=dict,
        description="Modules of yours by file name, as `task.py`, instead of those beside this file; `nexrl submit` "
        "fills it in.",
    )
    model: Annotated[ModelSpec, NEVER] = Field(description="The model to train.")
    data: Annotated[DataSpec, NEVER] = Field(
        description="Source of the training tasks; a `python` factory is called with `train`."
    )
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="Production of samples.")
    trajectory_pool: TrajectoryPoolSpec = Field(default_factory=TrajectoryPoolSpec, description="Groups and batches.")
    train_batch_pool: TrainBatchPoolSpec = Field(
        default_factory=TrainBatchPoolSpec, description="Queue of prepared batches."
    )
    trainer: TrainerSpec = Field(description="The train worker.")
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec, description="Advantages, loss and optimizer.")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="What is kept to resume.")
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec, description="Policy versions and staleness.")
    inference: InferenceSpec = Field(default_factory=InferenceSpec, description="Engines that sample.")
    validation: ValidationSpec | None = Field(
        default=None, description="Measurements on held-out tasks; none = no validation."
    )
    resume: ResumeSpec = Field(default_factory=ResumeSpec, description="Where training starts.")
    logger: LoggerSpec = Field(default_factory=LoggerSpec, description="Where metrics go.")
    monitor: MonitorSpec = Field(default_factory=MonitorSpec, description="Errors and health.")
    redis: RedisSpec = Field(default_factory=RedisSpec, description="The store of the ledger.")
    failure_policy: FailurePolicySpec = Field(default_factory=FailurePolicySpec, description="Restarts.")
    controller: Annotated[ControllerSpec, NEXT_START] = Field(
        default_factory=ControllerSpec, description="The controller's pod."
    )
    storage: StorageSpec = Field(
        default_factory=StorageSpec, description="The volume of the run's folder, and its copy in object storage."
    )

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence, prompt and completions together, in tokens."""
        row = self.inference.max_tokens_per_row
        return min(row, self.model.scratch.max_positions) if isinstance(self.model, ScratchModel) else row

    @field_validator("rollout")
    @classmethod
    def _fits_positions(cls, rollout: RolloutSpec, info: ValidationInfo) -> RolloutSpec:
        model = info.data.get("model")
        if isinstance(model, ScratchModel) and rollout.max_new_tokens >= model.scratch.max_positions:
            limit = model.scratch.max_positions
            raise refuse_key(
                "maxNewTokens", rollout.max_new_tokens, f"must be below model.scratch.maxPositions ({limit})"
            )
        return rollout

    @field_validator("rollout", "trajectory_pool", "algorithm", "weight_sync")
    @classmethod
    def _fits_demonstrations(cls, section: Section, info: ValidationInfo) -> Section:
        if isinstance(section, DemonstrationRollout):
            demonstrations.check_data(info.data.get("data"))
        if isinstance(info.data.get("rollout", section), DemonstrationRollout):
            demonstrations.check(section)
        return section

    @field_validator("algorithm")
    @classmethod
    def _compares_the_samples_of_a_group(cls, algorithm: AlgorithmSpec, info: ValidationInfo) -> AlgorithmSpec:
        pool: TrajectoryPoolSpec | None = info.data.get("trajectory_pool")
        trainer: TrainerSpec | None = info.data.get("trainer")
        advantage = algorithm.advantage if isinstance(algorithm, Grpo) and algorithm.processor == "builtin" else None
        is_trained = trainer is not None and trainer.backend != "mock"
        uses_none = algorithm.loss == "cross_entropy" or isinstance(info.data.get("rollout"), DemonstrationRollout)
        is_alone = pool is not None and not pool.compares_samples
        if is_trained and is_alone and not uses_none and advantage in GROUP_BASELINES:
            raise refuse_key(
                "advantage",
                advantage,
                "it compares the samples of a group, and trajectoryPool.groupSize is 1 or keyList is empty: every "
                "advantage would be 0; use groupSize 2 or more and a key, batch_mean_std, or an advantage of yours",
            )
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _trains_the_policy(cls, algorithm: AlgorithmSpec, info: ValidationInfo) -> AlgorithmSpec:
        trainer: TrainerSpec | None = info.data.get("trainer")
        if isinstance(algorithm, Ppo) and trainer and 0 < trainer.steps <= algorithm.critic_only_steps:
            raise refuse_key(
                "criticOnlySteps",
                algorithm.critic_only_steps,
                f"must be below trainer.steps, {trainer.steps}, or the policy is never trained",
            )
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _refills_groups_that_differ(cls, algorithm: AlgorithmSpec, info: ValidationInfo) -> AlgorithmSpec:
        pool: TrajectoryPoolSpec | None = info.data.get("trajectory_pool")
        if algorithm.zero_variance_groups != "refill":
            return algorithm
        if algorithm.teacher is not None:
            raise refuse_key(
                "zeroVarianceGroups",
                "refill",
                "algorithm.teacher tells samples of equal rewards apart; use keep or drop",
            )
        if pool is not None and not pool.compares_samples:
            raise refuse_key(
                "zeroVarianceGroups",
                "refill",
                "trajectoryPool.groupSize is 1 or keyList is empty: the reward of a sample alone equals itself, so "
                "every group would be refilled; use groupSize 2 or more and a key, or drop",
            )
        if isinstance(algorithm, Grpo) and algorithm.advantage == TURN_BASELINE:
            raise refuse_key(
                "zeroVarianceGroups",
                "refill",
                f"advantage {TURN_BASELINE} compares turns, and the pool only rewards of samples; use keep or drop",
            )
        if isinstance(algorithm, Grpo) and algorithm.advantage in BATCH_BASELINES:
            raise refuse_key(
                "zeroVarianceGroups",
                "refill",
                f"advantage {algorithm.advantage} compares the whole batch, so a group of equal rewards is as good as "
                "any other; use drop, or an advantage that compares the samples of a group",
            )
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _can_be_optimized(cls, algorithm: AlgorithmSpec, info: ValidationInfo) -> AlgorithmSpec:
        model: ModelSpec | None = info.data.get("model")
        if algorithm.optimizer == "muon" and model is not None and model.lora is not None:
            reason = "it needs the matrices of the model, and model.lora trains factors of their changes; use adamw"
            raise refuse_key("optimizer", "muon", reason)
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _moves_no_base(cls, algorithm: AlgorithmSpec, info: ValidationInfo) -> AlgorithmSpec:
        model: ModelSpec | None = info.data.get("model")
        if algorithm.reference is not None and model is not None and model.lora is not None:
            reason = "with model.lora the reference model is the base, which does not move; remove it"
            raise refuse_key("reference", algorithm.reference.model_dump(), reason)
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _has_groups_of_more_than_k(cls, algorithm: AlgorithmSpec, info: ValidationInfo) -> AlgorithmSpec:
        pool: TrajectoryPoolSpec | None = info.data.get("trajectory_pool")
        pass_k = algorithm.pass_k if isinstance(algorithm, Grpo) else None
        if pool is not None and pass_k is not None and pass_k >= pool.group_size > 1:
            raise refuse_key(
                "passK",
                pass_k,
                f"must be below trajectoryPool.groupSize ({pool.group_size}): the best of a whole group says nothing "
                "about one of its samples",
            )
        return algorithm

    @field_validator("weight_sync")
    @classmethod
    def _sends_no_adapter_by_nccl(cls, weight_sync: WeightSyncSpec, info: ValidationInfo) -> WeightSyncSpec:
        model: ModelSpec | None = info.data.get("model")
        if weight_sync.transport == "nccl" and model is not None and model.lora is not None:
            reason = "replicas merge adapters (model.lora) in host memory; use auto or gloo"
            raise refuse_key("transport", weight_sync.transport, reason)
        return weight_sync

    @field_validator("inference")
    @classmethod
    def _supports_in_flight(cls, inference: InferenceSpec, info: ValidationInfo) -> InferenceSpec:
        weight_sync: WeightSyncSpec | None = info.data.get("weight_sync")
        if weight_sync is not None and weight_sync.in_flight not in inference.IN_FLIGHT:
            supported = ", ".join(inference.IN_FLIGHT)
            raise refuse_key(
                "backend",
                inference.backend,
                f"weightSync.inFlight is {weight_sync.in_flight}; backend {inference.backend} supports {supported}",
            )
        return inference

    @field_validator("inference")
    @classmethod
    def _can_receive_by_nccl(cls, inference: InferenceSpec, info: ValidationInfo) -> InferenceSpec:
        weight_sync: WeightSyncSpec | None = info.data.get("weight_sync")
        if weight_sync is not None and weight_sync.transport == "nccl" and not inference.RECEIVES_ON_GPU:
            raise refuse_key(
                "backend",
                inference.backend,
                f"weightSync.transport is nccl; backend {inference.backend} loads weights from host memory; use "
                "weightSync.transport auto or gloo",
            )
        return inference

    @field_validator("inference")
    @classmethod
    def _has_room_for_completions(cls, inference: InferenceSpec, info: ValidationInfo) -> InferenceSpec:
        rollout: RolloutSpec | None = info.data.get("rollout")
        trainer: TrainerSpec | None = info.data.get("trainer")
        if rollout is not None and rollout.max_new_tokens >= inference.max_tokens_per_row:
            reason = f"must be above rollout.maxNewTokens ({rollout.max_new_tokens})"
            raise refuse_key("maxTokensPerRow", inference.max_tokens_per_row, reason)
        if trainer is not None and trainer.max_tokens_per_micro_batch < inference.max_tokens_per_row:
            reason = f"must not exceed trainer.maxTokensPerMicroBatch ({trainer.max_tokens_per_micro_batch})"
            raise refuse_key("maxTokensPerRow", inference.max_tokens_per_row, reason)
        return inference


class Experiment(Section):
    """One training run: the object of an experiment file and, on a cluster, the custom resource."""

    api_version: Literal["nexrl.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["Experiment"] = Field(description="Always Experiment.")
    metadata: Metadata = Field(description="Name, labels and annotations.")
    spec: ExperimentSpec = Field(description="What to train, on what, how.")

    @property
    def ledger(self) -> str:
        """The name in the experiment's keys in Redis."""
        return self.metadata.annotations.get(LEDGER_ANNOTATION, self.metadata.name)

    @property
    def generation(self) -> int:
        """The generation of its object on a cluster when it was started or resumed; 0 on one machine."""
        return int(self.metadata.annotations.get(GENERATION_ANNOTATION, 0))

    @property
    def folder(self) -> Path:
        """Folder beside which the user's modules are looked up: that of the user's file."""
        return Path(self.metadata.annotations.get(FOLDER_ANNOTATION, "."))
