"""Runs a service process inside the test, with a real server, real sockets and its own settings."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nexrl.rpc.server import ServiceProcess
from nexrl.settings import Settings
from nexrl.spec import Experiment


def small_experiment(name: str = "test", **sections: Any) -> Experiment:
    """Return an experiment: four steps of eight samples in groups of two. `sections` replaces sections of the file."""
    spec = {
        "model": {"scratch": {"alphabet": "0123456789", "hiddenSize": 16, "layers": 1, "heads": 2, "maxPositions": 32}},
        "data": {"type": "mock", "size": 8, "shuffle": False},
        "rollout": {"maxNewTokens": 8},
        "trajectoryPool": {"batchSize": 4, "groupSize": 2},
        "inference": {"maxTokensPerRow": 32},
        "trainer": {"steps": 4},
        **sections,
    }
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": name}, "spec": spec}
    return Experiment.model_validate_json(json.dumps(document))


def settings(folder: Path, **values: Any) -> Settings:
    """Return the settings of a process that listens on free ports of the loopback interface."""
    return Settings(experiment_file=folder / "experiment.yaml", run_dir=folder, instance="test-0", **values)


@asynccontextmanager
async def running_service(
    folder: Path,
    start: Callable[[ServiceProcess], Awaitable[None]],
    experiment: Experiment | None = None,
    **values: Any,
) -> AsyncIterator[ServiceProcess]:
    """Run the process as `nexrl serve` does, and stop it when the block ends. Raises the error if it fails."""
    process = ServiceProcess("test", settings(folder, **values), experiment or small_experiment())
    running = asyncio.create_task(process.run(start))
    try:
        yield process
    finally:
        process.stopping.set()
        await running
