"""Stores the state of the experiment in Redis: one hash with a field for each fact, written in one command."""

import json

from pydantic import TypeAdapter
from redis.exceptions import RedisError

from nexrl.errors import UnavailableError
from nexrl.store import Redis, key_prefix
from nexrl_controller.state import State

_STATE = TypeAdapter(State)


class StateStore:
    """Stores the newest state of one experiment."""

    def __init__(self, redis: Redis, experiment: str) -> None:
        self._redis = redis
        self.key = f"{key_prefix(experiment, 'controller')}state"

    async def load(self) -> State | None:
        """Return the newest saved state; None if there is none. Raises UnavailableError if Redis cannot be reached."""
        try:
            fields = await self._redis.hgetall(self.key)
        except (RedisError, OSError) as error:
            raise UnavailableError(f"Redis: {error}") from error
        if not fields:
            return None
        return _STATE.validate_python({_text(name): json.loads(value) for name, value in fields.items()})

    async def save(self, state: State) -> None:
        """Replace the state. Raises UnavailableError if Redis cannot be reached."""
        facts = _STATE.dump_python(state, mode="json")
        try:
            await self._redis.hset(self.key, mapping={name: json.dumps(value) for name, value in facts.items()})
        except (RedisError, OSError) as error:
            raise UnavailableError(f"Redis: {error}") from error


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
