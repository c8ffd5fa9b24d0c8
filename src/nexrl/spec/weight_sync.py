"""`spec.weightSync`: how new policy versions reach the replicas."""

from typing import ClassVar, Literal

from pydantic import Field

from nexrl.spec.cluster import Template
from nexrl.spec.section import Location, Seconds
from nexrl.spec.variants import VariantSection


class WeightSyncSpec(VariantSection):
    """How new policy versions reach the replicas, and how stale a trained trajectory may be."""

    TAGS: ClassVar = ("mode",)

    type: Literal["default"] = Field(default="default", description="The transactional weight sync.")
    mode: str = Field(description="Who waits for a new policy version.")
    staleness_threshold: int = Field(description="Largest staleness (steps) of a trained trajectory.")
    timeout_seconds: Seconds = Field(
        default=120.0, description="Longest time for one sync; a slower replica is excluded from it."
    )
    bucket_bytes: int = Field(
        default=64 * 2**20, ge=1024, le=2**30, description="Size (bytes) of the packed buckets that are broadcast."
    )
    transport: Literal["auto", "nccl", "gloo"] = Field(
        default="auto",
        description="What carries the weights. nccl: from the trainer's GPU to GPUs of the replicas; gloo: between "
        "host memories; auto: nccl if the trainer and all replicas have GPUs of their own to use it with. With vllm, "
        "and with model.lora, always gloo.",
    )
    path: Location | None = Field(
        default=None,
        description="Folder that trainer and replicas share, relative to this file. The trainer writes the newest two "
        "versions there, and a late replica reads the committed one. None = a version is broadcast again to all.",
    )
    in_flight: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="What happens to completions in flight when a new version arrives. keep: they continue with it, "
        "and their keys and values are computed again; wait: they end first; abort: they are cut off, and continued "
        "with their tokens as prompts. Which values are accepted depends on inference.backend.",
    )
    template: Template = None


class SyncWeightSync(WeightSyncSpec):
    """Workers and trainer wait for each other: every trajectory is sampled from the newest version."""

    mode: Literal["sync"] = Field(default="sync", description="Everything waits for the newest version.")
    staleness_threshold: int = Field(default=0, ge=0, le=0, description="Always 0.")


class BatchAsyncWeightSync(WeightSyncSpec):
    """Workers continue while the trainer trains, and wait when staleness would pass stalenessThreshold."""

    mode: Literal["batch-async"] = Field(description="Workers wait at the staleness threshold.")
    staleness_threshold: int = Field(
        default=1, ge=1, le=64, description="Largest staleness (steps) of a trained trajectory; workers wait at it."
    )


class FullyAsyncWeightSync(WeightSyncSpec):
    """Replicas take new weights between two tokens, and no worker waits: groups that become too stale are dropped.

    With another trajectoryPool.readiness than batch_size, or groups that span tasks, workers wait as in batch-async.
    """

    mode: Literal["fully-async"] = Field(
        description="Nothing waits. Groups that are too stale are dropped. Their tasks are not granted again in the "
        "same epoch."
    )
    staleness_threshold: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Largest staleness (steps) of a trained trajectory; a group with a staler one is dropped.",
    )
