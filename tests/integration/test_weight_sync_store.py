"""Weight sync's state in a real Redis."""

import pytest

from nexrl.errors import FailedPreconditionError
from nexrl.store import Redis, key_prefix
from nexrl_weight_sync.coordinator import Replica, State, Weights
from nexrl_weight_sync.store import WeightSyncStore


async def test_a_state_is_read_as_it_was_saved(redis: Redis, experiment_name: str) -> None:
    store = WeightSyncStore(redis, key_prefix(experiment_name, "default"))
    assert await store.load() == State()
    state = State(Weights(7, "d"), 3, 7, (Replica("a", "h:1", "http://h", Weights()),))
    await store.save(state)
    assert await store.load() == state


@pytest.mark.parametrize("older", [State(Weights(6, "d"), 9), State(Weights(7, "d"), 2)])
async def test_an_older_state_cannot_be_saved(redis: Redis, experiment_name: str, older: State) -> None:
    store = WeightSyncStore(redis, key_prefix(experiment_name, "default"))
    await store.save(State(Weights(7, "d"), 3))
    with pytest.raises(FailedPreconditionError, match="another weight-sync process"):
        await store.save(older)
    assert (await store.load()).committed == Weights(7, "d")


async def test_a_version_can_be_forgotten_but_not_by_a_process_that_was_replaced(
    redis: Redis, experiment_name: str
) -> None:
    store = WeightSyncStore(redis, key_prefix(experiment_name, "default"))
    await store.save(State(Weights(7, "d"), 3))
    with pytest.raises(FailedPreconditionError, match="another weight-sync process"):
        await store.save(State(Weights(), 2), forgets=True)
    await store.save(State(Weights(), 3), forgets=True)
    assert (await store.load()).committed == Weights()
