"""`nexrl run`: starts the processes of an experiment on one machine, restarts those that die, and stops them.

The controller decides about phases, errors and restarts. The launcher carries out its decisions, as the kubelet does
on a cluster. It keeps no state that matters: if it is killed, its children end with it, and the run can be resumed.
"""

import asyncio
import contextlib
import logging
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from nexrl.components import component_of, stop_waves
from nexrl.errors import AlreadyExistsError, NexrlError, TrainingFailedError, UnavailableError
from nexrl.kept_log import rotate
from nexrl.local.child import Child, run_together
from nexrl.local.components import Addresses, choose_addresses, commands, require_free
from nexrl.local.ownership import owned
from nexrl.local.report import Ending, write_report
from nexrl.local.restart_budget import RestartBudget
from nexrl.local.run_folder import RunFolder, checkpoints_of, endpoint
from nexrl.local.view import RunView, phase_name
from nexrl.mirror import Mirror
from nexrl.results import stored_steps
from nexrl.rpc.client import call, connect, is_passing, new_request_id, watch
from nexrl.run_layout import CHECKPOINT_PREFIX, CHECKPOINTS_FOLDER, ENDPOINTS_FILE
from nexrl.spec import Experiment, load_experiment
from nexrl.spec.trainer import ResumeFromPath, ResumeSpec
from nexrl.storage import RunStorage, run_id
from nexrl.store import connect_redis, key_prefix
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

log = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""Grace period of a process; longer than the services' own limits (settings.stop_seconds, drain_seconds)."""
CALL_SECONDS = 30.0
FIRST_CONTACT_SECONDS = 60.0
POOL_SECONDS = 1.0
ROTATE_SECONDS = 1.0
REDIS_SECONDS = 20.0
STORAGE_SECONDS, STORAGE_REQUEST_SECONDS = 60.0, 20
"""Longest time for the last copy to object storage, and for each of its requests: a thread cannot be cancelled."""
CORE = ("controller", "redis")
"""The launcher itself decides about their restarts: the controller cannot judge itself, nor the Redis that it needs."""
COMPONENT_WAVES = tuple(tuple(wave) for wave in stop_waves() if wave != ["controller"])
CORE_WAVES = tuple((name,) for name in CORE)
"""Stopped after the components, in this order."""
INTERRUPTED_EXIT = 130

Goal = Callable[[grpc.aio.Channel, grpc.aio.Channel, RunView], Coroutine[Any, Any, None]]
"""Called with channels to the controller and to the pools. The run ends when it returns."""

