"""Sets how long a shared Redis keeps the keys of an experiment: while it runs, and for some time after its end."""

import asyncio
import logging

from nexrl.errors import UnavailableError
from nexrl.store import Redis, expire_experiment, keep_experiment
from nexrl_controller.controller import Controller
from nexrl_controller.state import TERMINAL
from nexrl_controller.state_store import StateStore

log = logging.getLogger(__name__)

SWEEP_SECONDS = 600.0
"""Time between two sweeps. A component that did not stop in time may write keys without a TTL after the first one."""


class Retention:
    """Sets the TTL of the keys when the experiment has ended. `ttl_seconds`: None keeps them for ever."""

    def __init__(self, redis: Redis, controller: Controller, ledger: str, ttl_seconds: int | None) -> None:
        self._redis = redis
        self._controller = controller
        self._ledger = ledger
        self._ttl_seconds = ttl_seconds

    async def begin(self) -> None:
        """Remove the TTL of all keys, unless the experiment has ended. Raises UnavailableError."""
        if self._controller.state.phase not in TERMINAL:
            await keep_experiment(self._redis, self._ledger)

    async def sweep(self) -> None:
        """Set the TTL of each key that has none, if the experiment has ended. Raises UnavailableError."""
        if self._ttl_seconds is None or self._controller.state.phase not in TERMINAL:
            return
        await expire_experiment(self._redis, self._ledger, self._ttl_seconds)
        # Renew the TTL of the state: a controller that restarts must find that the experiment has ended.
        await self._redis.expire(StateStore(self._redis, self._ledger).key, self._ttl_seconds)

    async def run(self) -> None:
        """Sweep every SWEEP_SECONDS after the end, until the task is cancelled."""
        await self._controller.wait_for_phase(*TERMINAL)
        while True:
            try:
                await self.sweep()
            except UnavailableError as error:
                log.warning("cannot set the TTL of the keys, retrying later: %s", error)
            await asyncio.sleep(SWEEP_SECONDS)
