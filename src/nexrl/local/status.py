"""`nexrl status`: a run that is on, as its controller sees it."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from nexrl.errors import NotFoundError, UnavailableError
from nexrl.local.launcher import controller_address
from nexrl.rpc.client import call, connect
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub

CALL_SECONDS = 5.0


async def print_status(run_folder: Path) -> None:
    """Print phase, modules and errors. Raises NotFoundError for no run, UnavailableError for one that has ended."""
    if not (run_folder / "endpoints.json").is_file():
        raise NotFoundError(f"{run_folder}: not the folder of a run; it has no endpoints.json")
    try:
        await _ask(run_folder)
    except UnavailableError:
        raise UnavailableError(
            f"{run_folder}: this run is not on; {run_folder}/summary.json tells how it ended"
        ) from None


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
    console = Console()
    phase = pb.Phase.Name(experiment.phase).removeprefix("PHASE_").capitalize()
    progress = experiment.progress
    console.print(
        f"{experiment.name}: {phase} {experiment.reason} {experiment.message}\n"
        f"step {progress.step}/{progress.total_steps}, policy version {progress.policy_version}, "
        f"health {activity.health}, restarts {experiment.restarts}",
        highlight=False,
    )
    table = Table("module", "alive", "work", "waits on", "address")
    for module in activity.modules:
        work = ", ".join(sorted({w.activity for w in module.work}))
        waits = ", ".join(sorted({w.waiting_on for w in module.work if w.waiting_on}))
        table.add_row(module.name, "yes" if module.alive else "NO", work, waits, module.address)
    console.print(table)
    for error in activity.errors[:10]:
        console.print(f"{error.module} {error.work_context}: {error.message}", style="red", highlight=False)
