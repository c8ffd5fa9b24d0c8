"""Who is alive, what each module is doing, and whether anything is in flight."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nexrl.errors import ResourceExhaustedError
from nexrl_controller.changes import Changes

MAX_MODULES = 4096
MAX_WORK = 65_536
"""Pieces of work in flight of one module."""
ROLLOUT_ROLE = "rollout"


@dataclass(frozen=True)
class Work:
    """One piece of work in flight."""

    token: str
    activity: str
    """What is done, as 'train'."""
    start_unix_seconds: float
    waiting_on: str = ""
    """The component that it waits on; empty when it does not wait."""


@dataclass
class Module:
    """One module, as it last told about itself."""

    name: str
    role: str = ""
    address: str = ""
    metrics_url: str = ""
    work: dict[str, Work] = field(default_factory=dict)
    """Work in flight, by token."""
    heard_unix_seconds: float = 0.0
    is_alive: bool = False


class Activity:
    """All modules ever heard of. A module that is silent for `timeout_seconds` is dead, and its work with it."""

    def __init__(self, now: Callable[[], float], timeout_seconds: float) -> None:
        self._now = now
        self.timeout_seconds = timeout_seconds
        self._modules: dict[str, Module] = {}
        self._changes = Changes()

    @property
    def modules(self) -> Sequence[Module]:
        """All modules ever heard of."""
        return list(self._modules.values())

    def silent_seconds(self, module: Module) -> float:
        """Seconds since `module` was last heard of."""
        return max(0.0, self._now() - module.heard_unix_seconds)

    def heartbeat(self, module: Module, work: Iterable[Work]) -> None:
        """Enter `module` or renew it; `work` is all that it does now.

        Raises ResourceExhaustedError when there are too many modules, or too much work.
        """
        known = self._enter(module.name)
        known.role, known.address, known.metrics_url = module.role, module.address, module.metrics_url
        known.work = _within_limit(module.name, {piece.token: piece for piece in work})
        self._changes.announce()

    def start_work(self, module_name: str, token: str, activity: str) -> None:
        """Begin a piece of work; a token that is in flight already is the same piece.

        Raises ResourceExhaustedError when there are too many modules, or too much work.
        """
        module = self._enter(module_name)
        piece = Work(token, activity, self._now())
        module.work = _within_limit(module_name, {token: piece, **module.work})

    def end_work(self, token: str) -> None:
        """End a piece of work; an unknown token is ignored."""
        for module in self._modules.values():
            if module.work.pop(token, None):
                self._changes.announce()

    def bury(self, module_name: str) -> None:
        """The module's process has ended: it is not alive and does nothing, until it is heard of again."""
        module = self._modules.get(module_name)
        if module is not None:
            module.is_alive = False
            module.work = {}
            self._changes.announce()

    def bury_silent(self) -> list[str]:
        """Bury the modules that have just been silent for too long; gives their names, each once per death."""
        silent = [
            module.name
            for module in self._modules.values()
            if module.is_alive and self.silent_seconds(module) > self.timeout_seconds
        ]
        for name in silent:
            self.bury(name)
        return silent

    def is_quiescent(self, rollout_only: bool = False) -> bool:
        """True when nothing is in flight in all modules, or in the rollout workers."""
        return not any(
            module.work for module in self._modules.values() if module.role == ROLLOUT_ROLE or not rollout_only
        )

    async def wait_quiescent(self, rollout_only: bool, wait_seconds: float) -> bool:
        """Wait until nothing is in flight, at most `wait_seconds`; whether it came to that."""
        try:
            async with asyncio.timeout(wait_seconds):
                while not self.is_quiescent(rollout_only):
                    await self._changes.wait()
        except TimeoutError:
            return self.is_quiescent(rollout_only)
        return True

    def summary(self) -> str:
        """What runs, for people: one line a module."""
        return "\n".join(f"{module.name}: {self._told(module)}" for module in self._modules.values())

    def _told(self, module: Module) -> str:
        if not module.is_alive:
            return f"not alive, last heard of {self.silent_seconds(module):.0f} s ago"
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

    def _enter(self, name: str) -> Module:
        if name not in self._modules and len(self._modules) >= MAX_MODULES:
            raise ResourceExhaustedError(f"module {name}: there are {MAX_MODULES} modules already, which is the limit")
        module = self._modules.setdefault(name, Module(name))
        module.heard_unix_seconds = self._now()
        module.is_alive = True
        return module


def _within_limit(module_name: str, work: dict[str, Work]) -> dict[str, Work]:
    if len(work) > MAX_WORK:
        raise ResourceExhaustedError(f"module {module_name}: {len(work)} pieces of work; the limit is {MAX_WORK}")
    return work