TERMINAL = {pb.PHASE_SUCCEEDED, pb.PHASE_FAILED, pb.PHASE_SUSPENDED}


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line that are not part of the experiment."""

    root: Path = Path("runs")
    port: int = 0
    """Port of the controller; 0 takes a free one."""


def run_experiment(path: Path, overrides: Sequence[str], options: RunOptions) -> int:
    """Run the experiment at `path` to its end and print its report; returns the exit code.

    Raises SpecError and other NexrlErrors if it cannot start, TrainingFailedError if it fails.
    """
    experiment = load_experiment(path, overrides)
    return asyncio.run(_run(experiment, options, resume_command(path, overrides, options, experiment.spec.resume)))


def resume_command(path: Path, overrides: Sequence[str], options: RunOptions, resume: ResumeSpec) -> str:
    """Return the command that resumes a run which was started with these arguments, from the start `resume`."""
    kept = [override for override in overrides if not override.startswith(("resume.", "resume="))]
    # The file may have resume.path, which mode auto does not allow.
    auto = "resume={mode: auto}" if isinstance(resume, ResumeFromPath) else "resume.mode=auto"
    root = [] if options.root == RunOptions.root else ["--root", str(options.root)]
    return shlex.join(["nexrl", "run", str(path), *kept, auto, *root])


async def _run(experiment: Experiment, options: RunOptions, to_resume: str) -> int:
    async with claimed_folder(experiment, options) as folder:
        began = time.monotonic()
        launcher, ended = await launch(folder, experiment, options.port)
        ending = _ending(ended, launcher.dropped)
        write_report(folder, experiment, launcher.children, time.monotonic() - began, ending)
        (folder.path / ENDPOINTS_FILE).unlink()  # a launcher that is killed leaves the file, which tells the two apart
        await copy_to_storage(folder, experiment)
    steps = checkpoints_of(folder.path, experiment)
    resume = f"resume from step {max(steps)} with: {to_resume}" if steps else ""
    if ended is None:
        sys.stdout.write(f"stopped; {resume or 'there is no checkpoint to resume from'}\n")
    elif ended.phase == pb.PHASE_FAILED:
        todo = f"Correct the cause, then {resume or 'run it again: there is no checkpoint to resume from'}"
        raise TrainingFailedError(f"{ending.message}\nThe logs are in {folder.logs}\n{todo}")
    return ending.exit_code


@contextlib.asynccontextmanager
async def claimed_folder(experiment: Experiment, options: RunOptions) -> AsyncIterator[RunFolder]:
    """Open the folder of a new run, and own its name and its keys in Redis during the block.

    Raises NexrlErrors if the experiment cannot start here.
    """
    require_free(options.port)
    _refuse_checkpoints_of_others(experiment)
    if (storage := RunStorage.of(experiment)) is not None:
        await asyncio.to_thread(storage.refuse_another_run, experiment)
    given_redis = experiment.spec.redis.url
    # Own the name first: a run that cannot start must not move the folder and the ledger of an earlier run aside.
    async with owned(given_redis, experiment.metadata.name) if given_redis else contextlib.nullcontext():
        folder = RunFolder(options.root, experiment)
        if given_redis:
            await _prepare_redis(given_redis, experiment)
        if folder.put_aside is not None:
            sys.stdout.write(f"an earlier run of this name was moved to {folder.put_aside}\n")
        yield folder


async def launch(
    folder: RunFolder, experiment: Experiment, port: int, goal: Goal | None = None
) -> tuple["Launcher", pb.Experiment | None]:
    """Run all processes to the end of the experiment, or of `goal`; also returns what `Launcher.run` returns."""
    addresses, redis_socket = choose_addresses(experiment, port)
    if addresses.gateways:
        gateways = f"{addresses.endpoints()['gateway']} (gRPC), {addresses.endpoints()['gateway_http']}/sessions"
        sys.stdout.write(f"agents open sessions at {gateways}; also in {folder.path / ENDPOINTS_FILE}\n")
    launcher = Launcher(experiment, folder, addresses, redis_socket, goal)
    try:
        return launcher, await launcher.run()
    finally:
        if redis_socket is not None:
            shutil.rmtree(redis_socket.parent, ignore_errors=True)


def _ending(ended: pb.Experiment | None, dropped: Mapping[str, int]) -> Ending:
    if ended is None:
        return Ending("Interrupted", "Signal", "Ctrl-C or SIGTERM", INTERRUPTED_EXIT, dropped)
    exit_code = TrainingFailedError.exit_code if ended.phase == pb.PHASE_FAILED else 0
    return Ending(phase_name(ended), ended.reason, ended.message, exit_code, dropped)


async def copy_to_storage(folder: RunFolder, experiment: Experiment) -> None:
    """Copy to object storage what was written after the trainer has ended: the report, and the ends of all logs."""
    if (storage := RunStorage.of(experiment, STORAGE_REQUEST_SECONDS)) is None:
        return
    mirror = Mirror(storage, folder.path, folder.experiment_file)
    try:
        await asyncio.to_thread(storage.claim, experiment, run_id(folder.path))
        await asyncio.to_thread(mirror.copy_changes, STORAGE_SECONDS)
        steps = stored_steps(storage.names(CHECKPOINTS_FOLDER))
        held = f"checkpoint of step {max(steps)}" if steps else "no checkpoint"
        sys.stdout.write(f"copy of the results, with {held}: {storage.address}\n")
    except (NexrlError, OSError) as error:
        sys.stdout.write(f"warning: the report and the newest logs are only in {folder.path}: {error}\n")


def _refuse_checkpoints_of_others(experiment: Experiment) -> None:
    """Refuse a checkpoint folder with checkpoints of another run: a restarted trainer resumes from its folder."""
    path = experiment.spec.checkpoint.path
    if path and experiment.spec.resume.mode != "auto" and any(Path(path).glob(f"{CHECKPOINT_PREFIX}*")):
        raise AlreadyExistsError(
            f"checkpoint.path: {path} contains checkpoints of an earlier run; choose another folder, or set "
            "resume.mode to auto"
        )


async def _prepare_redis(url: str, experiment: Experiment) -> None:
    """Delete the keys of an earlier run of this name; a resumed run keeps its ledger. Raises UnavailableError."""
    name = experiment.metadata.name
    parts = ["controller"] if experiment.spec.resume.mode == "auto" else ["controller", experiment.spec.model.tag]
    async with contextlib.aclosing(await connect_redis(url)) as connection:
        for part in parts:
            async for key in connection.scan_iter(match=key_prefix(name, part) + "*", count=1000):
                await connection.unlink(key)


class Launcher:
    """The child processes of one run, and the live view of them."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        addresses: Addresses,
        redis_socket: Path | None,
        goal: Goal | None = None,
    ) -> None:
        self.experiment = experiment
        self.children = [Child(c, folder.logs) for c in commands(experiment, folder, addresses, redis_socket)]
        self._folder = folder
        self._addresses = addresses
        self._redis_socket = redis_socket
        self._goal = goal
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        """Set when the controller has reported the end, or the launcher no longer waits for it: CORE may stop."""
        self._interrupted = asyncio.Event()
        policy, health = experiment.spec.failure_policy, experiment.spec.monitor.health
        self._budgets = {name: RestartBudget(name, policy, health.stall_deadline_seconds) for name in CORE}
        self._step = 0
        """The newest training step that the controller has reported."""
        self.dropped: Mapping[str, int] = {}
        """Samples that were dropped, by reason; known once `run` has ended."""
        self._failure: asyncio.Future[pb.Experiment] = asyncio.get_running_loop().create_future()

    async def run(self) -> pb.Experiment | None:
        """Start all processes, follow the controller to the end, stop all processes.

        Returns None after Ctrl-C or SIGTERM, and when the goal is reached. Raises what the goal raises.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted.set)
        self._folder.write_json(ENDPOINTS_FILE, self._addresses.endpoints())
        async with connect(self._addresses.controller) as controller, connect(self._addresses.trajectory_pool) as pool:
            supervisors: list[asyncio.Task[None]] = []
            try:
                for gang in _gangs(self.children):
                    supervisors.append(asyncio.create_task(self._supervise(gang, controller)))
                    await self._until_redis_answers(gang[0])
                return await self._follow(controller, pool)
            finally:
                self._stopping.set()
                self._ended.set()
                await self._stop(*COMPONENT_WAVES, *CORE_WAVES)
                for task in supervisors:
                    task.cancel()
                await asyncio.gather(*supervisors, return_exceptions=True)

    async def _follow(self, controller: grpc.aio.Channel, pool: grpc.aio.Channel) -> pb.Experiment | None:
        with RunView(self.experiment, self.children) as view:
            ending = asyncio.create_task(self._until_ended(controller, view))
            beside: list[asyncio.Future[Any]] = [
                asyncio.create_task(_show_details(pool, controller, view)),
                asyncio.create_task(_rotate_logs(self.children)),
            ]
            interrupted = asyncio.create_task(self._interrupted.wait())
            goal = [asyncio.create_task(self._goal(controller, pool, view))] if self._goal else []
            tasks: list[asyncio.Future[Any]] = [ending, interrupted, self._failure, *goal]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if interrupted.done():
                    checkpoint = "" if self._goal else "the trainer writes a checkpoint, then "
                    view.say(f"stopping: {checkpoint}every process ends")
                if self._failure.done():
                    return self._failure.result()
                for reached in filter(asyncio.Task.done, goal):
                    reached.result()
                return await ending if ending.done() else None
            finally:
                self.dropped = view.dropped
                beside += [ending, interrupted, *goal]
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)

    async def _until_ended(self, controller: grpc.aio.Channel, view: RunView) -> pb.Experiment:
        """Follow the controller to a terminal phase. In phase Stopping, stop the components, for which it waits."""
        stub = ControllerServiceStub(controller)
        async for message in watch(stub.WatchExperiment, pb.WatchExperimentRequest()):
            view.show(message.experiment)
            self._step = max(self._step, message.experiment.progress.step)
            if message.experiment.phase in TERMINAL:
                return message.experiment
            if message.experiment.phase == pb.PHASE_STOPPING and not self._stopping.is_set():
                self._stopping.set()
                await self._stop(*COMPONENT_WAVES)
        raise AssertionError("a watch never ends")

    async def _until_redis_answers(self, child: Child) -> None:
        if child.name != "redis":
            return
        deadline = time.monotonic() + REDIS_SECONDS
        while True:
            try:
                return await _prepare_redis(self._addresses.redis_url, self.experiment)
            except UnavailableError:
                if time.monotonic() > deadline or self._failure.done():
                    raise
                await asyncio.sleep(0.02)

    async def _supervise(self, gang: Sequence[Child], controller: grpc.aio.Channel) -> None:
        stopping = self._ended if gang[0].name in CORE else self._stopping
        while not stopping.is_set():  # it may be set during the pause before a restart
            child, code = await run_together(gang)
            if self._interrupted.is_set() or self._ended.is_set():
                return  # do not report: the experiment is interrupted, or its controller has ended
            delay_seconds = await self._verdict(gang[0].name, child, code, controller)
            if delay_seconds is None:
                return
            await asyncio.sleep(delay_seconds)

    async def _verdict(self, name: str, child: Child, code: int, controller: grpc.aio.Channel) -> float | None:
        """Seconds until the gang `name`, which ended because of `child`, restarts; None if it does not."""
        if name in CORE:
            budget = self._budgets[name]
            delay_seconds = budget.pause_seconds(code, self._step, time.monotonic())
            if delay_seconds is None:
                told = f"{child.name} ended with code {code} after {budget.restarts} restarts without a new step"
                self._fail("RestartsExhausted", f"{told}: {child.last_words()}")
            return delay_seconds
        request = pb.ReportExitRequest(
            request_id=new_request_id(), component=name, exit_code=code, log_tail=child.last_words()
        )
        deadline = time.monotonic() + self.experiment.spec.monitor.health.stall_deadline_seconds
        while True:
            try:
                answer = await call(ControllerServiceStub(controller).ReportExit, request, timeout_seconds=CALL_SECONDS)
                return answer.delay_seconds if answer.restart else None
            except NexrlError as error:
                if is_passing(error) and time.monotonic() < deadline:
                    continue  # the controller restarts, or has used up its restarts, which ends the run
                told = f"{child.name} ended with code {code}, and the controller cannot be reached: {error}"
                self._fail("ControllerLost", told)
                return None

    def _fail(self, reason: str, message: str) -> None:
        if not self._failure.done():
            self._failure.set_result(pb.Experiment(phase=pb.PHASE_FAILED, reason=reason, message=message))

    async def _stop(self, *waves: tuple[str, ...]) -> None:
        for wave in waves:
            children = [child for child in self.children if child.name.startswith(wave)]
            await asyncio.gather(*(child.stop(STOP_SECONDS) for child in children))


def _gangs(children: Sequence[Child]) -> list[list[Child]]:
    """Return the processes that end and restart together: all replicas of the trainer, and each other process alone."""
    trainer, gangs = [child for child in children if component_of(child.name) == "trainer"], []
    for child in children:
        if child not in trainer:
            gangs.append([child])
        elif child is trainer[0]:
            gangs.append(trainer)
    return gangs


async def _rotate_logs(children: Sequence[Child]) -> None:
    while True:
        for child in children:
            with contextlib.suppress(OSError):  # a full disk must not end the run
                rotate(child.log)
        await asyncio.sleep(ROTATE_SECONDS)


async def _show_details(pool: grpc.aio.Channel, controller: grpc.aio.Channel, view: RunView) -> None:
    pools, activity = TrajectoryPoolServiceStub(pool), ActivityServiceStub(controller)
    while True:
        with contextlib.suppress(NexrlError):
            request = pool_pb.GetTrajectoryPoolStateRequest()
            depth = await call(pools.GetTrajectoryPoolState, request, timeout_seconds=FIRST_CONTACT_SECONDS)
            seen = await call(activity.GetActivity, activity_pb.GetActivityRequest(), timeout_seconds=CALL_SECONDS)
            view.show_details(depth.pools[0], seen)
        await asyncio.sleep(POOL_SECONDS)


def controller_address(run: Path) -> str:
    """Address of the controller of the run in folder `run`."""
    return endpoint(run, "controller")
