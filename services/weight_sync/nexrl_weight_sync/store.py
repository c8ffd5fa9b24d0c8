"""Weight sync's state in Redis: one hash in the slot of the experiment's model tag."""

import json
from typing import Any

from redis.exceptions import RedisError

from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.store import Redis
from nexrl_weight_sync.coordinator import NO_VERSION, Replica, State, Weights

# Fences off a process that has been replaced but does not know it yet.
_SAVE = """
local version = tonumber(redis.call('HGET', KEYS[1], 'committed_version') or '-1')
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if (version > tonumber(ARGV[1]) and ARGV[6] == '0') or epoch > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], 'committed_version', ARGV[1], 'digest', ARGV[2], 'epoch', ARGV[3], 'held_version', ARGV[4],
  'replicas', ARGV[5])
return 1
"""


class WeightSyncStore:
    """Loads and saves the state of one model tag."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        """`prefix`: `nexrl.store.key_prefix` of the experiment and model tag."""
        self._redis = redis
        self._key = f"{prefix}weight_sync"
        self._save = redis.register_script(_SAVE)

    async def load(self) -> State:
        """The state that was saved last; that of an experiment which has not begun when there is none."""
        fields: dict[Any, Any] = await self._redis.hgetall(self._key)
        if not fields:
            return State()
        return State(
            committed=Weights(int(fields[b"committed_version"]), fields[b"digest"].decode()),
            epoch=int(fields[b"epoch"]),
            held_version=int(fields.get(b"held_version", NO_VERSION)),
            replicas=tuple(
                Replica(replica_id, address, http_url, Weights(), token_address)
                for replica_id, address, http_url, token_address in json.loads(fields[b"replicas"])
            ),
        )

    async def save(self, state: State, *, forgets: bool = False) -> None:
        """Store `state`, with a lower version than the stored one only if it `forgets`.

        Raises FailedPreconditionError when a newer one is stored, UnavailableError without Redis.
        """
        replicas = json.dumps([[r.replica_id, r.address, r.http_url, r.token_address] for r in state.replicas])
        committed = state.committed
        arguments: list[str | int] = [
            committed.policy_version,
            committed.digest,
            state.epoch,
            state.held_version,
            replicas,
            int(forgets),
        ]
        try:
            is_saved = await self._save(keys=[self._key], args=arguments)
        except RedisError as error:
            raise UnavailableError(f"weight sync's state could not be stored: {error}") from error
        if not is_saved:
            raise FailedPreconditionError("another weight-sync process serves this model tag; this one is out of date")
