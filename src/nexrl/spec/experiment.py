"""The schema of an experiment, written once: `nexrl.spec.load` reads files by it, `nexrl.spec.reference` documents it.

Keys are camelCase in files and snake_case in Python. Sections are strict and frozen: an unknown key, a string where a
number belongs, or a combination that cannot work never becomes an `Experiment`. What depends on the machine (does the
path exist? is the package installed?) is not judged here but in `nexrl.spec.load`.

A rule between fields is a validator of the later field: it reports at that field, and even when other fields are wrong.
"""

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

API_VERSION = "nexrl.dev/v1alpha1"
FOLDER_ANNOTATION = "nexrl.dev/folder"
"""Annotation with the folder of the file that the user wrote: its resolved copy finds the user's modules there."""
LEDGER_ANNOTATION = "nexrl.dev/ledger"
"""Annotation with the name of the experiment's keys in Redis, where that is not `metadata.name`: two namespaces may
each have an experiment of one name."""

Text = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Location = Annotated[str, Field(min_length=1, max_length=1024)]
Reference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=256)]
Seconds = Annotated[float, Field(gt=0, le=604_800)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000_000)]
Replicas = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]

DEFAULT_REWARDS = {"simple": "nexrl.rewards:exact_match", "single_turn_math": "nexrl.rewards:math_answer"}
_OLD_READINESS = {
    "batch_size_reached": "batch_size",
    "batch_size_reached_and_loaded_batch_finished": "batch_size_and_loaded_batch_finished",
}
_READINESS = ("batch_size", "loaded_batch_finished", "batch_size_and_loaded_batch_finished")


