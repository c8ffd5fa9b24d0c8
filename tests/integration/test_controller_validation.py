"""Validations and committed policy versions: what the controller asks of weight sync and of the validator."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.rpc.client import connect
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub, add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub, add_WeightSyncServiceServicer_to_server
from nexrl_controller.error_log import Severity
from nexrl_controller.policy_versions import follow_policy_versions
from nexrl_controller.state import Phase
from nexrl_controller.validation import Validation
from tests.support.controller import (
    Deploy,
    Deployed,
    FakeValidator,
    FakeWeightSync,
    served,
)


class Validated:
    """What became of validating version 4, the last one, of a trained experiment."""

    def __init__(self, deployed: Deployed, weight_sync: FakeWeightSync, validator: FakeValidator) -> None:
        self.state = deployed.controller.state
        self.errors = deployed.controller.errors.newest(10)
        self.is_released = weight_sync.is_released.is_set()
        self.calls = validator.calls


async def validated(controllers: Deploy, validator: FakeValidator, timeout_seconds: float = 30) -> Validated:
    deployed = await controllers()
    await deployed.heartbeat("trainer")
    await deployed.post(4, training_complete=1)
    weight_sync = FakeWeightSync([4])
    async with (
        served(
            (add_WeightSyncServiceServicer_to_server, weight_sync), (add_ValidatorServiceServicer_to_server, validator)
        ) as address,
        connect(address) as channel,
    ):
        stubs: tuple[Any, Any] = (WeightSyncServiceStub(channel), ValidatorServiceStub(channel))
        await Validation(deployed.controller, *stubs, "default", timeout_seconds).run()
    return Validated(deployed, weight_sync, validator)


@pytest.mark.guide("D10", "D11", "D12", "K5", "L11", "L12", "R6")
async def test_a_held_version_is_measured_posted_and_released(controllers: Deploy, tmp_path: Path) -> None:
    outcome = await validated(controllers, FakeValidator())
    assert outcome.calls == ["start 4", "end 4"]
    assert outcome.is_released
    assert (outcome.state.validated_version, outcome.state.outcome) == (4, Phase.SUCCEEDED)
    assert outcome.state.metrics["val/reward"] == 0.5
    assert '"val/reward": 0.5' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.guide("D12", "S10")
async def test_a_validation_that_never_ends_is_reported_and_released(controllers: Deploy) -> None:
    outcome = await validated(controllers, FakeValidator(is_stuck=True), timeout_seconds=0.1)
    assert outcome.calls == ["start 4", "end 4"]
    assert outcome.is_released
    assert [error.severity for error in outcome.errors] == [Severity.ERROR]
    assert "validation of version 4 failed: it did not end within 0.1 s" in outcome.errors[0].message


async def test_a_validation_that_redis_has_lost_is_started_again(controllers: Deploy) -> None:
    outcome = await validated(controllers, FakeValidator(forgets=True))
    assert outcome.calls == ["start 4", "start 4", "end 4"]
    assert outcome.errors == []
    assert outcome.state.metrics["val/reward"] == 0.5


@pytest.mark.guide("S10")
async def test_a_validation_that_cannot_start_is_reported_and_released(controllers: Deploy) -> None:
    outcome = await validated(controllers, FakeValidator(refusal=InvalidArgumentError("no validation data")))
    assert outcome.is_released
    assert "no validation data" in outcome.errors[0].message


async def test_commits_are_followed(controllers: Deploy) -> None:
    deployed = await controllers()
    weight_sync = (add_WeightSyncServiceServicer_to_server, FakeWeightSync([]))
    async with served(weight_sync) as address, connect(address) as channel:
        following = asyncio.create_task(
            follow_policy_versions(deployed.controller, WeightSyncServiceStub(channel), "default")
        )
        await deployed.controller.wait_for_phase(Phase.RUNNING)
        async for state in deployed.controller.watch():
            if state.policy_version == 1:
                break
        following.cancel()
        assert deployed.controller.state.policy_version == 1
