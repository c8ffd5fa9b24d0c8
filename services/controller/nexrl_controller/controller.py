"""One running experiment: its state, what its components do, its errors and its metrics.

Every change of the state goes through `apply`, which saves it in Redis before it answers. A controller that is killed
at any instruction continues from its last answer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from nexrl.spec import Experiment
from nexrl_controller.activity import Activity, Module, Work
from nexrl_controller.changes import Changes
from nexrl_controller.error_log import ErrorLog, ErrorReport, Severity
from nexrl_controller.events import (
    STALLED,
    TRAINING_COMPLETE,
    ComponentAlive,
    ComponentExited,
    ComponentsStopped,
    ErrorReported,
    Event,
    MetricsPosted,
    StallDeadlineExceeded,
    Stalled,
    Started,
    StopRequested,
)
from nexrl_controller.gauges import ERRORS, PHASE, POLICY_VERSION, RESTARTS, TRAINING_STEP
from nexrl_controller.lifecycle import advance
from nexrl_controller.logging_backends import LoggingBackend
from nexrl_controller.state import TERMINAL, Phase, Rules, State, Verdict
from nexrl_controller.state_store import StateStore
from nexrl_controller.wait_graph import find_stall

log = logging.getLogger(__name__)

ROLE = "controller"
WATCH_INTERVAL_SECONDS = 0.2
"""Shortest time between two states that a watcher is sent; it does not get the states in between."""
STOP_SECONDS = 60.0
"""Longest time for components to stop; after it, the experiment ends without them."""
STALL_SECONDS = 60.0
"""Shortest time without a training step that may count as a stall."""
STALL_FACTOR = 3.0
"""A stall also lasts at least this many times the longest step so far."""
MAX_REMEMBERED_REQUESTS = 4096


class Controller:
    """Call `start` before anything else."""

    def __init__(
        self,
        experiment: Experiment,
        store: StateStore,
        backends: Sequence[LoggingBackend],
        now: Callable[[], float],
    ) -> None:
        self.name = experiment.metadata.name
        self.rules = Rules.of(experiment.spec)
        self.health = experiment.spec.monitor.health
        self.activity = Activity(now, self.health.timeout_seconds)
        self.errors = ErrorLog(now)
        self._is_suspended = experiment.spec.suspend
        self._store = store
        self._backends = backends
        self._now = now
        self._state = State(start_unix_seconds=now(), generation=experiment.generation)
        self._lock = asyncio.Lock()
        self._changes = Changes()
        self._is_closed = False
        self._posted: dict[str, None] = {}
        self._progress_unix_seconds = now()
        self._step_unix_seconds = now()
        self._longest_step_seconds = 0.0

    @property
    def state(self) -> State:
        """The experiment as it is now."""
        return self._state

    async def start(self) -> None:
        """Continue from the state that the last controller saved, resume the experiment, or begin a new one."""
        saved, new = await self._store.load(), self._state
        if saved is not None:
            self._state = saved if saved.generation == new.generation else saved.resumed(new)
        await self.apply(Started(self._is_suspended))
        self._show()

    async def apply(self, event: Event) -> State:
        """Advance the state by `event` and return the new state.

        Raises IllegalTransitionError if the event is not allowed now, UnavailableError if Redis cannot be reached. Both
        leave the state unchanged.
        """
        async with self._lock:
            before, after = self._state, advance(self._state, event, self.rules)
            if after == before:
                return after
            await self._store.save(after)
            self._state = after
        if after.phase is not before.phase:
            self._progress_unix_seconds = self._now()
            log.info("%s: %s: %s", after.phase, after.reason, after.message, extra={"was": before.phase})
        self._show()
        return after

    async def watch(self) -> AsyncIterator[State]:
        """Yield the state, then the state after each change, until `end_watches`."""
        while not self._is_closed:
            state = self._state
            yield state
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
            while self._state is state and not self._is_closed:
                await self._changes.wait()

    async def wait_for_phase(self, *phases: Phase) -> None:
        """Wait until the experiment is in one of `phases`."""
        while self._state.phase not in phases:
            await self._changes.wait()

    def end_watches(self) -> None:
        """End all watches, and every later one at once."""
        self._is_closed = True
        self._changes.announce()

    async def close(self) -> None:
        """Close the logging backends, which write what they still hold."""
        for backend in self._backends:
            backend.close()

    async def heartbeat(self, module: Module, work: Sequence[Work]) -> float:
        """Record a heartbeat; returns the seconds until the next one is due."""
        self.activity.heartbeat(module, work)
        if module.name in self._state.restarting:
            await self.apply(ComponentAlive(module.name))
        return self.health.check_interval_seconds

    async def post_metrics(self, request_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics that were measured after `step` optimizer steps. Idempotent by `request_id`."""
        if request_id in self._posted:
            return
        now = self._now()
        shown = {name: value for name, value in metrics.items() if name != TRAINING_COMPLETE}
        if shown:
            for backend in self._backends:
                backend.post(step, now, shown)
        if step > self._state.step > 0:
            self._longest_step_seconds = max(self._longest_step_seconds, now - self._progress_unix_seconds)
        if step > self._state.step:
            self._step_unix_seconds = now
        self._progress_unix_seconds = now
        await self.apply(MetricsPosted(step, metrics))
        self._posted[request_id] = None
        if len(self._posted) > MAX_REMEMBERED_REQUESTS:
            del self._posted[next(iter(self._posted))]

    async def report_error(self, report: ErrorReport) -> str:
        """Record an error, and end the experiment if its policy says so. Returns the error's id."""
        ERRORS.labels(report.severity.name).inc()
        error_id = self.errors.record(report)
        await self.apply(ErrorReported(report.severity, report.module, report.message))
        return error_id

    async def report_own_error(self, error_id: str, work_context: str, severity: Severity, message: str) -> None:
        """Record an error that the controller itself has found."""
        log.warning("%s: %s", work_context, message)
        await self.report_error(ErrorReport(error_id, ROLE, work_context, severity, message))

    async def report_exit(self, event: ComponentExited) -> Verdict:
        """Record a component's exit; returns whether to restart it. A repeated request gets the first answer."""
        had_outcome = self._state.outcome is not None
        after = await self.apply(event)
        self.activity.mark_dead(event.component)
        verdict = after.exits[event.component].verdict
        if verdict.restart:
            RESTARTS.labels(event.component).inc()
            await self.report_own_error(event.request_id, "restart", Severity.WARNING, after.message)
        elif after.outcome is not None and not had_outcome:
            await self.report_own_error(event.request_id, "exit", Severity.CRITICAL, after.message)
        await self._end_if_stopped()
        return verdict

    async def stop(self, why: str) -> None:
        """End the experiment, unless it is ending already."""
        await self.apply(StopRequested(why))

    async def check_health(self) -> None:
        """Report each module that fell silent and each stall, once."""
        silent = self.activity.mark_silent_dead()
        if self._state.outcome is not None:
            await self._end_if_stopped()
            return
        for name in silent if self.health.enabled else ():
            message = f"{name} has been silent for more than {self.health.timeout_seconds:g} s"
            await self.report_own_error(f"silent-{name}-{self._now():.3f}", "heartbeat", Severity.ERROR, message)
        await self._check_stall()

    async def run_health_checks(self) -> None:
        """Check the health at the interval that the experiment sets, until the task is cancelled."""
        while True:
            await asyncio.sleep(self.health.check_interval_seconds)
            await self.check_health()

    async def bound_stop(self) -> None:
        """End the experiment if its components take longer than STOP_SECONDS to stop."""
        await self.wait_for_phase(Phase.STOPPING, *TERMINAL)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.wait_for_phase(*TERMINAL)
        except TimeoutError:
            log.warning("components are still running after %g s:\n%s", STOP_SECONDS, self.activity.summary())
            await self.apply(ComponentsStopped())

    async def _end_if_stopped(self) -> None:
        is_any_alive = any(module.is_alive and module.role != ROLE for module in self.activity.modules)
        if self._state.phase is Phase.STOPPING and not is_any_alive:
            await self.apply(ComponentsStopped())

    async def _check_stall(self) -> None:
        deadline_seconds = self.health.stall_deadline_seconds
        if self._now() - self._step_unix_seconds >= deadline_seconds:
            blocked = (
                find_stall(self.activity.modules, self._step_unix_seconds) or f"last message: {self._state.message}"
            )
            limit = f"{deadline_seconds:g} s, which is monitor.health.stallDeadlineSeconds"
            await self.apply(StallDeadlineExceeded(f"no new step for {limit}; {blocked}"))
            return
        idle_seconds = self._now() - self._progress_unix_seconds
        limit_seconds = max(STALL_SECONDS, STALL_FACTOR * self._longest_step_seconds)
        # Before the first version is served, all components wait for models to load, which may take any time.
        if idle_seconds < limit_seconds or self._state.reason == STALLED or not self._state.has_version:
            return
        stall = find_stall(self.activity.modules, self._progress_unix_seconds)
        if stall is None:
            return
        message = f"no step for {idle_seconds:.0f} s; {stall}"
        if (await self.apply(Stalled(message))).reason == STALLED:
            await self.report_own_error(f"stalled-{self._now():.3f}", "stall", Severity.WARNING, message)

    def _show(self) -> None:
        PHASE.state(self._state.phase)
        TRAINING_STEP.set(self._state.step)
        POLICY_VERSION.set(self._state.policy_version)
        self._changes.announce()
