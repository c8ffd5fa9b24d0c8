"""Which modules are alive, what each of them does, and whether any work is in flight."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nexrl.errors import ResourceExhaustedError
from nexrl_controller.changes import Changes

MAX_MODULES = 4096
MAX_WORK = 65_536
"""Limit of pieces of work in flight in one module."""
ROLLOUT_ROLE = "rollout"


@dataclass(frozen=True)
class Work:
    """One piece of work in flight."""

    token: str
    activity: str
    """Such as 'train'."""
    start_unix_seconds: float
    waiting_on: str = ""
    """The component, or code of the user, that it waits on; empty if it does not wait."""


@dataclass
class Module:
    """One module, as its last heartbeat describes it."""

    name: str
    role: str = ""
    address: str = ""
    metrics_url: str = ""
    work: dict[str, Work] = field(default_factory=dict)
    """Work in flight, by token."""
    heard_unix_seconds: float = 0.0
    is_alive: bool = False


class Activity:
    """All modules that ever sent a heartbeat or started work.

    A module that is silent for `timeout_seconds` is dead, and its work has ended.
    """

    def __init__(self, now: Callable[[], float], timeout_seconds: float) -> None:
        self._now = now
        self.timeout_seconds = timeout_seconds
        self._modules: dict[str, Module] = {}
        self._changes = Changes()

    @property
    def modules(self) -> Sequence[Module]:
        """All modules, dead or alive."""
        return list(self._modules.values())

    def silent_seconds(self, module: Module) -> float:
        """Seconds since the last message of `module`."""
        return max(0.0, self._now() - module.heard_unix_seconds)

    def heartbeat(self, module: Module, work: Iterable[Work]) -> None:
        """Add `module` or renew it; `work` is all its work in flight.

        Raises ResourceExhaustedError if there are too many modules or too many pieces of work.
        """
        known = self._renew(module.name)
        known.role, known.address, known.metrics_url = module.role, module.address, module.metrics_url
        known.work = _within_limit(module.name, {piece.token: piece for piece in work})
        self._changes.announce()

    def start_work(self, module_name: str, token: str, activity: str) -> None:
        """Start a piece of work. Idempotent: a token that is in flight stays the same piece.

        Raises ResourceExhaustedError if there are too many modules or too many pieces of work.
        """
        module = self._renew(module_name)
        piece = Work(token, activity, self._now())
        module.work = _within_limit(module_name, {token: piece, **module.work})

    def end_work(self, token: str) -> None:
        """End a piece of work. Ignores an unknown token."""
        for module in self._modules.values():
            if module.work.pop(token, None):
                self._changes.announce()

    def mark_dead(self, module_name: str) -> None:
        """Mark a module as dead and without work, until its next message."""
        module = self._modules.get(module_name)
        if module is not None:
            module.is_alive = False
            module.work = {}
            self._changes.announce()

    def mark_silent_dead(self) -> list[str]:
        """Mark the modules that have been silent for too long as dead; returns their names, once for each death."""
        silent = [
            module.name
            for module in self._modules.values()
            if module.is_alive and self.silent_seconds(module) > self.timeout_seconds
        ]
        for name in silent:
            self.mark_dead(name)
        return silent

    def is_quiescent(self, rollout_only: bool = False) -> bool:
        """Return whether no work is in flight in any module, or in any rollout worker."""
        return not any(
            module.work for module in self._modules.values() if module.role == ROLLOUT_ROLE or not rollout_only
        )

    async def wait_quiescent(self, rollout_only: bool, wait_seconds: float) -> bool:
        """Wait at most `wait_seconds` until no work is in flight; returns whether none is."""
        try:
            async with asyncio.timeout(wait_seconds):
                while not self.is_quiescent(rollout_only):
                    await self._changes.wait()
        except TimeoutError:
            return self.is_quiescent(rollout_only)
        return True

    def summary(self) -> str:
        """Return what each module does, for people, one line for each."""
        return "\n".join(f"{module.name}: {self._described(module)}" for module in self._modules.values())

    def _described(self, module: Module) -> str:
        if not module.is_alive:
            return f"not alive, last message {self.silent_seconds(module):.0f} s ago"
        if not module.work:
            return "idle"
        counts: dict[tuple[str, str], list[float]] = {}
        for piece in module.work.values():
            counts.setdefault((piece.activity, piece.waiting_on), []).append(piece.start_unix_seconds)
        return ", ".join(
            f"{len(starts)} x {activity} for {max(0.0, self._now() - min(starts)):.1f} s"
            + (f" (waits on {waiting_on})" if waiting_on else "")
            for (activity, waiting_on), starts in counts.items()
        )

    def _renew(self, name: str) -> Module:
        if name not in self._modules and len(self._modules) >= MAX_MODULES:
            raise ResourceExhaustedError(f"module.name: cannot add {name}; at most {MAX_MODULES} modules are allowed")
        module = self._modules.setdefault(name, Module(name))
        module.heard_unix_seconds = self._now()
        module.is_alive = True
        return module


def _within_limit(module_name: str, work: dict[str, Work]) -> dict[str, Work]:
    if len(work) > MAX_WORK:
        raise ResourceExhaustedError(
            f"module.work: {module_name} has {len(work)} pieces of work; at most {MAX_WORK} are allowed"
        )
    return work
