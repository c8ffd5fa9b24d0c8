"""`spec.trainer`, `spec.checkpoint` and `spec.resume`: the train worker, what it keeps, where it starts."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec.cluster import Template
from nexrl.spec.section import Count, CountOrZero, Device, Gpus, Location, Section, Seed, refuse, written_out
from nexrl.spec.variants import VariantSection


class TrainerSpec(Section):
    """The train worker."""

    type: Literal["default"] = Field(default="default", description="PyTorch over the weights of `model`.")
    backend: Literal["builtin", "mock"] = Field(
        default="builtin", description="builtin: PyTorch; mock: counts steps and changes no weight."
    )
    steps: CountOrZero = Field(
        description="Steps after which training is finished; 0 = no limit, the Trainer RPCs decide."
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Pods that train one model together, each with `processesPerReplica` processes; on one machine, "
        "groups of processes. With storage.accessMode ReadWriteOnce, all pods run on one node.",
    )
    processes_per_replica: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that train one model together: each holds a shard of it, on a GPU of its own, or on the "
        "CPU. The result is that of one process, up to rounding.",
    )
    max_tokens_per_micro_batch: Count = Field(
        default=8192, description="Tokens of one forward and backward pass; the result does not depend on it."
    )
    activation_checkpointing: Literal["none", "full"] = Field(
        default="none",
        description="full: the backward pass computes the activations of each decoder layer again, to save memory.",
    )
    compile: bool = Field(
        default=False, description="Decoder layers are compiled by torch.compile, which needs a C++ compiler."
    )
    device: Device = Field(
        default="auto", description="What PyTorch computes on; auto: one CUDA GPU if there is one, otherwise the CPU."
    )
    gpus: Gpus = Field(
        default=(),
        max_length=1024,
        description="On one machine: numbers of the GPUs that the processes use, one each; none = the first ones. On a "
        "cluster, `template` requests GPUs.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, steps repeat bit for bit, more slowly. An operation that PyTorch cannot repeat fails, "
        "with its name. On a CPU, steps repeat in any case.",
    )
    threads: int = Field(
        default=1, ge=1, le=1024, description="CPU threads of PyTorch, shared out among the processes of a replica."
    )
    seed: Seed = Field(default=0, description="Seed of everything that is random in training.")
    template: Template = None

    @property
    def ranks(self) -> int:
        """Processes that train one model together."""
        return self.replicas * self.processes_per_replica

    @property
    def threads_per_process(self) -> int:
        """The share of each process in `threads`, at least one."""
        return max(1, self.threads // self.processes_per_replica)

    @field_validator("replicas", "processes_per_replica")
    @classmethod
    def _computes(cls, number: int, info: ValidationInfo) -> int:
        if number > 1 and info.data.get("backend") == "mock":
            raise refuse("trainer.backend mock computes nothing that processes could share; use 1")
        return number


class CheckpointSpec(Section):
    """Where and how often the trainer writes everything that it needs to resume."""

    path: Location | None = Field(
        default=None,
        description="Folder of the checkpoints, relative to this file; none = checkpoints/ in the run's folder.",
    )
    every_steps: CountOrZero = Field(default=50, description="Steps between checkpoints; 0 = only at the end.")
    keep: int = Field(
        default=2,
        ge=2,
        le=1_000_000,
        description="Newest checkpoints kept. An older one is removed once its successor is 10 seconds old. At least "
        "2: if Redis loses its last second, the checkpoint before the newest still matches it.",
    )


class ResumeSpec(VariantSection):
    """Where training starts."""

    TAGS: ClassVar = ("mode",)

    mode: str = Field(description="Where training starts.")


class NoResume(ResumeSpec):
    """Training starts with the initial weights."""

    mode: Literal["disable"] = Field(default="disable", description="Initial weights.")


class AutoResume(ResumeSpec):
    """Training starts from the newest complete checkpoint of this experiment, if there is one."""

    mode: Literal["auto"] = Field(description="The newest checkpoint.")


class ResumeFromPath(ResumeSpec):
    """Training starts from the checkpoint at `path`."""

    mode: Literal["from_path"] = Field(description="A checkpoint by its path.")
    path: Annotated[Location, written_out(None)] = Field(description="A folder global_step_N, relative to this file.")
