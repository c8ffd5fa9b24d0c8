"""Converts a Rendezvous to and from nexrl.v1.Rendezvous."""

from nexrl.errors import InvalidArgumentError
from nexrl.v1 import policy_pb2 as pb
from nexrl.weights.rendezvous import Rendezvous, Transport

_TRANSPORTS = {
    pb.TRANSPORT_UNSPECIFIED: Transport.GLOO,
    pb.TRANSPORT_GLOO: Transport.GLOO,
    pb.TRANSPORT_NCCL: Transport.NCCL,
}


def rendezvous_to_wire(rendezvous: Rendezvous) -> pb.Rendezvous:
    """Return the rendezvous as a message."""
    return pb.Rendezvous(
        epoch=rendezvous.epoch,
        host=rendezvous.host,
        port=rendezvous.port,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout_seconds=rendezvous.timeout_seconds,
        transport=pb.TRANSPORT_NCCL if rendezvous.transport is Transport.NCCL else pb.TRANSPORT_GLOO,
    )


def rendezvous_from_wire(message: pb.Rendezvous) -> Rendezvous:
    """Return the rendezvous in `message`. Raises InvalidArgumentError if it is not valid."""
    if message.transport not in _TRANSPORTS:
        raise InvalidArgumentError(f"rendezvous: transport: {message.transport}; this version knows Gloo and NCCL only")
    return Rendezvous(
        epoch=message.epoch,
        host=message.host,
        port=message.port,
        rank=message.rank,
        world_size=message.world_size,
        timeout_seconds=message.timeout_seconds,
        transport=_TRANSPORTS[message.transport],
    )
