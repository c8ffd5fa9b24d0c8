"""Follows the trajectory pool's count of attempts at samples."""

import asyncio
import logging
from typing import TYPE_CHECKING

from nexrl.errors import NexrlError
from nexrl.rpc.client import call
from nexrl.v1 import trajectory_pool_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import Verdict
from nexrl_controller.attempts import Count, FailedAttempt
from nexrl_controller.controller import Controller
from nexrl_controller.events import AttemptsCounted

if TYPE_CHECKING:
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0


async def follow_attempts(controller: Controller, pool: "TrajectoryPoolServiceAsyncStub", model_tag: str) -> None:
    """Apply the pool's count at the interval of the health checks, until the experiment has an outcome."""
    request = pb.GetTrajectoryPoolStateRequest(model_tag=model_tag)
    while controller.state.outcome is None:
        try:
            answer = await call(pool.GetTrajectoryPoolState, request, timeout_seconds=CALL_SECONDS)
            await controller.apply(_counted(answer.pools[0]))
        except (
            NexrlError
        ) as error:  # the pool or Redis is unreachable; counts only grow, so the next one includes this one
            log.info("attempts at samples: %s", error)
        await asyncio.sleep(controller.health.check_interval_seconds)


def _counted(state: pb.PoolState) -> AttemptsCounted:
    count = Count(state.finished_attempts, state.failed_attempts)
    if not state.HasField("last_failed_attempt"):
        return AttemptsCounted(count, None)
    last = state.last_failed_attempt
    verdict = Verdict.Name(last.verdict).removeprefix("VERDICT_")
    return AttemptsCounted(count, FailedAttempt(last.sample_id, last.worker_id, verdict, last.error))
