"""Shows a running run: as a live table in a terminal, else as lines."""

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from nexrl.local.child import Child
from nexrl.spec import Experiment
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb

LINES_OF_A_RUN = 30
STALLED = "Stalled"
"""Reason of the controller when no step is made for long."""
SHOWN = {
    "reward_mean": "reward",
    "val/exact": "held-out exact",
    "val/reward": "held-out reward",
    "entropy": "entropy",
    "zero_variance_group_fraction": "degenerate groups",
    "staleness_steps": "staleness",
    "grad_norm": "grad norm",
}


def phase_name(experiment: pb.Experiment) -> str:
    """Return the phase of the experiment, for example 'Running'."""
    return pb.Phase.Name(experiment.phase).removeprefix("PHASE_").capitalize()


def phase_text(experiment: pb.Experiment) -> str:
    """Return the phase and its reason. A run that makes steps has no reason worth showing."""
    is_well = experiment.phase == pb.PHASE_RUNNING and experiment.reason != STALLED
    return phase_name(experiment) + (f": {experiment.message}" if experiment.message and not is_well else "")


def _news(experiment: pb.Experiment) -> tuple[object, ...]:
    """Return that whose change is worth a line."""
    return experiment.phase, experiment.reason, bool(experiment.failing_samples)


class RunView:
    """Shows phase, step, rates, samples in the pool, policy version, staleness and errors."""

    def __init__(self, experiment: Experiment, children: Sequence[Child]) -> None:
        self._name = experiment.metadata.name
        self._batch_size = experiment.spec.trajectory_pool.batch_size
        self._children = children
        self._console = Console(file=sys.stdout, markup=False, emoji=False)  # messages may contain [brackets]
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._pool = pool_pb.PoolState()
        self._activity = activity_pb.GetActivityResponse()
        self._last = pb.Experiment()
        self._first_step: tuple[float, int] | None = None
        self._step_unix_seconds = 0.0
        self._said = ""
        self._printed_step = -1

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.start()
        self._console.print(f"{self._name}: starting {len(self._children)} processes", highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, experiment: pb.Experiment) -> None:
        """Show a new state of the experiment."""
        step = experiment.progress.step
        if self._first_step is None and step > 0:
            self._first_step = (time.monotonic(), step)
        if step > self._last.progress.step:
            self._step_unix_seconds = time.time()
        is_news = _news(experiment) != _news(self._last)
        self._last = experiment
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif is_news or step - self._printed_step >= max(1, experiment.progress.total_steps // LINES_OF_A_RUN):
            self._printed_step = step
            self._console.print(self._line(), highlight=False, markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Show `line` at once, instead of the phase."""
        self._said = line
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show_details(self, pool: pool_pb.PoolState, activity: activity_pb.GetActivityResponse) -> None:
        """Show a new state of the pool, and recent errors."""
        self._pool, self._activity = pool, activity
        if self._live:
            self._live.update(self._table(), refresh=True)

    @property
    def is_live(self) -> bool:
        """True in a terminal, where what is said replaces what was said before."""
        return self._live is not None

    @property
    def dropped(self) -> Mapping[str, int]:
        """The samples dropped so far, by reason, as the pool was seen last."""
        return dict(self._pool.dropped)

    def _samples_per_second(self) -> float:
        if self._first_step is None:
            return 0.0
        seconds = time.monotonic() - self._first_step[0]
        return (self._last.progress.step - self._first_step[1]) * self._batch_size / seconds if seconds > 0 else 0.0

    def _facts(self) -> dict[str, str]:
        progress = self._last.progress
        facts = {
            "step": f"{progress.step}/{progress.total_steps}",
            "policy version": str(progress.policy_version),
            "samples/s": f"{self._samples_per_second():.0f}",
        }
        if "reward_mean" not in progress.metrics and "loss" in progress.metrics:  # a policy loss says little
            facts["loss"] = f"{progress.metrics['loss']:.3f}"
        for name, title in SHOWN.items():
            if name in progress.metrics:
                facts[title] = f"{progress.metrics[name]:.3f}"
        pool = self._pool
        facts["pool"] = f"{pool.leased} leased, {pool.grouping} grouping, {pool.ready} ready, {pool.batched} in batches"
        if pool.dropped:
            facts["dropped"] = ", ".join(f"{count} {reason}" for reason, count in pool.dropped.items())
        if self._last.failing_samples and self._last.phase != pb.PHASE_FAILED:
            facts["samples fail"] = self._last.failing_samples
        # The error that made the run fail is printed once, at its end.
        if self._activity.recent_error_count and self._last.phase != pb.PHASE_FAILED:
            newest = self._activity.errors[0]
            # A step was made after the error, so the error has not stopped the run.
            is_passed = newest.unix_seconds < self._step_unix_seconds
            told = "see `nexrl status`" if is_passed else f"newest from {newest.module}: {newest.message}"
            facts["errors"] = f"{self._activity.recent_error_count} in 5 minutes, {told}"
        if self._last.restarts:
            facts["restarts"] = str(self._last.restarts)
        return facts

    def _table(self) -> Table:
        table = Table(title=f"{self._name}: {self._said or self._phase_text()}", show_header=False)
        for title, value in self._facts().items():
            table.add_row(title, value)
        return table

    def _line(self) -> str:
        facts = (f"{title} {value}" for title, value in self._facts().items())
        return " ".join("; ".join([self._phase_text(), *facts]).split())

    def _phase_text(self) -> str:
        return phase_name(self._last) if self._last.phase == pb.PHASE_FAILED else phase_text(self._last)
