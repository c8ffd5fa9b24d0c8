"""Runs a validation of each version that weight sync holds. Weight sync continues even if the validation fails."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nexrl.errors import DeadlineExceededError, NexrlError, NotFoundError
from nexrl.rpc.client import call, is_passing, new_request_id
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl.v1 import weight_sync_service_pb2 as weight_sync_pb
from nexrl_controller.controller import Controller
from nexrl_controller.error_log import Severity
from nexrl_controller.events import FoundValidated, ValidationEnded, ValidationStarted, VersionCommitted
from nexrl_controller.state import IllegalTransitionError

if TYPE_CHECKING:
    from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceAsyncStub
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceAsyncStub

WAIT_SECONDS = 20.0
"""Longest wait of one blocking call. The call is repeated until it has a result."""
CALL_SECONDS = 10.0
"""Time that a call may take in addition to its wait."""
MAX_CALL_SECONDS = 3000.0
"""Longest deadline of a call. Servers refuse deadlines of more than one hour."""
END_SECONDS = 120.0
"""Longest time to retry EndValidation and EndValidationHold. Training cannot continue without them."""


@dataclass(frozen=True)
class Validation:
    """The validations of one model tag."""

    controller: Controller
    weight_sync: "WeightSyncServiceAsyncStub"
    validator: "ValidatorServiceAsyncStub"
    model_tag: str
    timeout_seconds: float
    """Longest time for one validation."""

    async def run(self) -> None:
        """Validate every version that weight sync holds, until the experiment has an outcome."""
        await self._find_validated()
        while self.controller.state.outcome is None:
            version = await self._wait_for_version()
            if version is not None:
                await self.validate(version)

    async def validate(self, version: int) -> None:
        """Validate one version. A failure is reported as an error, and training continues."""
        try:
            # Weight sync holds only committed versions. The watch may not have delivered this commit yet.
            await self.controller.apply(VersionCommitted(version))
            await self.controller.apply(ValidationStarted(version))
        except IllegalTransitionError:
            return  # the experiment is ending: weight sync stops, and the hold ends with it
        try:
            metrics = await self._measure(version)
            await self.controller.post_metrics(new_request_id(), version, metrics)
        except NexrlError as error:
            await self._report(version, Severity.ERROR, f"validation of version {version} failed: {error}")
        await self._end(version)

    async def _find_validated(self) -> None:
        """Record the validations that ended before this controller started.

        Without this record, a resumed run would wait for them forever.
        """
        request = weight_sync_pb.GetWeightSyncStateRequest(model_tag=self.model_tag)
        while True:
            try:
                state = await call(self.weight_sync.GetWeightSyncState, request, timeout_seconds=CALL_SECONDS)
            except NexrlError as error:
                if not is_passing(error):
                    raise
                continue
            if state.committed_version >= 0 and not state.waiting_for_validation:
                unfinished = self.controller.state.validating_version
                if unfinished is not None:  # its hold expired while no controller was running
                    await self._end(unfinished)
                await self.controller.apply(FoundValidated(state.committed_version))
            return

    async def _wait_for_version(self) -> int | None:
        request = weight_sync_pb.WaitForValidationRequest(model_tag=self.model_tag, wait_seconds=WAIT_SECONDS)
        try:
            held = await call(self.weight_sync.WaitForValidation, request, timeout_seconds=WAIT_SECONDS + CALL_SECONDS)
        except NexrlError as error:
            if is_passing(error):
                return None
            raise
        return held.policy_version if held.waiting else None

    async def _measure(self, version: int) -> Mapping[str, float]:
        deadline = time.monotonic() + self.timeout_seconds
        await self._start(version)
        while (left_seconds := deadline - time.monotonic()) > 0:
            wait_seconds = min(WAIT_SECONDS, left_seconds)
            request = validator_pb.WaitValidationRequest(
                model_tag=self.model_tag, policy_version=version, wait_seconds=wait_seconds
            )
            try:
                answer = await call(self.validator.WaitValidation, request, timeout_seconds=wait_seconds + CALL_SECONDS)
            except NotFoundError:
                await self._start(version)  # Redis has lost its last writes, among them this validation
                continue
            except NexrlError as error:
                if not is_passing(error):
                    raise
                continue
            if answer.complete:
                return answer.metrics
        raise DeadlineExceededError(f"it did not end within {self.timeout_seconds:g} s")

    async def _start(self, version: int) -> None:
        request = validator_pb.StartValidationRequest(
            request_id=new_request_id(), model_tag=self.model_tag, policy_version=version
        )
        await call(self.validator.StartValidation, request, timeout_seconds=min(self.timeout_seconds, MAX_CALL_SECONDS))

    async def _end(self, version: int) -> None:
        """Resume training samples, then record the validation, then release the hold of weight sync.

        If the controller is killed before the last call, weight sync still holds the version. The restarted controller
        validates it again.
        """
        end = validator_pb.EndValidationRequest(
            request_id=new_request_id(), model_tag=self.model_tag, policy_version=version
        )
        release = weight_sync_pb.EndValidationHoldRequest(
            request_id=new_request_id(), model_tag=self.model_tag, policy_version=version
        )
        problems = []
        try:
            await call(self.validator.EndValidation, end, timeout_seconds=END_SECONDS)
        except NexrlError as error:
            problems.append(f"EndValidation: {error}")
        with suppress(IllegalTransitionError):  # the experiment ended in the meantime
            await self.controller.apply(ValidationEnded(version))
        try:
            await call(self.weight_sync.EndValidationHold, release, timeout_seconds=END_SECONDS)
        except NexrlError as error:
            problems.append(f"EndValidationHold: {error}")
        for problem in problems:
            await self._report(
                version, Severity.CRITICAL, f"training cannot continue after version {version}: {problem}"
            )

    async def _report(self, version: int, severity: Severity, message: str) -> None:
        await self.controller.report_own_error(new_request_id(), f"validate version {version}", severity, message)
