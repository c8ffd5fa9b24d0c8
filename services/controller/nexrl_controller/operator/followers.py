"""The gRPC side of the operator: what each experiment's controller says, and what it is told."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc

from nexrl.rpc.client import call, new_request_id
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl_controller.operator.observed import Exit, Seen
from nexrl_controller.operator.work_queue import Key

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
AUDIT_SECONDS = 60.0
WATCH_SECONDS = 300.0
RETRY_SECONDS = 1.0
AGAIN_SECONDS = 10.0
IN_FLIGHT = ("open", "leased", "grouping", "ready", "batched")


class Connect(Protocol):
    """Opens a channel to a component of an experiment."""

    def __call__(self, key: Key, component: str) -> grpc.aio.Channel: ...


class Followers:
    """One watch for each experiment whose controller is up."""

    def __init__(self, connect: Connect, on_change: Callable[[Key], None], on_progress: Callable[[Key], None]) -> None:
        """`on_change` hears of what is news at once, `on_progress` of each step."""
        self._connect = connect
        self._on_change = on_change
        self._on_progress = on_progress
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._channels: dict[Key, grpc.aio.Channel] = {}
        self._seen: dict[Key, Seen] = {}
        self._told: dict[Key, dict[str, str]] = {}
        """By component, the newest end that its controller has heard of."""

    def seen(self, key: Key) -> Seen | None:
        """What its controller said last; None before it has said anything."""
        return self._seen.get(key)

    def follow(self, key: Key) -> None:
        """Follow the controller of an experiment, from now on."""
        if key not in self._tasks:
            self._channels[key] = self._connect(key, "controller")
            self._tasks[key] = asyncio.create_task(self._follow(key, self._channels[key]))

    async def drop(self, key: Key) -> None:
        """It has no controller any more."""
        if task := self._tasks.pop(key, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._channels.pop(key).close()
        self._seen.pop(key, None)
        self._told.pop(key, None)

    async def close(self) -> None:
        """Drop all."""
        for key in list(self._tasks):
            await self.drop(key)

    async def tell_exit(self, key: Key, exit: Exit) -> None:
        """Tell of an end, once."""
        told = self._told.setdefault(key, {})
        if told.get(exit.component) != exit.request_id:
            await self.verdict(key, exit)
            told[exit.component] = exit.request_id

    async def verdict(self, key: Key, exit: Exit) -> pb.ReportExitResponse:
        """Tell of an end; a repeated one gets the first answer. Raises NexrlError."""
        request = pb.ReportExitRequest(
            request_id=exit.request_id, component=exit.component, exit_code=exit.exit_code, log_tail=exit.log_tail
        )
        stub = ControllerServiceStub(self._channels[key])
        return await call(stub.ReportExit, request, timeout_seconds=CALL_SECONDS)

    async def tell_stopped(self, key: Key, living: Collection[str]) -> None:
        """Tell of all modules that are none of the `living` that they have ended. Raises NexrlError."""
        stub = ActivityServiceStub(self._channels[key])
        answer = await call(stub.GetActivity, activity_pb.GetActivityRequest(), timeout_seconds=CALL_SECONDS)
        for module in answer.modules:
            if module.alive and module.role != "controller" and module.name not in living:
                await self.verdict(key, Exit(new_request_id(), module.name, 0, ""))

    async def stop(self, key: Key, reason: str) -> None:
        """Ask for the end of the experiment. Raises NexrlError."""
        request = pb.StopExperimentRequest(request_id=new_request_id(), reason=reason)
        stub = ControllerServiceStub(self._channels[key])
        await call(stub.StopExperiment, request, timeout_seconds=CALL_SECONDS)

    def is_following(self, key: Key) -> bool:
        """Whether its controller is followed."""
        return key in self._tasks

    async def audit(self, key: Key) -> Mapping[str, int]:
        """Have the ledger counted. Raises NexrlError."""
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

    def _note(self, key: Key, seen: Seen) -> None:
        is_news = _news(seen) != _news(self._seen.get(key))
        self._seen[key] = seen
        if is_news:
            self._on_change(key)
        else:
            self._on_progress(key)

    async def _follow(self, key: Key, channel: grpc.aio.Channel) -> None:
        stub = ControllerServiceStub(channel)
        while True:
            await channel.channel_ready()  # where nobody listens, gRPC tries again at its own pace
            try:
                async for message in stub.WatchExperiment(pb.WatchExperimentRequest(), timeout=WATCH_SECONDS):
                    self._note(key, seen_of(message.experiment))
            except grpc.aio.AioRpcError as error:
                log.info("%s/%s: its controller: %s", *key, error.details())
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # one of another version may say what this one cannot read
                log.exception("%s/%s: its controller", *key)
                await asyncio.sleep(AGAIN_SECONDS)


def _news(seen: Seen | None) -> Seen | None:
    """What of it is worth telling at once."""
    return seen and replace(seen, step=0, policy_version=0, metrics={})


def seen_of(experiment: pb.Experiment) -> Seen:
    """A message as a plain object."""
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
    )


@asynccontextmanager
async def _closing(channel: grpc.aio.Channel) -> Any:
    try:
        yield channel
    finally:
        await channel.close()
