"""`spec.trajectoryPool` and `spec.trainBatchPool`: the two queues between rollouts and trainer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from nexrl.spec.cluster import Template
from nexrl.spec.section import NEVER, Name, Replicas, Section, refuse

_OLD_READINESS = {
    "batch_size_reached": "batch_size",
    "batch_size_reached_and_loaded_batch_finished": "batch_size_and_loaded_batch_finished",
}
_READINESS = ("batch_size", "loaded_batch_finished", "batch_size_and_loaded_batch_finished")


class TrajectoryPoolSpec(Section):
    """How trajectories become groups and batches."""

    type: Literal["default"] = Field(default="default", description="The Redis-backed pool.")
    batch_size: Annotated[int, NEVER] = Field(
        default=64, ge=1, le=65_536, description="Trajectories per training step; a multiple of groupSize."
    )
    group_size: Annotated[int, NEVER] = Field(
        default=8, ge=1, le=1024, description="Samples of each task, compared with each other."
    )
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
        description="What happens to a group if some of its samples failed for good. release: it is used with fewer "
        "samples; drop: it is not used.",
    )
    max_payload_bytes: int = Field(
        default=8 * 2**30,
        ge=2**20,
        le=2**50,
        description="Limit for the bytes of trajectories, train batches and added tasks in Redis. Beyond it the pool "
        "refuses puts while the trainer has a batch to consume. At half of it the trainer writes a checkpoint, which "
        "frees train batches. One batch may exceed the limit. Two thirds of Redis' maxmemory apply if they are less.",
    )
    replicas: Replicas = Field(default=1, description="Identical pool processes.")
    template: Template = None

    @property
    def compares_samples(self) -> bool:
        """Whether a group has samples to compare with each other."""
        return self.group_size > 1 and bool(self.key_list)

    @field_validator("group_size")
    @classmethod
    def _divides_batch_size(cls, group_size: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size")
        if batch_size is not None and batch_size % group_size != 0:
            raise refuse(f"batchSize ({batch_size}) must be a multiple of groupSize ({group_size})")
        return group_size


class TrainBatchPoolSpec(Section):
    """The queue of prepared batches, which wait to be trained."""

    type: Literal["default"] = Field(default="default", description="The Redis-backed queue.")
    max_queued: int = Field(default=2, ge=1, le=1024, description="Largest number of prepared batches that wait.")
