"""The command line `nexrl`. Each command imports what it needs when it runs, so that the others start fast."""

import asyncio
import gc
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from nexrl import __version__
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NexrlError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models as typed gRPC services.",
)

RUNS = Path("runs")
ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values to set, for example algorithm.learningRate=1e-3."),
]


@app.command()
def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    root: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = RUNS,
    port: Annotated[int, typer.Option(help="Port of the controller; 0 selects a free one.", min=0, max=65535)] = 0,
) -> None:
    """Run an experiment on this machine, each service in its own process."""
    from nexrl.local.launcher import RunOptions, run_experiment

    raise typer.Exit(run_experiment(experiment, overrides or [], RunOptions(root, port)))


@app.command("eval")
def evaluate(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Measure this checkpoint, for example runs/NAME/checkpoints/global_step_40."),
    ] = None,
    hf: Annotated[Path | None, typer.Option(help="Measure the model in this Hugging Face folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the results. Default: runs/NAME-eval.")] = None,
) -> None:
    """Measure a model on the validation tasks of an experiment, on this machine, without training.

    Without an option it is the model of the file, with its initial weights.
    """
    from nexrl.local.evaluation import EvaluationOptions, evaluate

    raise typer.Exit(evaluate(experiment, overrides or [], EvaluationOptions(checkpoint, hf, out)))


@app.command()
def validate(experiment: ExperimentFile, overrides: Overrides = None) -> None:
    """Check an experiment file and the files and modules it names. Reports all problems at once."""
    from nexrl.spec import load_experiment

    loaded = load_experiment(experiment, overrides or [])
    typer.echo(f"{experiment}: {loaded.metadata.name} can run here")


@app.command()
def plan(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, for example 80Gi. Default: asks this one.")] = "",
    memory: Annotated[
        str, typer.Option(help="Memory of the machine that runs all roles, for example 512Gi. Default: of this one.")
    ] = "",
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of one machine that runs all roles. Default: each process has its own."),
    ] = None,
) -> None:
    """Print the memory, GPUs, cores and disk that each role needs. Exits with code 4 if they do not fit."""
    from nexrl.plan.command import plan as lines

    for line in lines(experiment, overrides or [], gpu_memory, memory, gpus):
        typer.echo(line)


@app.command()
def serve(service: Annotated[str, typer.Argument(help="The service, for example trainer.")]) -> None:
    """Run one service in this process. Settings come from the environment (NEXRL_*)."""
    found = {point.name: point for point in entry_points(group="nexrl.services")}
    if service not in found:
        raise InvalidArgumentError(f"service: {service!r}; allowed: {', '.join(sorted(found))}")
    # Modules contain no garbage. Collections during the import of torch take a tenth of its CPU time, or more.
    gc.disable()
    main = found[service].load()
    gc.freeze()  # later collections skip the modules
    gc.enable()
    main()


RunOrName = Annotated[
    str,
    typer.Argument(help="The folder of a run, for example runs/sort-digits; or an experiment on the cluster."),
]
ExperimentName = Annotated[str, typer.Argument(help="Name of the experiment on the cluster.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Its namespace; default: that of the context.")]


def _is_run(name: str) -> bool:
    """Return whether `name` is the folder of a run, and not an experiment on a cluster."""
    if "/" in name or Path(name).is_dir():
        return True
    if (run := RUNS / name).is_dir():
        typer.echo(f"{name} is looked for on the cluster; the run on this machine is {run}", err=True)
    return False


@app.command()
def status(run: RunOrName, namespace: Namespace = "") -> None:
    """Show the phase, processes and errors of a run, or of an experiment on the cluster."""
    if _is_run(run):
        from nexrl.local.status import print_status

        asyncio.run(print_status(Path(run)))
    else:
        from nexrl.k8s import commands

        asyncio.run(commands.print_status(commands.Target(run, namespace)))


@app.command()
def submit(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    namespace: Namespace = "",
    prints: Annotated[bool, typer.Option("--print", help="Print the manifest and do not apply it.")] = False,
) -> None:
    """Run an experiment on the cluster. Unlike `kubectl apply`, this includes the Python modules beside the file."""
    from nexrl.k8s import commands
    from nexrl.spec import yaml_core

    document = commands.bundled(experiment, overrides or [])
    if prints:
        typer.echo(yaml_core.dump(document), nl=False)
    else:
        asyncio.run(commands.submit(document, namespace))


@app.command()
def logs(
    run: RunOrName,
    component: Annotated[str, typer.Argument(help="The component: trainer, rollout, controller, ...")] = "trainer",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    namespace: Namespace = "",
) -> None:
    """Print the logs of one component of a run, or of an experiment on the cluster, also after its end."""
    if _is_run(run):
        from nexrl.local.logs import print_run_logs

        asyncio.run(print_run_logs(Path(run), component, follows=follow))
    else:
        from nexrl.k8s import commands

        asyncio.run(commands.print_logs(commands.Target(run, namespace), component, follows=follow))


