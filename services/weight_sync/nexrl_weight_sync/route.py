"""Decides what carries the weights of an epoch."""

from collections.abc import Mapping
from dataclasses import dataclass

from nexrl.weights.rendezvous import Transport

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE=1"
"""What lets NCCL 2.32 use one GPU for several processes. Earlier versions refuse that."""


@dataclass(frozen=True)
class Route:
    """What carries the weights, and why, for people."""

    transport: Transport
    reason: str


def choose_route(setting: str, trainer_gpu: str, replica_gpus: Mapping[str, str]) -> Route:
    """Return the route between the trainer and all replicas: NCCL if each has a GPU of its own to use it with.

    `setting` is spec.weightSync.transport. Of the GPUs, UUIDs; empty for a process that has none for NCCL. The setting
    nccl is followed whatever they are: such a process refuses it when it starts, and NCCL refuses a GPU that is shared.
    """
    if setting == "gloo":
        return Route(Transport.GLOO, "weightSync.transport is gloo")
    obstacle = _obstacle(trainer_gpu, replica_gpus)
    if setting == "nccl":
        return Route(Transport.NCCL, f"weightSync.transport is nccl{f', although {obstacle}' if obstacle else ''}")
    if obstacle:
        return Route(Transport.GLOO, obstacle)
    return Route(Transport.NCCL, "the trainer and each replica have a GPU of their own")


def _obstacle(trainer_gpu: str, replica_gpus: Mapping[str, str]) -> str:
    """Return why NCCL cannot connect them; empty if it can."""
    if not trainer_gpu:
        return "the trainer sends from host memory"
    owners = {trainer_gpu: "the trainer"}
    for replica_id, gpu in replica_gpus.items():
        if not gpu:
            return f"replica {replica_id} receives into host memory"
        if gpu in owners:
            return f"replica {replica_id} shares {gpu} with {owners[gpu]}, which NCCL refuses without {MULTI_RANK}"
        owners[gpu] = f"replica {replica_id}"
    return ""