def _refuse(reason: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{message}", {"message": reason})


def _with_port(url: str | None) -> str | None:
    """The URL, whose host and port can be told apart, and be called."""
    try:
        port = urlsplit(url or "").port
    except ValueError as error:
        raise _refuse(f"its host or port is none ({error}); allowed: HOST:PORT, ports 1 to 65535") from None
    if port == 0:
        raise _refuse("its port is 0; allowed: 1 to 65535")
    return url


class Section(BaseModel):
    """A mapping of the experiment file."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        strict=True,
        validate_default=True,
    )


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


class TemplateMetadataSpec(Section):
    """What is added to the metadata of pods."""

    labels: dict[str, Text] = Field(default_factory=dict, max_length=64, description="More labels of the pods.")
    annotations: dict[str, Text] = Field(default_factory=dict, max_length=64, description="Annotations of the pods.")


class TemplateSpec(Section):
    """What is laid over the pods that the operator renders; unused on one machine."""

    metadata: TemplateMetadataSpec = Field(
        default_factory=TemplateMetadataSpec, description="Labels and annotations of the pods."
    )
    spec: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Part of a PodSpec: GPUs, tolerations, node selectors, volumes. Mappings are merged, lists of "
        "things with names are merged by name, others replaced; the container of the component is called nexrl.",
    )


Template = Annotated[TemplateSpec | None, Field(description="Kubernetes: laid over the pods; none = as rendered.")]


class ScratchModelSpec(Section):
    """A Llama with random weights and one token per character, for tasks that a small CPU can learn."""

    alphabet: str = Field(
        min_length=1,
        max_length=512,
        description="Characters of the vocabulary, each once; <pad> <bos> <eos> <unk> are added.",
    )
    hidden_size: int = Field(
        default=64, ge=8, le=8192, description="Width of the residual stream; an even multiple of heads."
    )
    intermediate_size: int = Field(default=256, ge=8, le=32_768, description="Width of the feed-forward layer.")
    layers: int = Field(default=2, ge=1, le=128, description="Transformer blocks.")
    heads: int = Field(default=4, ge=1, le=128, description="Attention heads per block.")
    max_positions: int = Field(
        default=64, ge=2, le=131_072, description="Longest sequence (tokens), prompt and completion together."
    )

    @field_validator("alphabet")
    @classmethod
    def _has_no_repetition(cls, alphabet: str) -> str:
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if repeated:
            raise _refuse(f"each character once; repeated: {' '.join(map(repr, repeated))}")
        return alphabet

    @field_validator("heads")
    @classmethod
    def _divides_hidden_size(cls, heads: int, info: ValidationInfo) -> int:
        hidden_size = info.data.get("hidden_size")
        if (
            hidden_size is not None and hidden_size % (2 * heads) != 0
        ):  # rotary embeddings pair the dimensions of a head
            raise _refuse(f"hiddenSize ({hidden_size}) must be an even multiple of heads ({heads})")
        return heads

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it: the special tokens of `nexrl.tokenizers`, and one for each character."""
        return 4 + len(set(self.alphabet))


class ModelSpec(Section):
    """The model to train: existing weights (`path`) or random ones (`scratch`), exactly one of them."""

    tag: str = Field(
        default="default",
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
        description="Names the model; trajectories, batches, weights and policy versions are kept per tag.",
    )
    path: Location | None = Field(
        default=None,
        description="Local Hugging Face folder, relative to this file, or `package:NAME` for the GGUF inside an "
        "installed Python package.",
    )
    scratch: ScratchModelSpec | None = Field(default=None, description="Random initial weights of this shape.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Number format of the weights in forward and backward passes."
    )
    seed: Seed = Field(default=0, description="Seed of random initial weights.")

    @field_validator("scratch")
    @classmethod
    def _is_the_only_source(cls, scratch: ScratchModelSpec | None, info: ValidationInfo) -> ScratchModelSpec | None:
        if "path" in info.data and (info.data["path"] is None) == (scratch is None):
            raise _refuse("give exactly one of path and scratch")
        return scratch


class _Tasks(Section):
    """What every source of tasks has."""

    type: str = Field(description="Kind of source.")
    seed: Seed = Field(
        default=0, description="Seed of the order of the tasks, and of their content where they are generated."
    )
    shuffle: bool = Field(
        default=True, description="Whether each epoch has its own random order, derived from seed and epoch."
    )
    epochs: Count | None = Field(
        default=None, description="Passes over the tasks before the data ends; none = endless. Validation makes one."
    )


class _FileTasks(_Tasks):
    """Tasks in a file of the user."""

    path: Location = Field(description="The file, relative to this one.")
    prompt_field: Name = Field(default="prompt", description="Field (column) that holds the prompt: text.")
    answer_field: str = Field(
        default="answer",
        max_length=128,
        description='Field (column) that holds the answer: text or a number; "" = tasks have none.',
    )


class MockDataSpec(_Tasks):
    """Generated digit strings, each its own answer: for trying the machinery."""

    type: Literal["mock"] = Field(description="Generated digit strings.")
    size: Count = Field(default=64, description="Number of tasks.")


class JsonlDataSpec(_FileTasks):
    """One JSON object per line."""

    type: Literal["jsonl"] = Field(description="A file with one JSON object per line.")


class ParquetDataSpec(_FileTasks):
    """One row per task."""

    type: Literal["parquet"] = Field(description="A Parquet file.")


class ReasoningGymDataSpec(_Tasks):
    """Procedurally generated tasks of the reasoning-gym package."""

    type: Literal["reasoning_gym"] = Field(description="A generator of the reasoning-gym package.")
    name: Name = Field(description="Dataset of reasoning-gym, such as chain_sum.")
    config: dict[str, JsonValue] = Field(
        default_factory=dict, description="Parameters of that dataset, in its own spelling."
    )
    size: int = Field(default=1000, ge=1, le=100_000, description="Number of tasks to generate.")


class PythonDataSpec(_Tasks):
    """Tasks from a function of the user."""

    type: Literal["python"] = Field(description="A Python function.")
    factory: Reference = Field(
        description="`module:function` taking `train` or `validation` and returning a sequence of mappings with "
        "prompt and answer; "
        "the module is looked up beside this file first."
    )


DataSpec = Annotated[
    MockDataSpec | JsonlDataSpec | ParquetDataSpec | ReasoningGymDataSpec | PythonDataSpec, Field(discriminator="type")
]


class RolloutSpec(Section):
    """How samples are produced: the environment, the reward, the sampling, and how failures are retried."""

    type: Literal["mock", "simple", "agent", "single_turn_math"] = Field(
        default="simple",
        description="simple: one prompt, one completion, a reward function; single_turn_math: the same, graded "
        "as mathematics; "
        "agent: an environment owns the conversation; mock: made-up trajectories that never ask the engine.",
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="Rollout processes (pods); 0 when only workers of your own feed the experiment.",
    )
    workers: int = Field(default=32, ge=1, le=4096, description="Samples produced at the same time by each process.")
    environment: Reference | None = Field(
        default=None, description="`module:Class` of the environment; for type agent only."
    )
    reward: Reference | None = Field(
        default_factory=lambda known: DEFAULT_REWARDS.get(known.get("type", "")),
        description="`module:function`, see nexrl.rewards. Default: nexrl.rewards:exact_match for simple, "
        "nexrl.rewards:math_answer for single_turn_math; an agent's environment gives its own.",
    )
    chat: bool = Field(
        default=False, description="Whether prompts go through the model's chat template as user messages."
    )
    system_prompt: Text | None = Field(default=None, description="System message put before each prompt; needs chat.")
    max_new_tokens: Count = Field(
        default=256, description="Longest completion (tokens) per turn; a longer one is cut and TRUNCATED."
    )
    temperature: float = Field(default=1.0, gt=0, le=10, description="Sampling temperature of training rollouts.")
    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts at a sample before it is given up.")
    lease_seconds: Seconds = Field(
        default=60.0, description="Time without a renewal after which a worker's samples go to another worker."
    )
    timeout_seconds: Seconds = Field(
        default=300.0, description="Longest time for one attempt at a sample; then its verdict is TIMEOUT."
    )
    template: Template = None

    @field_validator("environment")
    @classmethod
    def _belongs_to_agent(cls, environment: str | None, info: ValidationInfo) -> str | None:
        if "type" in info.data and (info.data["type"] == "agent") != (environment is not None):
            raise _refuse("rollout.type agent needs environment, and only agent may have one")
        return environment

    @field_validator("reward")
    @classmethod
    def _belongs_to_scored_types(cls, reward: str | None, info: ValidationInfo) -> str | None:
        if "type" in info.data and (info.data["type"] in DEFAULT_REWARDS) != (reward is not None):
            raise _refuse(
                f"rollout.type {info.data['type']} makes its own reward; only simple and single_turn_math have this key"
            )
        return reward

    @field_validator("system_prompt")
    @classmethod
    def _needs_chat(cls, system_prompt: str | None, info: ValidationInfo) -> str | None:
        if system_prompt is not None and info.data.get("chat") is False:
            raise _refuse("needs rollout.chat: true")
        return system_prompt


class TrajectoryPoolSpec(Section):
    """How trajectories become groups and batches."""

    type: Literal["default"] = Field(default="default", description="The Redis-backed pool.")
    batch_size: int = Field(
        default=64, ge=1, le=65_536, description="Trajectories per training step; a multiple of groupSize."
    )
    group_size: int = Field(default=8, ge=1, le=1024, description="Samples of each task, compared with each other.")
    key_list: tuple[Name, ...] = Field(
        default=("task_id",),
        max_length=8,
        description="Trajectory keys that nest groups; the innermost is one group. Empty = trajectories are not "
        "grouped.",
    )
    readiness: Annotated[
        Literal["batch_size", "loaded_batch_finished", "batch_size_and_loaded_batch_finished"],
        BeforeValidator(lambda given: _OLD_READINESS.get(given, given) if isinstance(given, str) else given),
        WithJsonSchema({"type": "string", "enum": [*_READINESS, *_OLD_READINESS]}),
    ] = Field(
        default="batch_size",
        description="When a batch may be trained: enough trajectories, every task handed out has ended, or both. "
        "The two longer spellings with `reached` mean the same as those without.",
    )
    incomplete_groups: Literal["release", "drop"] = Field(
        default="release",
        description="What becomes of a group some of whose samples failed for good: used smaller, or not used.",
    )
    max_payload_bytes: int = Field(
        default=8 * 2**30,
        ge=2**20,
        le=2**50,
        description="Bytes of trajectories, train batches and added tasks in Redis beyond which puts are refused while "
        "the trainer has a batch to use up, and half of which makes it write a checkpoint, which frees train batches. "
        "One batch may go beyond it. Where two thirds of Redis' maxmemory are less, they are the limit.",
    )
    replicas: Replicas = Field(default=1, description="Identical pool processes.")
    template: Template = None

    @field_validator("group_size")
    @classmethod
    def _divides_batch_size(cls, group_size: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size")
        if batch_size is not None and batch_size % group_size != 0:
            raise _refuse(f"batchSize ({batch_size}) must be a multiple of groupSize ({group_size})")
        return group_size

    @property
    def groups_per_batch(self) -> int:
        """Tasks per training step when no sample fails."""
        return self.batch_size // self.group_size


class AlgorithmSpec(Section):
    """Advantages, loss and optimizer."""

    type: Literal["grpo", "mock"] = Field(
        default="grpo", description="grpo: group-relative policy optimisation; mock: rewards as they are."
    )
    advantage: Literal["group_mean", "group_mean_std", "rloo"] = Field(
        default="group_mean",
        description="Baseline: mean of the group (Dr.GRPO), mean and standard deviation (GRPO), or mean of the "
        "others (RLOO).",
    )
    loss: Literal["ppo_clip", "cispo", "reinforce"] = Field(default="ppo_clip", description="Policy loss.")
    clip_low: Ratio = Field(
        default=0.2, description="ppo_clip: lowest probability ratio is 1 - clipLow. Others ignore it."
    )
    clip_high: float = Field(
        default_factory=lambda known: 4.0 if known.get("loss") == "cispo" else 0.28,
        ge=0,
        le=100,
        description="Highest probability ratio is 1 + clipHigh (reinforce ignores it). Default: 0.28, and 4 for cispo.",
    )
    aggregation: Literal["token", "sequence"] = Field(
        default="token",
        description="token: every token of the batch weighs the same (DAPO); sequence: every trajectory does.",
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, le=10, description="Weight of the entropy bonus.")
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Weight of the KL penalty against the initial model; 0 = no reference model.",
    )
    zero_variance_groups: Literal["keep", "drop"] = Field(
        default="drop",
        description="Whether groups with one and the same reward take part in forward and backward passes.",
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Highest learning rate of AdamW.")
    warmup_steps: CountOrZero = Field(
        default=0, description="Steps over which the learning rate rises linearly from 0."
    )
    final_learning_rate_ratio: Ratio = Field(
        default=1.0,
        description="Learning rate at the last step, as a share of the highest; the fall is linear. 1 = constant.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        default=(0.9, 0.999),
        min_length=2,
        max_length=2,
        description="AdamW's decay rates of the first and second moment.",
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="AdamW's decoupled weight decay.")
    gradient_clip: float = Field(default=1.0, gt=0, le=1e6, description="Largest norm of the gradient.")


class TrainBatchPoolSpec(Section):
    """The queue between preparing batches and training on them."""

    type: Literal["default"] = Field(default="default", description="The Redis-backed queue.")
    max_queued: int = Field(default=2, ge=1, le=1024, description="Prepared batches that may wait.")


class TrainerSpec(Section):
    """The train worker."""

    type: Literal["default"] = Field(default="default", description="PyTorch over the weights of `model`.")
    backend: Literal["builtin", "mock"] = Field(
        default="builtin", description="builtin: PyTorch; mock: counts steps, changes no weight."
    )
    steps: CountOrZero = Field(
        description="Optimizer updates after which training is finished; 0 = none, the Trainer RPCs decide."
    )
    replicas: int = Field(default=1, ge=1, le=1, description="Trainer processes; one for now.")
    max_tokens_per_micro_batch: Count = Field(
        default=8192, description="Tokens of one forward and backward pass; the result does not depend on it."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of PyTorch.")
    seed: Seed = Field(default=0, description="Seed of whatever is random in training.")
    template: Template = None


class CheckpointSpec(Section):
    """Where and how often everything needed to resume is written."""

    path: Location | None = Field(
        default=None,
        description="Folder of the checkpoints, relative to this file; none = checkpoints/ in the run's folder.",
    )
    every_steps: CountOrZero = Field(default=50, description="Steps between checkpoints; 0 = only at the end.")
    keep: int = Field(
        default=2,
        ge=2,
        le=1_000_000,
        description="Newest checkpoints kept; older ones are removed, once the one after them is 10 seconds old. 2 at "
        "least: a Redis that lost its last second must still find one that it can follow.",
    )


class WeightSyncSpec(Section):
    """How new policy versions reach the replicas, and how far behind they may be."""

    type: Literal["default"] = Field(default="default", description="The transactional weight sync.")
    mode: Literal["sync", "batch-async", "fully-async"] = Field(
        default="sync",
        description="sync: everyone waits for the newest version; batch-async: workers wait when staleness would pass "
        "stalenessThreshold; fully-async: replicas change weights between two tokens, and only the threshold makes a "
        "worker wait.",
    )
    staleness_threshold: int = Field(
        default_factory=lambda known: 0 if known.get("mode", "sync") == "sync" else 1,
        ge=0,
        le=64,
        description="Largest staleness (steps) of a trained trajectory: 0 in sync, 1 or more otherwise. Default: "
        "0 or 1.",
    )
    timeout_seconds: Seconds = Field(
        default=120.0, description="Time for one sync; a replica that is later is put out of it."
    )
    bucket_bytes: int = Field(
        default=64 * 2**20, ge=1024, le=2**30, description="Size (bytes) of the packed buckets that are broadcast."
    )
    path: Location | None = Field(
        default=None,
        description="Folder that trainer and replicas share, relative to this file: the newest two versions are written"
        " there, and a replica that comes late reads the committed one there. None = it is broadcast to all again.",
    )
    in_flight: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="What a new version means for completions being generated. keep: they go on with it, their keys "
        "and values computed again; wait: they end first; abort: they are cut off and continued from where they were, "
        "as prompts. The built-in engine keeps.",
    )
    template: Template = None

    @field_validator("staleness_threshold")
    @classmethod
    def _fits_mode(cls, staleness_threshold: int, info: ValidationInfo) -> int:
        mode = info.data.get("mode")
        if mode is not None and (mode == "sync") != (staleness_threshold == 0):
            raise _refuse("must be 0 in mode sync" if mode == "sync" else f"must be 1 or more in mode {mode}")
        return staleness_threshold


VLLM_ARGUMENTS_OF_OURS = frozenset(
    f"--{name}" if len(name) > 2 else f"-{name}"
    for name in (
        "dp",
        "tp",
        "generation-config",
        "worker-extension-cls",
        "api-key",
        "config",
        "data-parallel-size",
        "dtype",
        "host",
        "load-format",
        "logprobs-mode",
        "max-model-len",
        "max-num-seqs",
        "model",
        "port",
        "served-model-name",
        "tensor-parallel-size",
        "uds",
        "weight-transfer-config",
    )
)


class InferenceSpec(Section):
    """The engines that sample from the policy."""

    backend: Literal["builtin", "vllm"] = Field(
        default="builtin",
        description="builtin: the PyTorch engine of this project; vllm: a vLLM server in each replica.",
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        max_length=1024,
        description="An engine that runs already, instead of starting one; backend vllm only.",
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=128,
        description="Environment variable that holds the key of the engine at url; never the key itself.",
    )
    replicas: Replicas = Field(default=1, description="Engine processes (pods).")
    max_rows: int = Field(default=64, ge=1, le=4096, description="Samples decoded together by one replica.")
    max_tokens_per_row: int = Field(
        default=2048, ge=2, le=1_048_576, description="Longest sequence (tokens), prompt and completion together."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of PyTorch.")
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="GPUs that share each layer; vllm only.")
    data_parallel: int = Field(default=1, ge=1, le=64, description="Engines behind one replica; vllm only.")
    vllm_args: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="More arguments of the vLLM server, as `[--gpu-memory-utilization, '0.8']`; vllm only.",
    )
    max_retries: int = Field(default=3, ge=0, le=100, description="Times a failed request is sent again.")
    seed: Seed = Field(default=0, description="Seed of sampling.")
    template: Template = None

    @field_validator("tensor_parallel", "data_parallel", "vllm_args")
    @classmethod
    def _has_effect(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (1, ()) and info.data.get("backend", "vllm") != "vllm":
            raise _refuse(f"only backend vllm has it; backend {info.data['backend']} is one process")
        return value

    @field_validator("vllm_args")
    @classmethod
    def _leaves_ours(cls, vllm_args: tuple[str, ...]) -> tuple[str, ...]:
        for argument in vllm_args:
            if argument.partition("=")[0].replace("_", "-") in VLLM_ARGUMENTS_OF_OURS:
                raise _refuse(f"{argument}: the replica decides that; other fields of inference and model set it")
        return vllm_args

    @field_validator("url")
    @classmethod
    def _belongs_to_vllm(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is not None and info.data.get("backend", "vllm") != "vllm":
            raise _refuse(f"only backend vllm can run elsewhere; backend {info.data['backend']} is started by the run")
        return _with_port(url)

    @field_validator("api_key_env")
    @classmethod
    def _belongs_to_url(cls, api_key_env: str | None, info: ValidationInfo) -> str | None:
        if api_key_env is not None and "url" in info.data and info.data["url"] is None:
            raise _refuse("needs inference.url")
        return api_key_env


class ValidationSpec(Section):
    """Measuring the policy on tasks that it does not train on."""

    type: Literal["default"] = Field(default="default", description="Mean of every reward component.")
    data: DataSpec = Field(
        description="Source of the validation tasks; a `python` factory is called with `validation`."
    )
    held_out: bool = Field(
        default=True, description="Whether training leaves out tasks whose prompt is also a validation prompt."
    )
    before_training: bool = Field(default=True, description="Whether policy version 0 is validated.")
    every_steps: CountOrZero = Field(
        default=0, description="Steps between validations; 0 = only at the end. There is always one at the end."
    )
    temperature: float = Field(default=0.0, ge=0, le=10, description="Sampling temperature; 0 = greedy.")
    samples_per_task: int = Field(
        default=1, ge=1, le=1024, description="Samples of each task; more than 1 needs a temperature above 0."
    )
    timeout_seconds: Seconds = Field(default=600.0, description="Longest time for one validation.")

    @field_validator("samples_per_task")
    @classmethod
    def _is_one_when_greedy(cls, samples_per_task: int, info: ValidationInfo) -> int:
        if samples_per_task > 1 and info.data.get("temperature") == 0:
            raise _refuse("greedy samples are all alike: 1, or temperature above 0")
        return samples_per_task


class ResumeSpec(Section):
    """Where training starts."""

    mode: Literal["disable", "auto", "from_path"] = Field(
        default="disable",
        description="disable: initial weights; auto: newest complete checkpoint of this experiment, if any; "
        "from_path: `path`.",
    )
    path: Location | None = Field(
        default=None, description="A folder global_step_<n>, relative to this file; for from_path only."
    )

    @field_validator("path")
    @classmethod
    def _belongs_to_from_path(cls, path: str | None, info: ValidationInfo) -> str | None:
        if "mode" in info.data and (info.data["mode"] == "from_path") != (path is not None):
            raise _refuse("resume.mode from_path needs path, and only from_path may have one")
        return path


class LoggerSpec(Section):
    """Where metrics of the experiment go."""

    backends: tuple[Literal["console", "jsonl", "wandb"], ...] = Field(
        default=("console", "jsonl"),
        max_length=3,
        description="console: the live view; jsonl: metrics.jsonl in the run's folder; wandb: Weights & Biases.",
    )


class ErrorMonitorSpec(Section):
    """What errors reported by components lead to."""

    enabled: bool = Field(default=True, description="Whether reported errors can stop the experiment.")
    policy: Literal["stop_on_error", "continue", "stop_on_critical"] = Field(
        default="stop_on_critical",
        description="Severity that stops the experiment: ERROR or CRITICAL, never, or CRITICAL only.",
    )


class HealthMonitorSpec(Section):
    """Whether components are alive."""

    enabled: bool = Field(
        default=True, description="Whether a component without a sign of life is reported as an error."
    )
    check_interval_seconds: Seconds = Field(default=5.0, description="Time between two heartbeats of a component.")
    timeout_seconds: Seconds = Field(
        default=30.0, description="Silence after which a component counts as dead; longer than the interval."
    )

    @field_validator("timeout_seconds")
    @classmethod
    def _exceeds_interval(cls, timeout_seconds: float, info: ValidationInfo) -> float:
        interval_seconds = info.data.get("check_interval_seconds")
        if interval_seconds is not None and timeout_seconds <= interval_seconds:
            raise _refuse(f"must be above checkIntervalSeconds ({interval_seconds:g})")
        return timeout_seconds


class MonitorSpec(Section):
    """Errors and health."""

    errors: ErrorMonitorSpec = Field(default_factory=ErrorMonitorSpec, description="Reaction to reported errors.")
    health: HealthMonitorSpec = Field(default_factory=HealthMonitorSpec, description="Heartbeats.")


class RedisSpec(Section):
    """The store of the ledger."""

    url: str | None = Field(
        default=None,
        pattern=r"^(rediss?(\+cluster)?|unix)://\S+$",
        max_length=1024,
        description="Redis to use, with its user, as `rediss://USER@HOST:PORT`; the password is NEXRL_REDIS_PASSWORD "
        "in the environment. `redis+cluster` or `rediss+cluster`: any node of a Redis Cluster. None = a private server "
        "for this run, or the cluster's. See docs/how-to/redis.md.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=604_800,
        ge=60,
        le=315_360_000,
        description="Time for which a shared Redis keeps the keys of the experiment once it has succeeded or failed; "
        "none = for ever. A private server's stay in the run's folder.",
    )

    @field_validator("url")
    @classmethod
    def _holds_no_secret(cls, url: str | None) -> str | None:
        parts = urlsplit(_with_port(url) or "")
        if parts.password or "password" in parse_qs(parts.query):
            raise _refuse("holds a password, and files are read by many; give it as NEXRL_REDIS_PASSWORD instead")
        return url


class FailurePolicySpec(Section):
    """How often components are started again."""

    max_restarts: int = Field(
        default=3, ge=0, le=1000, description="Restarts of each component before the experiment fails."
    )


class ControllerSpec(Section):
    """The process that leads the experiment."""

    template: Template = None


class StorageSpec(Section):
    """The volume with the run's folder: checkpoints, trajectories, metrics.jsonl. Unused on one machine."""

    size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$", max_length=16)] = Field(
        default="10Gi", description="Size of the volume."
    )
    storage_class_name: Name | None = Field(default=None, description="Its StorageClass; none = the cluster's default.")
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        default="ReadWriteOnce",
        description="ReadWriteMany: with the controller's metrics.jsonl; ReadWriteOnce: that goes with its pod.",
    )


CodeFiles = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,119}\.py$")], Annotated[str, Field(max_length=262_144)]
    ],
    Field(max_length=32),
]


