"""gRPC clients of the experiments: their controllers, which are watched, and their trajectory pools."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import grpc

from nexrl.rpc.client import call, new_request_id
from nexrl.sample_states import IN_FLIGHT
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl_operator.observed import Exit, Seen
from nexrl_operator.work_queue import Key

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
AUDIT_SECONDS = 60.0
WATCH_SECONDS = 300.0
RETRY_SECONDS = 1.0
UNREADABLE_SECONDS = 10.0
"""Time until a controller whose message could not be read is watched again."""


class Connect(Protocol):
    """Opens a channel to a component of an experiment."""

    def __call__(self, key: Key, component: str) -> grpc.aio.Channel: ...


@dataclass
class _Connection:
    """The connection to one experiment's controller."""

    channel: grpc.aio.Channel
    watching: asyncio.Task[None] | None = None
    seen: Seen | None = None
    reported: dict[str, str] = field(default_factory=dict)
    """The newest exit that the controller knows of, by component."""


class ExperimentClients:
    """Watches the controller of each experiment and calls its services."""

    def __init__(self, connect: Connect, on_change: Callable[[Key], None], on_progress: Callable[[Key], None]) -> None:
        """Calls `on_progress` when only step and metrics have changed, `on_change` for every other change."""
        self._connect = connect
        self._on_change = on_change
        self._on_progress = on_progress
        self._connections: dict[Key, _Connection] = {}

    def seen(self, key: Key) -> Seen | None:
        """Return the last message of the controller; None before the first."""
        connection = self._connections.get(key)
        return connection.seen if connection else None

    def is_following(self, key: Key) -> bool:
        """Return whether the controller of this experiment is being watched."""
        return key in self._connections

    def follow(self, key: Key) -> None:
        """Start watching the controller of an experiment, unless it is being watched."""
        if key not in self._connections:
            connection = self._connections[key] = _Connection(self._connect(key, "controller"))
            connection.watching = asyncio.create_task(self._watch(key, connection))

    async def drop(self, key: Key) -> None:
        """Stop watching the controller of an experiment, and forget what it has said."""
        connection = self._connections.pop(key, None)
        if connection is not None:
            assert connection.watching is not None
            connection.watching.cancel()
            await asyncio.gather(connection.watching, return_exceptions=True)
            await connection.channel.close()

    async def close(self) -> None:
        """Drop all experiments."""
        for key in list(self._connections):
            await self.drop(key)

    async def report_exit_once(self, key: Key, exit: Exit) -> None:
        """Report an exit unless the controller knows of it. Raises NexrlError."""
        reported = self._connections[key].reported
        if reported.get(exit.component) != exit.request_id:
            await self.report_exit(key, exit)
            reported[exit.component] = exit.request_id

    async def report_exit(self, key: Key, exit: Exit) -> pb.ReportExitResponse:
        """Report an exit and return whether to restart. A repeated report gets the first answer. Raises NexrlError."""
        request = pb.ReportExitRequest(
            request_id=exit.request_id, component=exit.component, exit_code=exit.exit_code, log_tail=exit.log_tail
        )
        stub = ControllerServiceStub(self._connections[key].channel)
        return await call(stub.ReportExit, request, timeout_seconds=CALL_SECONDS)

    async def report_stopped(self, key: Key, living: Collection[str]) -> None:
        """Report the exit of every module that is not among the `living`. Raises NexrlError."""
        stub = ActivityServiceStub(self._connections[key].channel)
        answer = await call(stub.GetActivity, activity_pb.GetActivityRequest(), timeout_seconds=CALL_SECONDS)
        for module in answer.modules:
            if module.alive and module.role != "controller" and module.name not in living:
                await self.report_exit(key, Exit(new_request_id(), module.name, 0, ""))

    async def stop(self, key: Key, reason: str) -> None:
        """Ask the controller to end the experiment. Raises NexrlError."""
        request = pb.StopExperimentRequest(request_id=new_request_id(), reason=reason)
        stub = ControllerServiceStub(self._connections[key].channel)
        await call(stub.StopExperiment, request, timeout_seconds=CALL_SECONDS)

    async def audit(self, key: Key) -> Mapping[str, int]:
        """Have the trajectory pool audit the ledger. Raises NexrlError."""
        async with _closing(self._connect(key, "trajectory-pool")) as channel:
            stub = TrajectoryPoolServiceStub(channel)
            answer = await call(stub.AuditLedger, pool_pb.AuditLedgerRequest(), timeout_seconds=AUDIT_SECONDS)
        audits = answer.audits
        return {
            "granted": sum(audit.samples["granted"] for audit in audits),
            "trained": sum(audit.samples["trained"] for audit in audits),
            "dropped": sum(sum(audit.dropped.values()) for audit in audits),
            "inFlight": sum(audit.samples[state] for audit in audits for state in IN_FLIGHT),
            "findings": sum(audit.findings_total for audit in audits),
        }

    async def _watch(self, key: Key, connection: _Connection) -> None:
        stub = ControllerServiceStub(connection.channel)
        while True:
            await connection.channel.channel_ready()  # while no process listens, gRPC retries with its own backoff
            try:
                async for message in stub.WatchExperiment(pb.WatchExperimentRequest(), timeout=WATCH_SECONDS):
                    self._note(key, connection, seen_of(message.experiment))
            except grpc.aio.AioRpcError as error:
                log.info("%s/%s: its controller: %s", *key, error.details())
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # a controller of another version may send what this operator cannot read
                log.exception("%s/%s: its controller", *key)
                await asyncio.sleep(UNREADABLE_SECONDS)

    def _note(self, key: Key, connection: _Connection, seen: Seen) -> None:
        is_news = _without_progress(seen) != _without_progress(connection.seen)
        connection.seen = seen
        if is_news:
            self._on_change(key)
        else:
            self._on_progress(key)


def _without_progress(seen: Seen | None) -> Seen | None:
    """Return the part of a message whose change must reach the status at once."""
    is_failing = "yes" if seen and seen.failing_samples else ""
    return seen and replace(seen, step=0, policy_version=0, metrics={}, failing_samples=is_failing)


def seen_of(experiment: pb.Experiment) -> Seen:
    """Return the message of a controller as a plain object."""
    progress = experiment.progress
    return Seen(
        phase=pb.Phase.Name(experiment.phase).removeprefix("PHASE_").capitalize(),
        reason=experiment.reason,
        message=experiment.message,
        step=progress.step,
        total_steps=progress.total_steps,
        policy_version=progress.policy_version,
        metrics=dict(progress.metrics),
        restarts=experiment.restarts,
        failing_samples=experiment.failing_samples,
    )


@asynccontextmanager
async def _closing(channel: grpc.aio.Channel) -> Any:
    try:
        yield channel
    finally:
        await channel.close()
