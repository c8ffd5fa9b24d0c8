"""Another replica of the trainer, as replica 0 sees it: one call that lasts as long as both."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from nexrl.errors import UnavailableError
from nexrl.rpc.client import is_passing
from nexrl.rpc.status import error_from_call
from nexrl.v1 import trainer_replica_service_pb2 as pb
from nexrl_trainer.rank_processes import RankEnd
from nexrl_trainer.ranks import JOIN_SECONDS

if TYPE_CHECKING:
    from nexrl.v1.trainer_replica_service_pb2_grpc import TrainerReplicaServiceAsyncStub

END_SECONDS = 2.0


@dataclass(frozen=True)
class OtherReplica:
    """A replica whose ranks run, or begin to run."""

    trainer_id: str
    stub: "TrainerReplicaServiceAsyncStub"
    ended: "asyncio.Task[RankEnd]"

    @classmethod
    def started(
        cls, stub: "TrainerReplicaServiceAsyncStub", request: pb.RunRanksRequest, stop: Callable[[], None]
    ) -> "OtherReplica":
        """Have the replica start its ranks. `stop` is called if the replica is asked to stop."""
        return cls(request.trainer_id, stub, asyncio.create_task(_run(stub, request, stop)))

    async def end(self, exit_code: int, reason: str) -> None:
        """Tell the replica to end, and why. One that is not told notices the end of the call."""
        request = pb.EndRanksRequest(trainer_id=self.trainer_id, exit_code=exit_code, reason=reason)
        with suppress(grpc.aio.AioRpcError):
            await self.stub.EndRanks(request, timeout=END_SECONDS)
        self.ended.cancel()


async def _run(
    stub: "TrainerReplicaServiceAsyncStub", request: pb.RunRanksRequest, stop: Callable[[], None]
) -> RankEnd:
    """Run the ranks of the replica to their end. Raises the error with which the replica refuses the request."""
    first = request.replica * request.processes_per_replica
    lost = (
        f"replica {request.replica} of the trainer, with ranks {first} to {first + request.processes_per_replica - 1}"
    )
    call = stub.RunRanks(request, wait_for_ready=True)
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            await call.read()
        while isinstance(message := await call.read(), pb.RunRanksResponse):
            if message.HasField("rank_ended"):
                return RankEnd(message.rank_ended.rank, message.rank_ended.exit_code)
            stop()
    except grpc.aio.AioRpcError as rpc_error:
        if not is_passing(error := error_from_call(rpc_error)):
            raise error from None
        return RankEnd(first, error.exit_code, f"{lost}, has ended or cannot be reached: {error}")
    except TimeoutError:
        return RankEnd(first, UnavailableError.exit_code, f"{lost}, did not start within {JOIN_SECONDS:.0f} s")
    return RankEnd(first, UnavailableError.exit_code, f"{lost}, has ended")
