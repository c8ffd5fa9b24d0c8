"""The graph of modules that wait on each other: finds the edge that blocks an experiment without progress."""

from collections.abc import Sequence
from dataclasses import dataclass

from nexrl.sample_states import ATTEMPT
from nexrl_controller.activity import Module, Work

MAX_NAMED_EDGES = 10
ENTRY_ROLE = "trainer"
"""The search begins here: an experiment without progress has a trainer that waits."""


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
    """Return the blocking edge and all other edges, for people; None while any module makes progress.

    A module is stuck if it waits and has started no other work since `since_unix_seconds`. Older work that does not
    wait itself encloses the wait. So does an attempt at a sample, whatever its age: attempts that time out are begun
    again without end. The experiment stalls if every module with work in flight is stuck.
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
    return any(map(_waits, pieces)) and all(
        _waits(piece) or piece.start_unix_seconds < since_unix_seconds for piece in pieces
    )


def _waits(piece: Work) -> bool:
    return bool(piece.waiting_on) or piece.activity == ATTEMPT


def _edges(module: Module) -> list[Edge]:
    waits = {(piece.activity, piece.waiting_on): None for piece in module.work.values() if piece.waiting_on}
    return [Edge(module.name, module.role, activity, waiting_on) for activity, waiting_on in waits]


def _blocking_edge(edges: Sequence[Edge]) -> Edge:
    """Follow the waits from the trainer on. Return the last edge: its target does not wait, or closes a cycle."""
    edge = next((edge for edge in edges if edge.role == ENTRY_ROLE), edges[0])
    seen = {edge.module}
    while following := next((e for e in edges if edge.waiting_on in (e.module, e.role) and e.module not in seen), None):
        edge = following
        seen.add(edge.module)
    return edge
