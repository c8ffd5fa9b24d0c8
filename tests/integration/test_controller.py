"""The life of an experiment: the controller over gRPC and a real Redis, its restarts, its process."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexrl.errors import InvalidArgumentError, UnavailableError
from nexrl.rpc.client import call, connect
from nexrl.rpc.server import ServiceProcess
from nexrl.settings import Settings
from nexrl.store import Redis
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as controller_pb
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.validator_service_pb2_grpc import add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from nexrl_controller import server
from nexrl_controller.controller import Controller
from nexrl_controller.events import Started, VersionCommitted
from nexrl_controller.state import Phase
from nexrl_controller.state_store import StateStore
from tests.support.clock import Clock
from tests.support.controller import (
    Deploy,
    FakeValidator,
    FakeWeightSync,
    experiment,
    served,
)
from tests.support.patience import LIMIT_SECONDS


@pytest.mark.guide("D2", "D4", "M13", "M14")
async def test_an_experiment_succeeds_when_its_components_have_stopped(controllers: Deploy) -> None:
    deployed = await controllers(validation=None)
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STARTING
    for name in ("trainer", "rollout-0"):
        await deployed.heartbeat(name)
    await deployed.controller.apply(VersionCommitted(0))
    await deployed.post(4, reward_mean=0.75)
    running = await deployed.experiment()
    assert (running.phase, running.progress.step, running.progress.total_steps) == (controller_pb.PHASE_RUNNING, 4, 4)
    assert dict(running.progress.metrics) == {"reward_mean": 0.75}
    assert (await deployed.seen()).training_step == 4

    await deployed.post(4, training_complete=1)
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STOPPING
    assert not (await deployed.report_exit("rollout-0", -15)).restart
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STOPPING
    assert not (await deployed.report_exit("trainer", 0)).restart
    ended = await deployed.experiment()
    assert (ended.phase, ended.reason) == (controller_pb.PHASE_SUCCEEDED, "Completed")


@pytest.mark.guide("D3")
async def test_a_stop_ends_in_failure_that_says_so_and_can_be_repeated(controllers: Deploy) -> None:
    deployed = await controllers()
    await deployed.heartbeat("trainer")
    request = controller_pb.StopExperimentRequest(request_id="1", reason="Ctrl-C")
    for _ in range(2):
        await call(deployed.lifecycle.StopExperiment, request, timeout_seconds=LIMIT_SECONDS)
    assert (await deployed.experiment()).phase == controller_pb.PHASE_STOPPING
    await deployed.report_exit("trainer", 0)
    ended = await deployed.experiment()
    assert (ended.phase, ended.reason, ended.message) == (controller_pb.PHASE_FAILED, "Stopped", "Ctrl-C")


@pytest.mark.guide("D3")
async def test_components_that_do_not_stop_do_not_keep_the_experiment_open(
    controllers: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl_controller.controller.STOP_SECONDS", 0.01)
    deployed = await controllers()
    await deployed.heartbeat("trainer")
    await deployed.controller.stop("enough")
    await deployed.controller.bound_stop()
    assert deployed.controller.state.phase is Phase.FAILED


@pytest.mark.guide("A6")
async def test_a_component_is_started_again_until_its_limit(controllers: Deploy) -> None:
    deployed = await controllers(failurePolicy={"maxRestarts": 1})
    await deployed.heartbeat("rollout-0")
    await deployed.controller.apply(VersionCommitted(0))
    first = await deployed.report_exit("rollout-0", -9)
    assert (first.restart, first.delay_seconds) == (True, 0.5)
    restarting = await deployed.experiment()
    assert (restarting.phase, restarting.restarts) == (controller_pb.PHASE_RESTARTING, 1)
    await deployed.heartbeat("rollout-0")
    assert (await deployed.experiment()).phase == controller_pb.PHASE_RUNNING

    assert not (await deployed.report_exit("rollout-0", 1)).restart
    failed = await deployed.experiment()
    assert (failed.phase, failed.reason) == (controller_pb.PHASE_FAILED, "ComponentFailed")
    assert failed.message.startswith("rollout-0 ended with exit code 1: last line; it was restarted 1 times")
    seen = await deployed.seen()
    assert [error.severity for error in seen.errors] == [activity_pb.SEVERITY_CRITICAL, activity_pb.SEVERITY_WARNING]


async def test_a_watch_gives_the_whole_state_at_once_and_at_each_change(controllers: Deploy) -> None:
    deployed = await controllers()
    watch = deployed.lifecycle.WatchExperiment(controller_pb.WatchExperimentRequest(), timeout=LIMIT_SECONDS)
    states = aiter(watch)
    assert (await anext(states)).experiment.phase == controller_pb.PHASE_STARTING
    await deployed.controller.apply(VersionCommitted(0))
    for step in range(1, 4):
        await deployed.post(step, loss=step)
    newest = (await anext(states)).experiment
    while newest.progress.step < 3:  # changes in quick succession may arrive in one message
        newest = (await anext(states)).experiment
    assert newest.phase == controller_pb.PHASE_RUNNING
    deployed.controller.end_watches()
    assert [state async for state in states] == []


async def test_a_restarted_controller_goes_on_where_the_killed_one_was(controllers: Deploy, clock: Clock) -> None:
    killed = await controllers()
    await killed.controller.apply(VersionCommitted(0))
    await killed.post(2, loss=0.5, entropy=math.nan)
    first = await killed.report_exit("rollout-0", 1, request_id="exit-1")
    before = killed.controller.state

    clock.advance(100)
    restarted = await controllers()
    after = restarted.controller.state
    assert math.isnan(after.metrics["entropy"])
    assert repr(after) == repr(before)
    assert await restarted.report_exit("rollout-0", 1, request_id="exit-1") == first
    assert restarted.controller.state.restarts == 1


async def test_a_suspended_experiment_waits_and_goes_on_when_resumed(controllers: Deploy) -> None:
    suspended = await controllers(suspend=True)
    assert (await suspended.experiment()).phase == controller_pb.PHASE_SUSPENDED
    assert (await (await controllers()).experiment()).phase == controller_pb.PHASE_STARTING


async def test_a_redis_that_is_down_leaves_the_old_state(experiment_name: str) -> None:
    closed = StateStore(Redis.from_url("redis://127.0.0.1:1", retry=None), experiment_name)
    with pytest.raises(UnavailableError, match="Redis"):
        await closed.load()
    controller = Controller(experiment(experiment_name), closed, [], Clock())
    with pytest.raises(UnavailableError, match="Redis"):
        await controller.apply(Started(is_suspended=False))
    assert controller.state.phase is Phase.PENDING


@pytest.mark.guide("C5", "D1")
async def test_the_process_validates_and_stops_while_it_is_watched(
    redis_url: str, experiment_name: str, tmp_path: Path
) -> None:
    weight_sync, validator = FakeWeightSync([0]), FakeValidator()
    async with served(
        (add_WeightSyncServiceServicer_to_server, weight_sync), (add_ValidatorServiceServicer_to_server, validator)
    ) as peers:
        settings = Settings(
            experiment_file=tmp_path / "experiment.yaml",
            run_dir=tmp_path,
            instance="controller",
            redis_url=redis_url,
            weight_sync=peers,
            trajectory_pool=peers,
            drain_seconds=LIMIT_SECONDS,
        )
        process = ServiceProcess("controller", settings, experiment(experiment_name))
        async with asyncio.TaskGroup() as tasks, connect(process.address) as channel:
            tasks.create_task(process.run(server.start))
            watch = ControllerServiceStub(channel).WatchExperiment(
                controller_pb.WatchExperimentRequest(), timeout=LIMIT_SECONDS, wait_for_ready=True
            )
            await weight_sync.is_released.wait()
            health: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="nexrl.v1.ControllerService")
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            process.stopping.set()
            assert [seen.experiment.name async for seen in watch][-1] == experiment_name
    assert validator.calls == ["start 0", "end 0"]


async def test_a_controller_that_cannot_find_the_others_says_so(
    redis_url: str, experiment_name: str, tmp_path: Path
) -> None:
    settings = Settings(
        experiment_file=tmp_path / "experiment.yaml", run_dir=tmp_path, instance="controller", redis_url=redis_url
    )
    process = ServiceProcess("controller", settings, experiment(experiment_name))
    with pytest.raises(InvalidArgumentError, match="NEXRL_WEIGHT_SYNC"):
        await process.run(server.start)
