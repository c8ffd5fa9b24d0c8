"""How long the keys of an experiment stay: a controller's process on a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nexrl.rpc.client import call, connect, new_request_id, watch
from nexrl.rpc.server import ServiceProcess
from nexrl.settings import Settings
from nexrl.store import Redis, key_prefix
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl_controller import server
from tests.support.controller import experiment
from tests.support.patience import LIMIT_SECONDS, eventually

if TYPE_CHECKING:
    from nexrl.v1.controller_service_pb2_grpc import ControllerServiceAsyncStub

TTL_SECONDS = 5000


class Keys:
    """One experiment's keys, and controllers of it. It is suspended, so that a controller needs nobody else."""

    def __init__(self, redis: Redis, redis_url: str, name: str, folder: Path) -> None:
        self._redis, self._url, self._name, self._folder = redis, redis_url, name, folder
        self.state = key_prefix(name, "controller") + "state"
        self.early = key_prefix(name, "default") + "meta"
        self.late = key_prefix(name, "default") + "payloads:17"

    async def ttl(self, name: str) -> int:
        """Seconds until a key ends; -1 for never."""
        return int(await self._redis.ttl(name))

    async def until_it_ends(self, name: str) -> None:
        """Return when a key has an end."""

        async def has_an_end() -> bool:
            return await self.ttl(name) >= 0

        await eventually(has_an_end, f"{name} has an end")

    async def write(self, name: str) -> None:
        """Write a key that has no end, as everyone does."""
        await self._redis.set(name, "")

    async def forget_state(self) -> None:
        """What a launcher does before it runs an experiment again."""
        await self._redis.delete(self.state)

    @asynccontextmanager
    async def controller(
        self, *, is_managed: bool = False, **redis: object
    ) -> AsyncIterator["ControllerServiceAsyncStub"]:
        """A process that serves, and ends with the block."""
        settings = Settings(
            experiment_file=self._folder / "experiment.yaml",
            run_dir=self._folder,
            instance="controller",
            redis_url=self._url,
            redis_is_managed=is_managed,
        )
        process = ServiceProcess("controller", settings, experiment(self._name, suspend=True, redis=redis))
        async with asyncio.TaskGroup() as tasks, connect(process.address) as channel:
            tasks.create_task(process.run(server.start))
            stub: ControllerServiceAsyncStub = ControllerServiceStub(channel)
            await call(stub.GetExperiment, pb.GetExperimentRequest(), timeout_seconds=LIMIT_SECONDS)
            yield stub
            process.stopping.set()


async def end(stub: "ControllerServiceAsyncStub") -> None:
    """Stop the experiment; returns when it has ended."""
    request = pb.StopExperimentRequest(request_id=new_request_id(), reason="enough")
    await call(stub.StopExperiment, request, timeout_seconds=LIMIT_SECONDS)
    async for seen in watch(stub.WatchExperiment, pb.WatchExperimentRequest()):
        if seen.experiment.phase == pb.PHASE_FAILED:
            return


@pytest.fixture
def keys(redis: Redis, redis_url: str, experiment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr("nexrl_controller.controller.STOP_SECONDS", 0.01)  # there is nobody to wait for
    return Keys(redis, redis_url, experiment_name, tmp_path)


async def test_the_keys_end_some_time_after_the_experiment_and_are_kept_when_it_goes_on(keys: Keys) -> None:
    async with keys.controller(ttlSecondsAfterFinished=TTL_SECONDS) as stub:
        await keys.write(keys.early)
        assert [await keys.ttl(name) for name in (keys.state, keys.early)] == [-1, -1]
        await end(stub)
        await keys.until_it_ends(keys.early)
        await keys.write(keys.late)  # by a component that did not hear of the end
    for name in (keys.state, keys.early, keys.late):
        assert 0 < await keys.ttl(name) <= TTL_SECONDS

    async with keys.controller(ttlSecondsAfterFinished=TTL_SECONDS):  # finds that all is over
        assert await keys.ttl(keys.early) > 0
    await keys.forget_state()
    async with keys.controller(ttlSecondsAfterFinished=TTL_SECONDS):
        assert [await keys.ttl(name) for name in (keys.state, keys.early, keys.late)] == [-1, -1, -1]
    assert await keys.ttl(keys.early) == -1  # a suspended experiment has not ended


@pytest.mark.parametrize("is_managed", [True, False])
async def test_keys_stay_for_ever_in_a_run_s_folder_and_where_it_is_asked_for(keys: Keys, is_managed: bool) -> None:
    ttl_seconds = TTL_SECONDS if is_managed else None
    async with keys.controller(is_managed=is_managed, ttlSecondsAfterFinished=ttl_seconds) as stub:
        await keys.write(keys.early)
        await end(stub)
    assert [await keys.ttl(name) for name in (keys.state, keys.early)] == [-1, -1]
