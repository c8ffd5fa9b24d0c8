"""Memory of one inference replica, in bytes."""

from dataclasses import dataclass

from nexrl.plan.model_size import ModelSize
from nexrl.plan.training import ITEM_BYTES
from nexrl.spec import ExperimentSpec
from nexrl.spec.inference import VllmInference


@dataclass(frozen=True)
class ReplicaMemory:
    """Bytes on each device of a replica (`weights`, `cache`), and in its host memory (`staged`)."""

    weights: int
    cache: int
    staged: int
    """The next version, which is received beside the one that is served."""
    devices: int

    @property
    def total(self) -> int:
        """Bytes on each device, at least; vLLM uses what else it may have for more of its cache."""
        return self.weights + self.cache


def replica_memory(size: ModelSize, spec: ExperimentSpec) -> ReplicaMemory:
    """Return the memory of one replica. `cache` holds keys and values of maxRows sequences of full length."""
    inference, item = spec.inference, ITEM_BYTES[spec.model.dtype]
    share, engines = 1, 1
    if isinstance(inference, VllmInference):
        share, engines = inference.tensor_parallel, inference.data_parallel
    kv_heads = max(1, size.kv_heads // share)
    token_bytes = 2 * size.layers * kv_heads * size.head_size * item
    weights = size.parameters * item
    return ReplicaMemory(
        weights=weights // share,
        cache=inference.max_rows * spec.max_sequence_tokens * token_bytes,
        staged=weights,
        devices=share * engines,
    )
