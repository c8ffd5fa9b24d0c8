"""What each role of an experiment needs, and what of it does not fit."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

from nexrl.local.gpu_assignment import gpus_of
from nexrl.plan.memory_size import format_bytes, parse_bytes
from nexrl.plan.model_size import ModelSize
from nexrl.plan.sampling import replica_memory
from nexrl.plan.training import RankMemory, Training, checkpoint_bytes, rank_memory, snapshot_bytes
from nexrl.spec import ExperimentSpec
from nexrl.spec.inference import VllmInference

PROCESS_BYTES = 512 * 2**20
"""A process with Python, PyTorch and transformers, besides its tensors; 410 MiB measured with the trainer's imports."""
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Available:
    """What there is: memory of one GPU (None: there are no GPUs), and of the machine that runs all roles."""

    gpu_bytes: int | None
    host_bytes: int
    gpus: int | None = None
    """GPUs of that machine, which the roles share if they must; None: each process has its own."""


@dataclass(frozen=True)
class Role:
    """The processes of one component. `parts` are bytes by purpose; `device_bytes` is None without GPUs."""

    name: str
    replicas: int
    gpus: int
    cores: int
    parts: Mapping[str, int]
    device_bytes: int | None
    host_bytes: int
    """Of each replica, on the host."""
    host_limit: int | None = None
    """The limit of a replica's pod in the role's template; without one, the role runs on the machine of the others."""


def trainer_role(size: ModelSize, spec: ExperimentSpec, available: Available) -> Role:
    """Return the trainer's needs. On CPUs the memory of all ranks is that of the host."""
    training, processes = Training.of(spec), spec.trainer.processes_per_replica
    first = rank_memory(size, training)
    others = replace(
        first, reference=0, teacher=0, whole_model=first.whole_model - size.parameters * (4 - training.item_bytes)
    )
    snapshot = snapshot_bytes(size, training)
    uses_gpu = _uses_gpu(spec, "trainer", available) and spec.trainer.device != "cpu"
    copied = -(-checkpoint_bytes(size, training) // spec.trainer.replicas)
    # With weightSync.path, what is sent stays on the host. The first version is there in any case.
    sent = snapshot if uses_gpu and _may_use_nccl(spec) and spec.weight_sync.path is None else 0
    loading = processes * size.parameters * training.item_bytes
    of_ranks = 0 if uses_gpu else first.total + (processes - 1) * others.total
    host = max(of_ranks + snapshot + copied, loading) + processes * PROCESS_BYTES
    return Role(
        "trainer",
        spec.trainer.replicas,
        processes if uses_gpu else 0,
        processes * spec.trainer.threads_per_process,
        {
            **_parts(first),
            "published copy (GPU)": sent,
            "published copy (host)": snapshot,
            "copy for a checkpoint (host)": copied,
        },
        max(first.step + sent, first.whole_model) if uses_gpu else None,
        host,
        _memory_limit(spec, "trainer"),
    )


def inference_role(size: ModelSize, spec: ExperimentSpec, available: Available) -> Role:
    """Return the needs of one replica."""
    memory = replica_memory(size, spec)
    uses_gpu = _uses_gpu(spec, "inference", available) and getattr(spec.inference, "device", "auto") != "cpu"
    received = memory.staged if uses_gpu and _may_use_nccl(spec) else 0
    # A vLLM server has a process for its API and one for its engine, besides a worker for each device.
    processes = memory.devices + (3 if isinstance(spec.inference, VllmInference) else 0)
    on_host = memory.staged + processes * PROCESS_BYTES + (0 if uses_gpu else memory.devices * memory.total)
    return Role(
        "inference",
        spec.inference.replicas,
        memory.devices if uses_gpu else 0,
        spec.inference.threads,
        {
            "weights": memory.weights,
            "keys and values": memory.cache,
            "next version (GPU)": received,
            "next version (host)": memory.staged,
        },
        memory.total + received if uses_gpu else None,
        on_host,
        _memory_limit(spec, "inference"),
    )


def problems(size: ModelSize, spec: ExperimentSpec, available: Available) -> list[str]:
    """Return what does not fit: the role, by how much, and what to change."""
    return [f"{text}; {_remedies(size, spec, available)}" for text in _excesses(size, spec, available)]


def _excesses(size: ModelSize, spec: ExperimentSpec, available: Available) -> list[str]:
    roles = [trainer_role(size, spec, available), inference_role(size, spec, available)]
    found = [text for role in roles for text in _too_large(role, available)]
    found = found or [*_too_large_together(roles, spec, available)]
    shared = sum(role.replicas * role.host_bytes for role in roles if role.host_limit is None)
    if not found and shared > available.host_bytes:
        found.append(_excess("trainer and inference", "the memory of one machine", shared, available.host_bytes))
    return found


def _too_large_together(roles: Sequence[Role], spec: ExperimentSpec, available: Available) -> Iterator[str]:
    """Yield the GPUs of one machine whose processes do not fit together."""
    if available.gpus is None or available.gpu_bytes is None:
        return
    needed = {role.name: role.device_bytes or 0 for role in roles}
    ranks = sum(role.replicas * role.gpus for role in roles if role.name == "trainer")
    if ranks > (own := len(set(spec.trainer.gpus)) or available.gpus):
        yield f"trainer: {ranks} ranks need a GPU each, and it may use {own}"
        return
    of_gpu: Counter[str] = Counter()
    for (component, _), gpus in gpus_of(spec, [str(number) for number in range(available.gpus)]).items():
        of_gpu.update(dict.fromkeys(gpus, needed[component]))
    for gpu, total in of_gpu.items():
        if total > available.gpu_bytes:
            yield _excess("trainer and inference", f"GPU {gpu}, which they share,", total, available.gpu_bytes)


def _too_large(role: Role, available: Available) -> Iterator[str]:
    if role.device_bytes is not None and available.gpu_bytes is not None and role.device_bytes > available.gpu_bytes:
        yield _excess(role.name, "each GPU", role.device_bytes, available.gpu_bytes)
    limit = available.host_bytes if role.host_limit is None else role.host_limit
    if role.host_bytes > limit:
        where = "the memory of the machine" if role.host_limit is None else "the memory limit of its template"
        yield _excess(role.name, where, role.host_bytes, limit)


def _excess(role: str, where: str, needed: int, limit: int) -> str:
    return (
        f"{role}: needs {format_bytes(needed)}, {format_bytes(needed - limit)} more than {where} "
        f"({format_bytes(limit)})"
    )


def _remedies(size: ModelSize, spec: ExperimentSpec, available: Available) -> str:
    """Return the changes of settings after which everything fits."""
    found: list[str] = []
    for alternatives in _alternatives(spec):
        fitting = (text for text, changed in alternatives if _fits(size, changed, available))
        found.extend(islice(fitting, 1))
    if found:
        return f"it would fit with {', or '.join(found)}"
    return (
        "no change of trainer.processesPerReplica, maxTokensPerMicroBatch, activationCheckpointing or "
        "weightSync.transport makes it fit; use more memory, or a smaller model"
    )


_Changes: TypeAlias = Iterator[tuple[str, ExperimentSpec]]


def _alternatives(spec: ExperimentSpec) -> Iterator[_Changes]:
    """Yield kinds of changes, each from the smallest change to the largest."""
    tokens = spec.trainer.max_tokens_per_micro_batch
    yield _ranks(spec)
    yield _recomputed(spec)
    if tokens > (least := spec.max_sequence_tokens):
        yield iter([(f"trainer.maxTokensPerMicroBatch: {least}", _changed(spec, max_tokens_per_micro_batch=least))])
    if _may_use_nccl(spec):
        weight_sync = spec.weight_sync.model_copy(update={"transport": "gloo"})
        yield iter([("weightSync.transport: gloo", spec.model_copy(update={"weight_sync": weight_sync}))])


def _ranks(spec: ExperimentSpec) -> _Changes:
    for count in (2, 4, 8, 16, 32, 64):
        if count > spec.trainer.processes_per_replica:
            yield f"trainer.processesPerReplica: {count}", _changed(spec, processes_per_replica=count)


def _recomputed(spec: ExperimentSpec) -> _Changes:
    text, changed = "trainer.activationCheckpointing: full", _changed(spec, activation_checkpointing="full")
    if spec.trainer.activation_checkpointing == "none":
        yield text, changed
        yield from ((f"{text} with {more}", both) for more, both in _ranks(changed))


def _changed(spec: ExperimentSpec, **values: object) -> ExperimentSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=values)})


