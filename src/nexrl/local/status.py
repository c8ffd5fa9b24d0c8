"""`nexrl status`: the state of a running run as its controller reports it, or how an ended run ended."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nexrl.local.launcher import controller_address
from nexrl.local.report import described_drops
from nexrl.local.run_folder import experiment_of, is_running
from nexrl.local.view import phase_text
from nexrl.rpc.client import call, connect
from nexrl.run_layout import ENDPOINTS_FILE, EVAL_FILE, SUMMARY_FILE
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub

CALL_SECONDS = 5.0


async def print_status(run_folder: Path) -> None:
    """Print the state of a running run, or how it ended. Raises NotFoundError if the folder has no run."""
    if is_running(run_folder):
        await _ask(run_folder)
    else:
        sys.stdout.write(ending_of(run_folder) + "\n")


def ending_of(run: Path) -> str:
    """Return how the run in folder `run` ended. Raises NotFoundError if the folder has no run."""
    name = experiment_of(run).metadata.name
    if (run / ENDPOINTS_FILE).is_file():  # left behind by a launcher that was killed
        return f"{name}: its launcher was killed; resume.mode=auto continues from the last checkpoint, if there is one"
    if (run / EVAL_FILE).is_file():
        return f"{name}: an evaluation that has ended; its results are in {run / EVAL_FILE}"
    if not (run / SUMMARY_FILE).is_file():
        return f"{name}: not running, and it has no results"
    summary = json.loads((run / SUMMARY_FILE).read_text())
    if "phase" not in summary:  # written by an earlier version
        return f"{name}: ended at step {summary['steps']}"
    lines = [
        f"{name}: {summary['phase']} ({summary['reason']}), exit code {summary['exit_code']}: {summary['message']}",
        described_drops(summary.get("dropped", {})),
        f"step {summary['steps']}; more in {run / SUMMARY_FILE}",
    ]
    return "\n".join(filter(None, lines))


async def _ask(run_folder: Path) -> None:
    async with connect(controller_address(run_folder)) as channel:
        answer = await call(
            ControllerServiceStub(channel).GetExperiment, pb.GetExperimentRequest(), timeout_seconds=CALL_SECONDS
        )
        activity = await call(
            ActivityServiceStub(channel).GetActivity, activity_pb.GetActivityRequest(), timeout_seconds=CALL_SECONDS
        )
    _print(answer.experiment, activity)


def _print(experiment: pb.Experiment, activity: activity_pb.GetActivityResponse) -> None:
    console = Console(markup=False, emoji=False)  # messages may contain [brackets]
    progress = experiment.progress
    console.print(
        f"{experiment.name}: {phase_text(experiment)}\n"
        f"step {progress.step}/{progress.total_steps}, policy version {progress.policy_version}, "
        f"health {activity.health}, restarts {experiment.restarts}",
        highlight=False,
        markup=False,
    )
    if experiment.failing_samples:
        console.print(f"samples fail: {experiment.failing_samples}", style="red", highlight=False, markup=False)
    table = Table("module", "alive", "work", "waits on", "address")
    for module in activity.modules:
        work = ", ".join(sorted({w.activity for w in module.work}))
        waits = ", ".join(sorted({w.waiting_on for w in module.work if w.waiting_on}))
        table.add_row(module.name, "yes" if module.alive else "NO", work, waits, module.address)
    console.print(table)
    for error in activity.errors[:10]:
        console.print(
            f"{error.module} {error.work_context}: {error.message}", style="red", highlight=False, markup=False
        )
