"""Moves a policy version from the trainer to the replicas: manifest, packing, broadcast, sender and receiver.

`manifest`, `rendezvous` and their `_proto` modules need no torch; all others do. `gloo` and `nccl` are
the two transports.
"""
