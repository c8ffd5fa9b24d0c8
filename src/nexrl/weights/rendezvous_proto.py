"""Converts a Rendezvous to and from nexrl.v1.Rendezvous."""

from nexrl.v1 import policy_pb2 as pb
from nexrl.weights.rendezvous import Rendezvous


def rendezvous_to_wire(rendezvous: Rendezvous) -> pb.Rendezvous:
    """Return the rendezvous as a message."""
    return pb.Rendezvous(
        epoch=rendezvous.epoch,
        host=rendezvous.host,
        port=rendezvous.port,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout_seconds=rendezvous.timeout_seconds,
    )


def rendezvous_from_wire(message: pb.Rendezvous) -> Rendezvous:
    """Return the rendezvous in `message`. Raises InvalidArgumentError if it is not valid."""
    return Rendezvous(
        epoch=message.epoch,
        host=message.host,
        port=message.port,
        rank=message.rank,
        world_size=message.world_size,
        timeout_seconds=message.timeout_seconds,
    )
