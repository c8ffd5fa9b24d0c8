"""`spec.inference`: the engines that sample. Each backend is one class here, and one folder of nexrl_inference."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from nexrl.spec.cluster import Template
from nexrl.spec.section import ROLLING, Device, Gpus, Replicas, Seed, refuse, written_out
from nexrl.spec.variants import VariantSection

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


class InferenceSpec(VariantSection):
    """The engines that sample from the policy."""

    TAGS: ClassVar = ("backend",)
    IMAGE: ClassVar[str] = ""
    """The release's image of the backend's pods: the last part of an OperatorSettings field."""
    IN_FLIGHT: ClassVar[tuple[str, ...]] = ()
    """The values of weightSync.inFlight that the backend supports."""
    RECEIVES_ON_GPU: ClassVar[bool] = False
    """Whether the backend can receive weights into the memory of its GPU (weightSync.transport nccl)."""
    PACKAGE: ClassVar[str | None] = None
    """The Python package that the backend requires, besides those of NexRL."""

    backend: str = Field(description="The engine.")
    replicas: Replicas = Field(default=1, description="Engine processes (pods).")
    max_rows: int = Field(default=64, ge=1, le=4096, description="Samples that one replica decodes together.")
    max_tokens_per_row: int = Field(
        default=2048, ge=2, le=1_048_576, description="Longest sequence (tokens), prompt and completion together."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of PyTorch.")
    gpus: Gpus = Field(
        default=(),
        max_length=1024,
        description="On one machine: numbers of the GPUs that the replicas use in turn; none = those that the trainer "
        "leaves, or the trainer's if it leaves none. On a cluster, `template` requests GPUs.",
    )
    max_retries: int = Field(default=3, ge=0, le=100, description="Times that a failed request is sent again.")
    seed: Seed = Field(default=0, description="Seed of sampling.")
    template: Annotated[Template, ROLLING] = None


class BuiltinInference(InferenceSpec):
    """The PyTorch engine of this project, one process."""

    IMAGE: ClassVar = "inference"
    IN_FLIGHT: ClassVar = ("keep",)
    RECEIVES_ON_GPU: ClassVar = True

    backend: Literal["builtin"] = Field(default="builtin", description="The PyTorch engine of this project.")
    device: Device = Field(
        default="auto", description="What PyTorch computes on; auto: one CUDA GPU if there is one, otherwise the CPU."
    )


class VllmInference(InferenceSpec):
    """A vLLM server in each replica."""

    IMAGE: ClassVar = "vllm"
    IN_FLIGHT: ClassVar = ("keep", "wait", "abort")
    PACKAGE: ClassVar = "vllm"

    backend: Literal["vllm"] = Field(description="A vLLM server.")
    tensor_parallel: Annotated[int, written_out(1)] = Field(
        default=1, ge=1, le=64, description="GPUs that share each layer."
    )
    data_parallel: Annotated[int, written_out(1)] = Field(
        default=1, ge=1, le=64, description="Engines behind one replica."
    )
    vllm_args: Annotated[tuple[str, ...], written_out([])] = Field(
        default=(),
        max_length=64,
        description="More arguments of the vLLM server, as `[--gpu-memory-utilization, '0.8']`.",
    )

    @field_validator("vllm_args")
    @classmethod
    def _leaves_ours(cls, vllm_args: tuple[str, ...]) -> tuple[str, ...]:
        for argument in vllm_args:
            if argument.partition("=")[0].replace("_", "-") in VLLM_ARGUMENTS_OF_OURS:
                raise refuse(f"{argument} is set by the replica; use the other keys of inference and model instead")
        return vllm_args
