"""Which GPUs each process of a run on one machine uses.

By default each rank of the trainer gets one GPU, from the first on. The replicas of inference get theirs from the rest,
in turn; if there is no rest, they share those of the trainer. `trainer.gpus` and `inference.gpus` name other GPUs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from nexrl.gpus import VISIBLE
from nexrl.spec import ExperimentSpec
from nexrl.spec.inference import VllmInference

SHARE = "NEXRL_GPU_SHARE"


def assign_gpus(spec: ExperimentSpec, gpus: Sequence[str]) -> dict[tuple[str, int], Mapping[str, str]]:
    """Return, by component and replica, the variables of each process that may use a GPU; none if there are no `gpus`.

    A process that shares a GPU also learns its share of it: all processes of a GPU have equal shares.
    """
    assigned = gpus_of(spec, gpus)
    users = Counter(gpu for own in assigned.values() for gpu in own)
    return {process: _variables(own, max(users[gpu] for gpu in own)) for process, own in assigned.items()}


def gpus_of(spec: ExperimentSpec, gpus: Sequence[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the GPUs of each process, by component and replica."""
    if not gpus:
        return {}
    assigned = _of_trainer(spec, gpus)
    of_trainer = {gpu for own in assigned.values() for gpu in own}
    return assigned | _of_inference(spec, gpus, [gpu for gpu in gpus if gpu not in of_trainer] or gpus)


def _of_trainer(spec: ExperimentSpec, gpus: Sequence[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    trainer = spec.trainer
    if trainer.device == "cpu" or trainer.backend == "mock":
        return {}
    pool = [gpus[number] for number in trainer.gpus] or gpus
    return _dealt("trainer", trainer.replicas, trainer.processes_per_replica, pool)


def _of_inference(
    spec: ExperimentSpec, gpus: Sequence[str], rest: Sequence[str]
) -> dict[tuple[str, int], tuple[str, ...]]:
    inference = spec.inference
    if getattr(inference, "device", "auto") == "cpu":
        return {}
    workers = inference.tensor_parallel * inference.data_parallel if isinstance(inference, VllmInference) else 1
    return _dealt("inference", inference.replicas, workers, [gpus[number] for number in inference.gpus] or rest)


def _dealt(component: str, replicas: int, each: int, pool: Sequence[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the GPUs of each replica, dealt in turn. A replica that needs more than there are gets all."""
    turns = cycle(pool)
    return {(component, number): tuple(dict.fromkeys(islice(turns, each))) for number in range(replicas)}


def _variables(own: Sequence[str], users: int) -> Mapping[str, str]:
    return {VISIBLE: ",".join(own), **({SHARE: f"{1 / users:.3f}"} if users > 1 else {})}
