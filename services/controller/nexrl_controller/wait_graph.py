"""Who waits on whom: finds the edge that blocks an experiment in which nothing moves."""

from collections.abc import Sequence
from dataclasses import dataclass

from nexrl_controller.activity import Module

MAX_NAMED_EDGES = 10
ENTRY_ROLE = "trainer"
"""Where the search begins: nothing moves for long unless the trainer waits."""


@dataclass(frozen=True)
class Edge:
    """`module` waits on `waiting_on` while it does `activity`."""

    module: str
    role: str
    activity: str
    waiting_on: str

    def __str__(self) -> str:
        return f"{self.module} ({self.activity}) waits on {self.waiting_on}"


def find_stall(modules: Sequence[Module], since_unix_seconds: float) -> str | None:
    """The blocking edge and all the others, for people; None while anyone moves.

    A module is stuck when it waits and began nothing else since `since_unix_seconds`: work that is older and does not
    wait itself is taken for the frame around the wait. The experiment stalls when whoever has work in flight is stuck.
    """
    busy = [module for module in modules if module.is_alive and module.work]
    edges = [edge for module in busy for edge in _edges(module)]
    if not edges or not all(_is_stuck(module, since_unix_seconds) for module in busy):
        return None
    edge = _blocking_edge(edges)
    others = "; ".join(str(other) for other in edges[:MAX_NAMED_EDGES])
    return f"blocked at {edge.module} -> {edge.waiting_on}: {others}"


def _is_stuck(module: Module, since_unix_seconds: float) -> bool:
    pieces = module.work.values()
    is_waiting = any(piece.waiting_on for piece in pieces)
    return is_waiting and all(piece.waiting_on or piece.start_unix_seconds < since_unix_seconds for piece in pieces)


def _edges(module: Module) -> list[Edge]:
    waits = {(piece.activity, piece.waiting_on): None for piece in module.work.values() if piece.waiting_on}
    return [Edge(module.name, module.role, activity, waiting_on) for activity, waiting_on in waits]


def _blocking_edge(edges: Sequence[Edge]) -> Edge:
    """The end of the chain of waits from the trainer on: the edge to whoever does not wait, or that closes a circle."""
    edge = next((edge for edge in edges if edge.role == ENTRY_ROLE), edges[0])
    seen = {edge.module}
    while following := next((e for e in edges if edge.waiting_on in (e.module, e.role) and e.module not in seen), None):
        edge = following
        seen.add(edge.module)
    return edge
