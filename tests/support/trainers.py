"""Runs trainer processes that are killed and restarted, with all their services. Records their calls to the pool.

Trainer and replica are processes. The pool and weight sync run in the test's process, with real sockets and a real
Redis. Each is behind a relay, through which a test can act before and after every call.
"""

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc

from nexrl.errors import InvalidArgumentError
from nexrl.local.components import free_ports
from nexrl.models import build_model, iter_weights
from nexrl.rpc.client import CLIENT_OPTIONS
from nexrl.spec import Experiment, dump_resolved
from nexrl.v1 import policy_pb2, trajectory_pb2
from nexrl.v1 import train_batch_pool_service_pb2 as pb
from nexrl.v1 import weight_sync_service_pb2 as weight_sync_pb
from nexrl.weights.packing import tensor_specs
from nexrl_trainer.checkpoint import find_latest_checkpoint
from nexrl_weight_sync import server as weight_sync_server
from tests.support import replica_process, trainer_process
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.pool import TAG, PoolClient, drawn_span, running_pool, scored
from tests.support.services import running_service
from tests.support.trainer_process import Suicide

LOOPBACK = "127.0.0.1"

# Only one process imports torch. Trainers and replicas are forks of it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([replica_process.__name__, trainer_process.__name__])

SampleIds = tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """One call of a trainer at a relay, before the relay passes on the request (`response` is None) or the response."""

    name: str
    request: bytes
    response: bytes | None = None


