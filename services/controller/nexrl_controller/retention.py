"""How long a shared Redis keeps the keys of an experiment: while it goes on, and some time after it has ended."""

import asyncio
import logging

from nexrl.errors import UnavailableError
from nexrl.store import Redis, expire_experiment, keep_experiment
from nexrl_controller.controller import Controller
from nexrl_controller.state import TERMINAL
from nexrl_controller.state_store import StateStore

log = logging.getLogger(__name__)

SWEEP_SECONDS = 600.0
"""Whatever was written after the end, as by a component that did not stop in time, gets an end within it."""


class Retention:
    """Gives the keys an end when the experiment has ended. `ttl_seconds`: None for never."""

    def __init__(self, redis: Redis, controller: Controller, ledger: str, ttl_seconds: int | None) -> None:
        self._redis = redis
        self._controller = controller
        self._ledger = ledger
        self._ttl_seconds = ttl_seconds

    async def begin(self) -> None:
        """Keep what is there of an experiment that goes on. Raises UnavailableError."""
        if self._controller.state.phase not in TERMINAL:
            await keep_experiment(self._redis, self._ledger)

    async def sweep(self) -> None:
        """Once the experiment has ended, give an end to each key that has none. Raises UnavailableError."""
        if self._ttl_seconds is None or self._controller.state.phase not in TERMINAL:
            return
        await expire_experiment(self._redis, self._ledger, self._ttl_seconds)
        # A controller that is started again must still find that all is over.
        await self._redis.expire(StateStore(self._redis, self._ledger).key, self._ttl_seconds)

    async def run(self) -> None:
        """Sweep again and again, for as long as the task lives."""
        await self._controller.wait_for_phase(*TERMINAL)
        while True:
            try:
                await self.sweep()
            except UnavailableError as error:
                log.warning("keys get their end later: %s", error)
            await asyncio.sleep(SWEEP_SECONDS)
