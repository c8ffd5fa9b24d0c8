"""Moves one policy version from the trainer to the replicas: what it consists of, the broadcast, and both ends' flows.

`manifest`, `rendezvous` and `codec` carry no torch; `packing`, `transport`, `publisher` and `receiver` do.
"""
