"""Weight sync's state in a real Redis."""

import pytest

from nexrl.errors import FailedPreconditionError
from nexrl.store import Redis, key_prefix
from nexrl_weight_sync.records import Replica, State, Weights
from nexrl_weight_sync.store import WeightSyncStore


async def test_a_state_is_read_as_it_was_saved(redis: Redis, experiment_name: str) -> None:
    store = WeightSyncStore(redis, key_prefix(experiment_name, "default"))
    assert await store.load() == State()
    state = State(Weights(7, "d"), 3, 7, (Replica("a", "h:1", "http://h", Weights(), "h:2", "GPU-1"),))
    await store.save(state)
    assert await store.load() == state


async def test_replicas_of_a_state_that_knows_no_gpus_have_none(redis: Redis, experiment_name: str) -> None:
    prefix = key_prefix(experiment_name, "default")
    store = WeightSyncStore(redis, prefix)
    await store.load()
    await store.save(State(replicas=(Replica("a", "h:1", "http://h", Weights(), "h:2", "GPU-1"),)))
    await redis.hset(f"{prefix}weight_sync", "replicas", '[["a", "h:1", "http://h", "h:2"]]')
    assert (await store.load()).replicas == (Replica("a", "h:1", "http://h", Weights(), "h:2"),)


async def test_a_script_that_is_lost_as_soon_as_it_is_loaded_is_loaded_again(
    redis: Redis, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a Redis that is replaced between the loading and the run."""
    load, losses = redis.script_load, iter([True, True])

    async def load_and_lose(script: str) -> str:
        sha: str = await load(script)
        if next(losses, False):
            await redis.script_flush()
        return sha

    monkeypatch.setattr(redis, "script_load", load_and_lose)
    await redis.script_flush()
    assert await WeightSyncStore(redis, key_prefix(experiment_name, "default")).load() == State()
    assert not next(losses, False)


async def test_a_process_that_was_replaced_saves_nothing(redis: Redis, experiment_name: str) -> None:
    replaced, owner = (WeightSyncStore(redis, key_prefix(experiment_name, "default")) for _ in range(2))
    await replaced.load()
    await replaced.save(State(Weights(7, "d"), 3))
    assert (await owner.load()).committed == Weights(7, "d")
    with pytest.raises(FailedPreconditionError, match="another weight-sync process"):
        await replaced.save(State(Weights(8, "e"), 4))
    await owner.save(State(Weights(9, "f"), 5))
    assert (await owner.load()).committed == Weights(9, "f")


async def test_its_owner_forgets_a_version_also_when_redis_has_forgotten_that_it_did(
    redis: Redis, experiment_name: str
) -> None:
    prefix = key_prefix(experiment_name, "default")
    owner = WeightSyncStore(redis, prefix)
    await owner.load()
    await owner.save(State(Weights(52, "d"), 3))
    past = await redis.dump(prefix + "weight_sync") or b""
    await owner.save(State(Weights(), 3))
    await owner.save(State(Weights(49, "e"), 4))
    await redis.restore(prefix + "weight_sync", 0, past, replace=True)
    await owner.save(State(Weights(50, "f"), 5))
    assert (await owner.load()).committed == Weights(50, "f")
