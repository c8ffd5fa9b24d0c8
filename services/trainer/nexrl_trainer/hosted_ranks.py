"""The main process of a trainer replica other than 0: it starts the ranks of its replica, and ends as rank 0 ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.rpc.server import ServiceProcess
from nexrl.v1 import trainer_replica_service_pb2 as pb
from nexrl_trainer.gang import NOTICE_SECONDS
from nexrl_trainer.rank_processes import RankProcess, end_all, end_process, first_end, start_ranks
from nexrl_trainer.ranks import JOIN_SECONDS

log = logging.getLogger(__name__)


class HostedRanks:
    """The ranks of this replica. They run while the call of replica 0 does."""

    def __init__(self, process: ServiceProcess) -> None:
        self._process = process
        self._trainer_id = ""
        self._ranks: Sequence[RankProcess] = ()
        self._started = asyncio.Event()
        self._events: asyncio.Queue[pb.RunRanksResponse | None] = asyncio.Queue()
        self._ending: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        """Exit code and reason."""

    async def serve(self, request: pb.RunRanksRequest) -> AsyncIterator[pb.RunRanksResponse]:
        """Start the ranks, and yield what happens to them until this process ends. Ends them if the caller leaves.

        Raises InvalidArgumentError for a request to another replica, FailedPreconditionError for a second one.
        """
        self._accept(request)
        try:
            await self._start(request)
            yield pb.RunRanksResponse(started=pb.RunRanksResponse.Started())
            while (event := await self._events.get()) is not None:
                yield event
        finally:
            told = "replica 0 of the trainer has ended or cannot be reached; its own log says why it ended"
            self._end_with(UnavailableError.exit_code, told)

    def end(self, request: pb.EndRanksRequest) -> None:
        """End the ranks and this process. Raises FailedPreconditionError if they belong to another trainer."""
        if self._trainer_id not in ("", request.trainer_id):
            raise FailedPreconditionError("trainer_id: this replica runs the ranks of another trainer; see RunRanks")
        self._end_with(request.exit_code, request.reason)

    def request_stop(self) -> None:
        """Ask replica 0 to stop the trainer, which ends with a checkpoint. Without replica 0, end this process."""
        if self._trainer_id:
            self._events.put_nowait(pb.RunRanksResponse(stop_requested=pb.RunRanksResponse.StopRequested()))
        else:
            self._end_with(0, "stopped")

    async def run(self) -> None:
        """Run until replica 0 has ended, a rank has, or the process is stopped. Then end this process alike."""
        watch = asyncio.create_task(self._watch())
        try:
            code, reason = await self._ending
        finally:
            watch.cancel()
        await end_all(self._ranks, code, reason)
        if code == 0:
            self._process.stopping.set()
            return
        log.critical("%s", reason)
        end_process(code)

    async def _watch(self) -> None:
        """Report the end of a rank to replica 0, which ends all replicas for that reason."""
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await self._started.wait()
        except TimeoutError:
            told = f"replica 0 of the trainer has not started the ranks of this replica within {JOIN_SECONDS:.0f} s"
            self._end_with(UnavailableError.exit_code, told)
            return
        end = await first_end(self._ranks)
        ended = pb.RunRanksResponse.RankEnded(rank=end.rank, exit_code=end.exit_code)
        self._events.put_nowait(pb.RunRanksResponse(rank_ended=ended))
        await asyncio.sleep(NOTICE_SECONDS)
        self._end_with(end.exit_code or 1, f"rank {end.rank} of the trainer ended with code {end.exit_code}")

    async def _start(self, request: pb.RunRanksRequest) -> None:
        first, processes = request.replica * request.processes_per_replica, request.processes_per_replica
        size, instance = request.replicas * processes, self._process.settings.instance
        self._ranks = await start_ranks(range(first, first + processes), size, instance, request.rendezvous)
        self._started.set()

    def _accept(self, request: pb.RunRanksRequest) -> None:
        if not request.trainer_id:
            raise InvalidArgumentError("trainer_id: is empty; give the id of the trainer that the ranks belong to")
        trainer = self._process.experiment.spec.trainer
        own = self._process.settings.replica, trainer.replicas, trainer.processes_per_replica
        asked = request.replica, request.replicas, request.processes_per_replica
        if asked != own:
            called = "replica {} of {} with {} processes".format
            raise InvalidArgumentError(
                f"replica, replicas, processes_per_replica: the call is for {called(*asked)}, this is {called(*own)}; "
                "give all replicas the same experiment, and NEXRL_TRAINER_REPLICAS the order of NEXRL_REPLICA"
            )
        if self._trainer_id:
            raise FailedPreconditionError(
                "trainer_id: this replica runs the ranks of another trainer, and ends with it; start all replicas "
                "of a trainer together"
            )
        self._trainer_id = request.trainer_id

    def _end_with(self, code: int, reason: str) -> None:
        """Note why this process ends, unless that is known already."""
        if not self._ending.done():
            self._ending.set_result((code, reason))
            self._events.put_nowait(None)
