"""Weight sync's state in Redis: one hash in the slot of the experiment's model tag."""

import json
import time

from redis.exceptions import RedisError

from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.store import Redis, run_script
from nexrl_weight_sync.records import Replica, State, Weights

# The process that loaded the state last owns it; older processes are fenced off by their incarnation. The stored
# version cannot fence them: a Redis that lost its last writes may hold a higher version than its owner.
_LOAD = """
local stored = tonumber(redis.call('HGET', KEYS[1], 'incarnation') or '0')
local incarnation = string.format('%.0f', math.max(stored + 1, tonumber(ARGV[1])))
redis.call('HSET', KEYS[1], 'incarnation', incarnation)
return {incarnation, redis.call('HMGET', KEYS[1], 'committed_version', 'digest', 'epoch', 'held_version', 'replicas')}
"""
_SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'incarnation') or '0') > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'committed_version', ARGV[2], 'digest', ARGV[3], 'epoch', ARGV[4],
  'held_version', ARGV[5], 'replicas', ARGV[6])
return 1
"""


class WeightSyncStore:
    """Loads and saves the state of one model tag."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        """`prefix`: `nexrl.store.key_prefix` of the experiment and model tag."""
        self._key = f"{prefix}weight_sync"
        self._load = redis.register_script(_LOAD)
        self._save = redis.register_script(_SAVE)
        self._incarnation = 0

    async def load(self) -> State:
        """Take ownership of the state and return what was saved last; an empty state if nothing was saved.

        The incarnation follows the clock, so that a Redis that lost writes returns no number twice.
        """
        now = int(time.time() * 1000)
        incarnation, fields = await run_script(self._load, [self._key], [now])
        self._incarnation = int(incarnation)
        committed_version, digest, epoch, held_version, replicas = fields
        if committed_version is None:
            return State()
        return State(
            committed=Weights(int(committed_version), digest.decode()),
            epoch=int(epoch),
            held_version=int(held_version),
            replicas=tuple(
                Replica(replica_id, address, http_url, Weights(), *token_address_and_gpu)
                for replica_id, address, http_url, *token_address_and_gpu in json.loads(replicas)
            ),
        )

    async def save(self, state: State) -> None:
        """Store `state`.

        Raises FailedPreconditionError if another process has loaded it since, UnavailableError if Redis is unreachable.
        """
        replicas = json.dumps([[r.replica_id, r.address, r.http_url, r.token_address, r.gpu] for r in state.replicas])
        committed = state.committed
        arguments: list[str | int] = [
            self._incarnation,
            committed.policy_version,
            committed.digest,
            state.epoch,
            state.held_version,
            replicas,
        ]
        try:
            is_saved = await run_script(self._save, [self._key], arguments)
        except RedisError as error:
            raise UnavailableError(f"weight sync's state could not be stored: {error}") from error
        if not is_saved:
            raise FailedPreconditionError("another weight-sync process serves this model tag; this one is out of date")
