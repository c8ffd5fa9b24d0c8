"""The rendezvous of a broadcast: where a process joins the group of one epoch, with which rank, and what carries it."""

from dataclasses import dataclass
from enum import StrEnum

from nexrl.errors import InvalidArgumentError

TRAINER_RANK = 0


class Transport(StrEnum):
    """What carries a broadcast: Gloo between host memories, NCCL between the memories of GPUs."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True)
class Rendezvous:
    """Address of the trainer's TCP store, rank of this process (the trainer is 0), and timeout for a silent peer.

    Raises InvalidArgumentError for values with which no group can form.
    """

    epoch: int
    host: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float
    transport: Transport = Transport.GLOO

    def __post_init__(self) -> None:
        if self.epoch < 1 or not self.host or not 0 < self.port < 65536 or self.timeout_seconds <= 0:
            raise InvalidArgumentError(
                f"rendezvous: {self}: host must not be empty; epoch, port (up to 65535) and timeout must be above 0"
            )
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(f"rendezvous: rank {self.rank} is not below world_size {self.world_size}")
