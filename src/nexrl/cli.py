"""The command line: nexrl run | validate | status | trajectories | serve."""

import asyncio
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from nexrl import __version__
from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.spec import load_experiment

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


@app.command()
def status(
    run_folder: Annotated[Path, typer.Argument(help="The folder of a run that is on, as runs/sort-digits.")],
) -> None:
    """What the processes of a run are doing, what they wait on, and what went wrong."""
    from nexrl.local.status import print_status

    asyncio.run(print_status(run_folder))


@app.command()
def trajectories(
    run_folder: Annotated[Path, typer.Argument(help="The folder of a run, as runs/sort-digits.")],
    batch: Annotated[
        int | None, typer.Option(help="Number of the batch, from 0; the newest by default.", min=0)
    ] = None,
) -> None:
    """Print the trajectories of one batch, a JSON object a line."""
    from nexrl.local.trajectories import lines, read_batch

    for line in lines(read_batch(run_folder, batch)):
        typer.echo(line)


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