class Relay(grpc.GenericRpcHandler):
    """Passes calls on unchanged. Calls `observe` before it passes on each request, and before each response."""

    def __init__(self, target: str, observe: Callable[[Call], Awaitable[None]]) -> None:
        self._channel: Any = grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
        self._observe = observe

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method.endswith("/WatchReplicas"):
            return grpc.unary_stream_rpc_method_handler(partial(self._stream, method))
        return grpc.unary_unary_rpc_method_handler(partial(self._pass, method))

    async def _pass(self, method: str, request: bytes, context: Any) -> bytes:
        call = self._call(method, request, context.time_remaining())
        # A wait ends with its caller. A call that changes the ledger runs to its end, as in the pool, and is recorded.
        is_wait = "/Lease" in method
        try:
            return await (call if is_wait else asyncio.shield(asyncio.ensure_future(call)))
        except grpc.aio.AioRpcError as error:
            await _fail(error, context)

    async def _call(self, method: str, request: bytes, seconds: float) -> bytes:
        name = method.rpartition("/")[2]
        await self._observe(Call(name, request))
        response: bytes = await self._channel.unary_unary(method)(request, timeout=seconds)
        await self._observe(Call(name, request, response))
        return response

    async def _stream(self, method: str, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            async for response in self._channel.unary_stream(method)(request, timeout=context.time_remaining()):
                yield response
        except grpc.aio.AioRpcError as error:
            await _fail(error, context)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Run the relay, and yield its address."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self,))
        port = server.add_insecure_port(f"{LOOPBACK}:0")
        await server.start()
        try:
            yield f"{LOOPBACK}:{port}"
        finally:
            await server.stop(None)
            await self._channel.close()


async def _fail(error: grpc.aio.AioRpcError, context: Any) -> NoReturn:
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    raise AssertionError("abort raises")


@dataclass(frozen=True)
class Death:
    """Kills the trainer at its next call `name` after `steps` steps. `is_seen`: after the service has seen the call."""

    name: str
    steps: int
    is_seen: bool
    rank: int = 0
    """The rank whose process is killed."""
    replica: int = 0
    """If it is not 0, the main process of this replica is killed, and not that of a rank."""

    def is_due(self, call: Call, steps: int) -> bool:
        """Return whether the trainer is killed at this call."""
        return call.name == self.name and (call.response is not None) == self.is_seen and steps >= self.steps


@dataclass
class World:
    """The services and files that the trainers of one experiment use, and a record of their steps."""

    folder: Path
    experiment: Experiment
    pool: PoolClient
    settled_seconds: float = 0.0
    """The value of nexrl_trainer.checkpoint.SETTLED_SECONDS in the trainers."""
    steps: list[SampleIds] = field(default_factory=list)
    """Sample ids of each step that the current trainer's weights contain, including the steps of its checkpoint."""
    acknowledged: list[tuple[int, SampleIds]] = field(default_factory=list)
    """All acknowledged steps in order of time, repeated steps included."""
    resumed_from: list[int] = field(default_factory=list)
    """For each started trainer, the number of steps in its checkpoint."""
    version: int = 0
    """The newest version that the replicas serve."""
    tasks: dict[str, str] = field(default_factory=dict)
    """The task id of each produced sample."""
    before_call: Callable[[Call], Awaitable[None]] | None = None
    """A function of the test. It is called last at each call."""
    _environment: Mapping[str, str] = field(default_factory=dict)
    _producing: asyncio.Task[None] | None = None
    codes: list[int] = field(default_factory=list)
    """Exit codes of the main processes of the last trainer, by replica."""
    _mains: list[Any] = field(default_factory=list)
    """The main process of each replica of the trainer."""
    _death: Death | None = None
    _finished: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def use(self, experiment: Experiment) -> None:
        """Give the next trainers this experiment."""
        self.experiment = experiment
        Path(self._environment["NEXRL_EXPERIMENT_FILE"]).write_text(dump_resolved(experiment))

    async def live(self, death: Death | Suicide | float | None = None, rank: int = 0) -> int:
        """Run one trainer. Returns the exit code of rank 0: -9 if it was killed, 0 if training was complete.

        `death` kills it at a call, at a point in its own code, or that many seconds after its start. The last kills the
        process of `rank`.
        """
        suicide = death if isinstance(death, Suicide) else None
        self._death = death if isinstance(death, Death) else None
        self._finished.clear()
        self._ended.clear()
        self._start(suicide)
        ended = asyncio.create_task(self._end())
        finished = asyncio.create_task(self._finished.wait())
        assert self._producing is not None
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                seconds = death if isinstance(death, float) else None
                events = [ended, finished, self._producing]
                await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if self._producing.done():
                    self._producing.result()
                if finished.done():
                    self._mains[0].terminate()
                elif not ended.done():
                    await self.rank_is_there(rank)
                    self.signal_rank(rank, signal.SIGKILL)
                await ended
        finally:
            finished.cancel()
            for main in self._mains:
                main.kill()
            await ended
        self.codes = [main.exitcode for main in self._mains]
        return self.codes[0]

    def _start(self, suicide: Suicide | None) -> None:
        """Start the main process of each replica of the trainer."""
        ports = free_ports(self.experiment.spec.trainer.replicas - 1)
        addresses = [f"{LOOPBACK}:{port}" for port in ports]
        self._mains = []
        for replica, listen in enumerate([f"{LOOPBACK}:0", *addresses]):
            instance = f"trainer-{replica}" if replica else "trainer"
            own = {"NEXRL_INSTANCE": instance, "NEXRL_REPLICA": str(replica), "NEXRL_LISTEN": listen}
            environment = {**self._environment, **own, "NEXRL_TRAINER_REPLICAS": ",".join(addresses)}
            arguments = (environment, self.folder / f"{instance}.log", suicide, self.settled_seconds)
            main: Any = _processes.Process(target=trainer_process.main, args=arguments, daemon=True)
            main.start()
            self._mains.append(main)

    async def rank_is_there(self, rank: int) -> None:
        """Wait until the process of a rank of the current trainer has begun, or the trainer has ended."""

        async def is_there() -> bool:
            return self._ended.is_set() or self._pid_of(rank) is not None

        await eventually(is_there)

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank of the current trainer, if there is one."""
        pid = self._pid_of(rank)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_replica(self, replica: int, number: int) -> None:
        """Send a signal to the main process of a replica of the current trainer."""
        os.kill(self._mains[replica].pid, number)

    def _pid_of(self, rank: int) -> int | None:
        main: int = self._mains[rank // self.experiment.spec.trainer.processes_per_replica].pid
        return rank_pid(main, rank) if rank else main

    async def has_ended(self) -> None:
        """Wait until the process of the current trainer has ended."""
        await self._ended.wait()

    async def _end(self) -> None:
        for main in self._mains:
            await asyncio.to_thread(main.join)
        self._ended.set()

    async def produce(self) -> None:
        """Produce samples until cancelled. Tokens and rewards depend only on the task and the sample's index in it."""
        while True:
            for lease in (await self.pool.lease(wait_seconds=10)).leases:
                self.tasks |= {sample.sample_id: lease.task.task_id for sample in lease.samples}
                # The pool may know a newer version than the trainer, or may have lost one with Redis's last writes.
                self.version = max(self.version, (await self.pool.state()).policy_version)
                try:
                    await self._put(lease)
                except InvalidArgumentError:  # Redis has lost the steps before this version
                    self.version = (await self.pool.state()).policy_version
                    await self._put(lease)

    async def _put(self, lease: trajectory_pb2.TaskLease) -> None:
        await self.pool.put([scored(s, trajectory(lease, s.sample_id, self.version)) for s in lease.samples])

    async def observe(self, call: Call) -> None:
        """Observe a call. The relays call this function."""
        if call.response is not None:
            self._record(call)
        if self._death is not None and self._death.is_due(call, len(self.steps)):
            death, self._death = self._death, None
            if death.replica:
                self.signal_replica(death.replica, signal.SIGKILL)
            else:
                self.signal_rank(death.rank, signal.SIGKILL)
            await self._ended.wait()
            raise asyncio.CancelledError  # the caller is dead, so no answer is needed
        if self.before_call is not None:
            await self.before_call(call)

    def _record(self, call: Call) -> None:
        match call.name:
            case "ResumeFromCheckpoint":
                begin = pb.ResumeFromCheckpointRequest.FromString(call.request).steps
                self.resumed_from.append(begin)
                del self.steps[begin:]
            case "AckTrainBatch":
                ack = pb.AckTrainBatchRequest.FromString(call.request)
                assert ack.step == len(self.steps), "steps are made in their order"
                self.steps.append(tuple(ack.sample_ids))
                self.acknowledged.append((ack.step, tuple(ack.sample_ids)))
            case "CommitCheckpoint":
                if pb.CommitCheckpointRequest.FromString(call.request).steps == self.experiment.spec.trainer.steps:
                    self._finished.set()
            case "CommitSync":
                answer = weight_sync_pb.CommitSyncResponse.FromString(call.response or b"")
                self.version = answer.committed_version  # an older one, if Redis has lost the newest steps

    def final_weights(self) -> bytes:
        """Return the model's files of the last checkpoint, one after the other."""
        path = find_latest_checkpoint(self.folder / "checkpoints")
        assert path is not None
        assert path.name == f"global_step_{self.experiment.spec.trainer.steps}"
        return b"".join(file.read_bytes() for file in sorted(path.glob("model*.safetensors")))


@asynccontextmanager
async def running_world(
    folder: Path, redis_url: str, experiment: Experiment, environment: Mapping[str, str] | None = None
) -> AsyncIterator[World]:
    """Run a pool, weight sync with one replica, and rollouts that never end. The test starts the trainers.

    `environment` are more variables of the trainers.
    """
    file = _run_folder(folder, experiment)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(running_pool(folder, redis_url, experiment))
        weight_sync = await stack.enter_async_context(
            running_service(
                folder, weight_sync_server.start, experiment, redis_url=redis_url, trajectory_pool=pool.address
            )
        )
        stack.enter_context(_replica(weight_sync.address, experiment))
        world = World(folder, experiment, pool)
        world._environment = {
            **(environment or {}),
            "NEXRL_EXPERIMENT_FILE": str(file),
            "NEXRL_RUN_DIR": str(folder),
            "NEXRL_INSTANCE": "trainer",
            "NEXRL_TRAJECTORY_POOL": await stack.enter_async_context(Relay(pool.address, world.observe).running()),
            "NEXRL_WEIGHT_SYNC": await stack.enter_async_context(Relay(weight_sync.address, world.observe).running()),
        }
        world._producing = asyncio.create_task(world.produce())
        try:
            yield world
        finally:
            world._producing.cancel()
            with suppress(asyncio.CancelledError):
                await world._producing


def _run_folder(folder: Path, experiment: Experiment) -> Path:
    folder.mkdir()
    file = folder / "experiment.yaml"
    file.write_text(dump_resolved(experiment))
    return file


@contextmanager
def _replica(weight_sync: str, experiment: Experiment) -> Iterator[None]:
    model = experiment.spec.model
    specs = tensor_specs(list(iter_weights(build_model(model, model.seed))))
    arguments = (weight_sync, TAG, policy_pb2.Replica(replica_id="replica"), specs, "sound")
    process = _processes.Process(target=replica_process.main, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def rank_pid(trainer: int, rank: int) -> int | None:
    """Return the process of a rank other than 0 of the trainer with this process id; None if it has not begun."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it, or a child, has just ended
        for pid in Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split():
            if f"NEXRL_RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
                return int(pid)
    return None


def trajectory(lease: trajectory_pb2.TaskLease, sample_id: str, version: int) -> trajectory_pb2.Trajectory:
    """Return a trajectory whose tokens and reward depend only on the task and the sample's index in its group."""
    k = int(sample_id.rpartition(".")[2])
    drawn = hashlib.sha256(f"{lease.task.task_id} {k}".encode()).digest()
    return trajectory_pb2.Trajectory(
        token_ids=[4 + drawn[0] % 10, *(4 + byte % 10 for byte in drawn[1:3]), 2],
        loss_mask=[False, True, True, True],
        logprobs=[0.0, -2.0, -2.0, -2.0],
        spans=[trajectory_pb2.PolicySpan(start=1, end=4, policy_version=version)],
        completions=[drawn_span(1, 4)],
        reward=float(k),
    )
