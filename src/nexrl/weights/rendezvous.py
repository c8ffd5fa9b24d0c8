"""Where and as whom a process joins the broadcast of one membership epoch."""

from dataclasses import dataclass

from nexrl.errors import InvalidArgumentError

TRAINER_RANK = 0


@dataclass(frozen=True)
class Rendezvous:
    """Address of the trainer's TCP store, this process's rank (the trainer is 0), and patience with a silent peer.

    Raises InvalidArgumentError for numbers with which no group can form.
    """

    epoch: int
    host: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        if self.epoch < 1 or not self.host or not 0 < self.port < 65536 or self.timeout_seconds <= 0:
            raise InvalidArgumentError(f"rendezvous: no host, or a number that is not above 0: {self}")
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(f"rendezvous: rank {self.rank} is not below world_size {self.world_size}")
