"""Quiescence: the real controller learns at once that a module has begun or ended its work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from nexrl.activity import ActivityTracker
from nexrl.rpc.client import call, connect
from nexrl.store import Redis
from nexrl.v1 import activity_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub, add_ActivityServiceServicer_to_server
from nexrl_controller.controller import Controller
from nexrl_controller.service import ActivityServicer
from nexrl_controller.state_store import StateStore
from tests.support.clock import Clock
from tests.support.controller import experiment, served
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.pool import UNTIL_WOKEN_SECONDS

if TYPE_CHECKING:
    from nexrl.v1.activity_service_pb2_grpc import ActivityServiceAsyncStub

SELDOM = {"health": {"checkIntervalSeconds": 3600, "timeoutSeconds": 7200}}
"""So seldom that no heartbeat of the interval falls into a test."""


@pytest.fixture
async def controller(redis: Redis, experiment_name: str, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a controller that asks for a heartbeat every hour."""
    running = Controller(experiment(experiment_name, monitor=SELDOM), StateStore(redis, experiment_name), [], Clock())
    await running.start()
    services = (add_ActivityServiceServicer_to_server, ActivityServicer(running))
    async with served(services) as address, connect(address) as channel:
        yield channel


async def is_quiescent(stub: "ActivityServiceAsyncStub", *, rollout_only: bool, wait_seconds: float) -> bool:
    request = pb.WaitQuiescentRequest(rollout_only=rollout_only, wait_seconds=wait_seconds)
    return (await call(stub.WaitQuiescent, request, timeout_seconds=wait_seconds + LIMIT_SECONDS)).quiescent


async def wait_for_work(stub: "ActivityServiceAsyncStub", *modules: str) -> None:
    """Return once the controller knows of work of each of `modules`."""

    async def are_busy() -> bool:
        seen = await call(stub.GetActivity, pb.GetActivityRequest(), timeout_seconds=LIMIT_SECONDS)
        return {module.name for module in seen.modules if module.work} >= set(modules)

    await eventually(are_busy, f"{modules} have work")


@asynccontextmanager
async def module(name: str, role: str, controller: grpc.aio.Channel) -> AsyncIterator[ActivityTracker]:
    """A module that sends heartbeats while the block runs."""
    tracker = ActivityTracker(pb.Module(name=name, role=role), controller)
    sending = asyncio.create_task(tracker.send_heartbeats())
    yield tracker
    sending.cancel()


@pytest.mark.guide("M5", "M6", "M9", "R5")
async def test_the_end_of_work_makes_the_experiment_quiescent_without_another_heartbeat(
    controller: grpc.aio.Channel,
) -> None:
    stub: ActivityServiceAsyncStub = ActivityServiceStub(controller)
    async with (
        module("rollout-0", "rollout", controller) as rollout,
        module("trainer", "trainer", controller) as trainer,
    ):
        with trainer.track("train"):
            with rollout.track("rollout"):
                await wait_for_work(stub, "rollout-0", "trainer")
                assert not await is_quiescent(stub, rollout_only=True, wait_seconds=0)
            assert await is_quiescent(stub, rollout_only=True, wait_seconds=UNTIL_WOKEN_SECONDS)
            assert not await is_quiescent(stub, rollout_only=False, wait_seconds=0)
        assert await is_quiescent(stub, rollout_only=False, wait_seconds=UNTIL_WOKEN_SECONDS)