def _fits(size: ModelSize, spec: ExperimentSpec, available: Available) -> bool:
    return not _excesses(size, spec, available)


def _parts(memory: RankMemory) -> dict[str, int]:
    return {
        "weights": memory.weights,
        "float32 masters": memory.masters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "moving reference model": memory.moving_reference,
        "critic": memory.critic,
        "reference model": memory.reference,
        "teacher": memory.teacher,
        "gathered layers": memory.gathered,
        "activations": memory.activations,
        "logits": memory.logits,
        "peak of a step": memory.step,
        "whole model, at start": memory.whole_model,
    }


def _may_use_nccl(spec: ExperimentSpec) -> bool:
    """Return whether weights may travel between GPUs: then rank 0 and each replica hold one more version on theirs."""
    return spec.weight_sync.transport != "gloo" and spec.inference.RECEIVES_ON_GPU and spec.model.lora is None


def _uses_gpu(spec: ExperimentSpec, section: str, available: Available) -> bool:
    is_asked = getattr(getattr(spec, section), "device", "auto") == "cuda" or _GPU in _limits(spec, section)
    return is_asked or available.gpu_bytes is not None


def _memory_limit(spec: ExperimentSpec, section: str) -> int | None:
    limit = _limits(spec, section).get("memory")
    return None if limit is None else parse_bytes(f"{section}.template: resources.limits.memory", str(limit))


def _limits(spec: ExperimentSpec, section: str) -> dict[str, Any]:
    """Return `resources.limits` of the component's container in its template."""
    template = getattr(spec, section).template
    pod: Any = {} if template is None else template.spec
    for container in pod.get("containers") or []:
        if container.get("name") == "nexrl":
            return dict((container.get("resources") or {}).get("limits") or {})
    return {}
