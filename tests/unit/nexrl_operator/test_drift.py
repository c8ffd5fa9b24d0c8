"""When changes made by hand are put back, on a clock of the test."""

from typing import Any, cast

from nexrl.k8s.api import Api
from nexrl_operator.caches import Caches
from nexrl_operator.drift import Drift
from nexrl_operator.experiment_state import ExperimentState
from nexrl_operator.observed import Observed
from nexrl_operator.reporter import Reporter

Object = dict[str, Any]
METADATA = {"name": "x-controller", "namespace": "rl", "resourceVersion": "1"}
RENDERED: Object = {"kind": "Service", "metadata": METADATA, "spec": {"selector": "ours"}}
CHANGED: Object = {"kind": "Service", "metadata": METADATA, "spec": {"selector": "theirs"}}


class Cluster:
    """Answers as the API server and the caches do, and counts."""

    restorations = 0

    async def apply(self, item: Object, *, dry_run: bool = False) -> Object:
        self.restorations += not dry_run
        return RENDERED

    def note(self, item: Object) -> None:
        pass

    async def event(self, *said: object) -> None:
        pass


async def place(observed: Observed, item: Object) -> Object:
    return item


async def restorations(state: ExperimentState, *times: float) -> int:
    """Return how often an object is put back that somebody has changed at each of these times."""
    cluster = Cluster()
    drift = Drift(cast(Api, cluster), cast(Caches, cluster), cast(Reporter, cluster))
    for now in times:
        await drift.restore(Observed({}, [CHANGED], [], None, now), state, [RENDERED], place)
    return cluster.restorations


async def test_a_fight_with_another_program_slows_down_to_once_an_hour() -> None:
    state = ExperimentState("uid")
    assert await restorations(state, *range(0, 3600, 10)) == 6  # at 0, 60, 180, 420, 900 and 1860 s
    assert await restorations(state, *range(10 * 3600, 20 * 3600, 10)) <= 16
    assert await restorations(state, *range(20 * 3600, 30 * 3600, 10)) == 10


async def test_a_change_long_after_the_last_is_put_back_at_once_and_again_after_a_minute() -> None:
    state = ExperimentState("uid")
    await restorations(state, 0, 60, 180)
    assert await restorations(state, 100_000, 100_059, 100_060) == 2
