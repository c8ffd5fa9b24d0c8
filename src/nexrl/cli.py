"""The command line: nexrl run | validate | status | audit | traj | serve; on a cluster submit | logs | suspend | ..."""

import asyncio
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from nexrl import __version__
from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.spec import load_experiment, yaml_core

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models as typed gRPC services.",
)

ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as algorithm.learningRate=1e-3.")
]


@app.command()
def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    root: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port of the controller; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Run an experiment on this machine, every service as a process of its own."""
    from nexrl.local.launcher import RunOptions, run_experiment

    raise typer.Exit(run_experiment(experiment, overrides or [], RunOptions(root, port)))


@app.command()
def validate(experiment: ExperimentFile, overrides: Overrides = None) -> None:
    """Check an experiment file, and what it names on this machine; tells everything that is wrong at once."""
    loaded = load_experiment(experiment, overrides or [])
    typer.echo(f"{experiment}: {loaded.metadata.name} can run here")


@app.command()
def serve(service: Annotated[str, typer.Argument(help="The service, as 'trainer'.")]) -> None:
    """Run one service in this process, with settings from the environment (NEXRL_*)."""
    found = {point.name: point for point in entry_points(group="nexrl.services")}
    if service not in found:
        raise InvalidArgumentError(f"service: {service!r}; allowed: {', '.join(sorted(found))}")
    found[service].load()()


RunOrName = Annotated[
    str, typer.Argument(help="The folder of a run, as runs/sort-digits; or the name of an experiment on the cluster.")
]
ExperimentName = Annotated[str, typer.Argument(help="The experiment on the cluster of KUBECONFIG.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Its namespace; else that of KUBECONFIG's context.")]


def _is_run(name: str) -> bool:
    """Whether a name is that of a folder, not of an experiment on a cluster."""
    return "/" in name or Path(name).is_dir()


@app.command()
def status(run: RunOrName, namespace: Namespace = "") -> None:
    """What the processes of a run, or the pods of an experiment, are doing, and what went wrong."""
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
    prints: Annotated[bool, typer.Option("--print", help="Print what would be applied, instead.")] = False,
) -> None:
    """Run an experiment on the cluster, with the modules beside its file; as kubectl apply, which takes no modules."""
    from nexrl.k8s import commands

    document = commands.bundled(experiment, overrides or [])
    if prints:
        typer.echo(yaml_core.dump(document), nl=False)
    else:
        asyncio.run(commands.submit(document, namespace))


@app.command()
def logs(
    name: ExperimentName,
    component: Annotated[str, typer.Argument(help="trainer, rollout, controller, ...")] = "trainer",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    namespace: Namespace = "",
) -> None:
    """The logs of a component of an experiment on the cluster."""
    from nexrl.k8s import commands

    asyncio.run(commands.print_logs(commands.Target(name, namespace), component, follows=follow))


@app.command()
def suspend(name: ExperimentName, namespace: Namespace = "") -> None:
    """Have an experiment on the cluster write a checkpoint and give all its pods back; waits until it has."""
    from nexrl.k8s import commands

    asyncio.run(commands.suspend(commands.Target(name, namespace), is_suspended=True))


@app.command()
def resume(name: ExperimentName, namespace: Namespace = "") -> None:
    """Have a suspended experiment go on from its checkpoint; waits until it trains."""
    from nexrl.k8s import commands

    asyncio.run(commands.suspend(commands.Target(name, namespace), is_suspended=False))


@app.command()
def delete(name: ExperimentName, namespace: Namespace = "") -> None:
    """Delete an experiment on the cluster, with its volume."""
    from nexrl.k8s import commands

    asyncio.run(commands.delete(commands.Target(name, namespace)))


RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, on or ended, as runs/sort-digits.")]


@app.command()
def audit(
    run: RunOrName,
    pool: Annotated[str | None, typer.Option(help="Ask this trajectory pool, host:port, instead.")] = None,
    namespace: Namespace = "",
) -> None:
    """Prove that every sample is accounted for, once, from the records of the ledger; ends with code 11 when not."""
    if pool or _is_run(run):
        from nexrl.local.audit import print_audit

        asyncio.run(print_audit(Path(run), pool))
    else:
        from nexrl.k8s import commands

        asyncio.run(commands.print_audit(commands.Target(run, namespace)))


traj = typer.Typer(no_args_is_help=True, help="What was sampled: list it, look at it, draw it again.")
app.add_typer(traj, name="traj")

SampleId = Annotated[str, typer.Argument(help="A sample, as 17.0; `nexrl traj list` has them.")]


@traj.command("list")
def list_trajectories(
    run_folder: RunFolder,
    batch: Annotated[int | None, typer.Option(help="Only those of this batch, from 0.", min=0)] = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state: durable, trained, dropped, ...")] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many, the newest; 50 unless a batch is named.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line, one for each trajectory.")] = False,
) -> None:
    """What became of samples: where they are, how they ended, which step they trained."""
    from nexrl.local.trajectories import Filter, print_list

    asyncio.run(print_list(run_folder, Filter(batch, state, limit), as_json=as_json))


@traj.command("get")
def get_trajectory(
    run_folder: RunFolder,
    sample_id: SampleId,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Everything about one sample: tokens, text, log-probabilities, versions, rewards, and the step that used it."""
    from nexrl.local.trajectories import print_sample

    asyncio.run(print_sample(run_folder, sample_id, as_json=as_json))


@traj.command("replay")
def replay_trajectory(
    run_folder: RunFolder,
    sample_id: SampleId,
    engine: Annotated[str | None, typer.Option(help="Ask this engine, host:port, whatever it serves.")] = None,
    policy_version: Annotated[
        int | None, typer.Option("--version", help="Ask this policy version, not the recorded one.", min=0)
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Difference of a log-probability that is none; bfloat16 needs about 0.1.", min=0)
    ] = 1e-3,
) -> None:
    """Draw a sample again with its recorded seed, and show what differs; ends with code 11 when something does.

    A replica that still serves the policy version is asked, else an engine that is started from its checkpoint.
    """
    from nexrl.local.replay import ReplayOptions, replay

    asyncio.run(replay(run_folder, sample_id, ReplayOptions(engine, policy_version, tolerance)))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: errors go to standard error as one message, and their class decides the exit code."""
    try:
        app()
    except NexrlError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