@app.command()
def suspend(name: ExperimentName, namespace: Namespace = "") -> None:
    """Suspend an experiment on the cluster: it writes a checkpoint and frees all its pods. Waits until it is done."""
    from nexrl.k8s import commands

    asyncio.run(commands.suspend(commands.Target(name, namespace)))


@app.command()
def resume(name: ExperimentName, namespace: Namespace = "") -> None:
    """Resume a suspended or failed experiment from its newest checkpoint. Waits until it trains."""
    from nexrl.k8s import commands

    asyncio.run(commands.resume(commands.Target(name, namespace)))


@app.command()
def delete(name: ExperimentName, namespace: Namespace = "") -> None:
    """Delete an experiment on the cluster, and its volume."""
    from nexrl.k8s import commands

    asyncio.run(commands.delete(commands.Target(name, namespace)))


get = typer.Typer(no_args_is_help=True, help="Fetch what a run has made.")
app.add_typer(get, name="get")


@get.command("results")
def get_results(
    run: RunOrName,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DEST]", help="New folder for the results. Default: results/NAME.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also all older checkpoints and the trajectories.")] = False,
    namespace: Namespace = "",
) -> None:
    """Copy newest checkpoint, metrics, report, logs and configuration of a run or experiment, also after its end.

    RUN may be a folder in object storage, as s3://bucket/prefix/NAME.
    """
    chosen = folder or Path("results") / Path(run).resolve().name
    if "://" in run:
        from nexrl.results import copy_stored_results

        copy_stored_results(run, chosen, everything=everything)
    elif _is_run(run):
        from nexrl.local.run_folder import copy_run_results

        copy_run_results(Path(run), chosen, everything=everything)
    else:
        from nexrl.k8s import commands

        asyncio.run(commands.get_results(commands.Target(run, namespace), chosen, everything=everything))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, for example runs/NAME/checkpoints/global_step_40.")],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="New folder for the model.")],
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder. An adapter (model.lora) is merged into its base."""
    from nexrl.export import export as export_checkpoint

    export_checkpoint(checkpoint, folder)


RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, running or ended, for example runs/sort-digits.")]


@app.command()
def audit(
    run: RunOrName,
    pool: Annotated[str | None, typer.Option(help="Use this trajectory pool, host:port, instead.")] = None,
    namespace: Namespace = "",
) -> None:
    """Check that the ledger accounts for every sample exactly once. Exits with code 11 if it does not."""
    if pool or _is_run(run):
        from nexrl.local.audit import print_audit

        asyncio.run(print_audit(Path(run), pool))
    else:
        from nexrl.k8s import commands

        asyncio.run(commands.print_audit(commands.Target(run, namespace)))


traj = typer.Typer(no_args_is_help=True, help="List, show and replay samples.")
app.add_typer(traj, name="traj")

SampleId = Annotated[str, typer.Argument(help="Id of a sample, for example 17.0; see `nexrl traj list`.")]


@traj.command("list")
def list_trajectories(
    run_folder: RunFolder,
    batch: Annotated[int | None, typer.Option(help="Only samples of this batch, counted from 0.", min=0)] = None,
    state: Annotated[str | None, typer.Option(help="Only this state: durable, trained, dropped, ...")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the newest this many samples. Default: 50, or all with --batch.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per trajectory and line.")] = False,
) -> None:
    """List samples: their state, their verdict, and the step that trained on them."""
    from nexrl.local.trajectories import Filter, print_list

    asyncio.run(print_list(run_folder, Filter(batch, state, limit), as_json=as_json))


@traj.command("get")
def get_trajectory(
    run_folder: RunFolder,
    sample_id: SampleId,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show one sample: tokens, text, log-probabilities, versions, rewards, and the step that used it."""
    from nexrl.local.trajectories import print_sample

    asyncio.run(print_sample(run_folder, sample_id, as_json=as_json))


@traj.command("replay")
def replay_trajectory(
    run_folder: RunFolder,
    sample_id: SampleId,
    engine: Annotated[str | None, typer.Option(help="Use this engine, host:port, whatever version it serves.")] = None,
    policy_version: Annotated[
        int | None, typer.Option("--version", help="Use this policy version instead of the recorded one.", min=0)
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Log-probabilities that differ by less are equal; use 0.1 for bfloat16.", min=0),
    ] = 1e-3,
) -> None:
    """Generate a sample again with its recorded seed and show the differences. Exits with code 11 if there are any.

    Uses a running replica that serves the policy version, or else starts an engine from the checkpoint of that version.
    """
    from nexrl.local.replay import ReplayOptions, replay

    asyncio.run(replay(run_folder, sample_id, ReplayOptions(engine, policy_version, tolerance)))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line. A typed error is printed as one message, and its class decides the exit code.

    So is a package that is not installed: the base install, an SDK, lacks what most commands need.
    """
    try:
        app()
    except NexrlError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package.startswith("nexrl"):
            raise
        sys.stderr.write(
            f"error: Python package {package} is not installed; this command needs the extra local of this package; "
            "in a checkout: pip install -e '.[local]'\n"
        )
        sys.exit(FailedPreconditionError.exit_code)


if __name__ == "__main__":
    main()