class ExperimentSpec(Section):
    """What to train, on what, how."""

    project: Name = Field(default="nexrl", description="Project under which metrics are logged.")
    suspend: bool = Field(default=False, description="Whether the experiment keeps its state and runs nothing.")
    managed_by: Literal["nexrl.dev/experiment-controller", "kueue.x-k8s.io/multikueue"] = Field(
        default="nexrl.dev/experiment-controller",
        description="Who reconciles the experiment on a cluster. Unused on one machine.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315_360_000,
        description="Longest time from start, or resume, to end on a cluster; then the experiment fails.",
    )
    startup_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315_360_000,
        description="Longest time from start, or resume, until it trains on a cluster; then the experiment fails.",
    )
    ttl_seconds_after_finished: int | None = Field(
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
    model: ModelSpec = Field(description="The model to train.")
    data: DataSpec = Field(description="Source of the training tasks; a `python` factory is called with `train`.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="Production of samples.")
    trajectory_pool: TrajectoryPoolSpec = Field(default_factory=TrajectoryPoolSpec, description="Groups and batches.")
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec, description="Advantages, loss and optimizer.")
    train_batch_pool: TrainBatchPoolSpec = Field(
        default_factory=TrainBatchPoolSpec, description="Queue of prepared batches."
    )
    trainer: TrainerSpec = Field(description="The train worker.")
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
    controller: ControllerSpec = Field(default_factory=ControllerSpec, description="The controller's pod.")
    storage: StorageSpec = Field(default_factory=StorageSpec, description="The volume of the run's folder.")

    @field_validator("rollout")
    @classmethod
    def _fits_positions(cls, rollout: RolloutSpec, info: ValidationInfo) -> RolloutSpec:
        model: ModelSpec | None = info.data.get("model")
        if model is not None and model.scratch is not None and rollout.max_new_tokens >= model.scratch.max_positions:
            raise _refuse(
                f"maxNewTokens ({rollout.max_new_tokens}) must be below model.scratch.maxPositions "
                f"({model.scratch.max_positions})"
            )
        return rollout

    @field_validator("inference")
    @classmethod
    def _can_do_what_a_sync_asks(cls, inference: InferenceSpec, info: ValidationInfo) -> InferenceSpec:
        weight_sync: WeightSyncSpec | None = info.data.get("weight_sync")
        if weight_sync is not None and weight_sync.in_flight != "keep" and inference.backend != "vllm":
            raise _refuse(f"weightSync.inFlight is {weight_sync.in_flight}, which needs backend vllm; builtin can keep")
        return inference

    @field_validator("inference")
    @classmethod
    def _has_room_for_completions(cls, inference: InferenceSpec, info: ValidationInfo) -> InferenceSpec:
        rollout: RolloutSpec | None = info.data.get("rollout")
        trainer: TrainerSpec | None = info.data.get("trainer")
        if rollout is not None and rollout.max_new_tokens >= inference.max_tokens_per_row:
            raise _refuse(
                f"maxTokensPerRow ({inference.max_tokens_per_row}) must be above rollout.maxNewTokens "
                f"({rollout.max_new_tokens})"
            )
        if trainer is not None and trainer.max_tokens_per_micro_batch < inference.max_tokens_per_row:
            raise _refuse(
                f"maxTokensPerRow ({inference.max_tokens_per_row}) must not exceed "
                f"trainer.maxTokensPerMicroBatch ({trainer.max_tokens_per_micro_batch})"
            )
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
    def folder(self) -> Path:
        """Folder beside which the user's modules are looked up: that of the file as the user wrote it."""
        return Path(self.metadata.annotations.get(FOLDER_ANNOTATION, "."))
