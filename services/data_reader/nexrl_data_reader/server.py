"""Starts the data reader: reads the data set, which may run user code, and serves its tasks to the trajectory pool."""

import asyncio

from nexrl.datasets import open_datasets
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.spec import Experiment
from nexrl.spec.sampler import PythonSamplerSpec
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl.v1.data_loader_service_pb2_grpc import add_DataReaderServiceServicer_to_server
from nexrl_data_reader.probability import Probability
from nexrl_data_reader.service import DataReaderServicer


def main() -> None:
    """Entry point of `nexrl serve data-reader`."""
    run_service("data-reader", start)


async def start(process: ServiceProcess) -> None:
    """Read the data, serve. The controller is told of data that takes long to read."""
    experiment, loop = process.experiment, asyncio.get_running_loop()

    def report(problem: str) -> None:
        sending = process.activity.report(problem, work_context="reading the data", severity=SEVERITY_WARNING)
        asyncio.run_coroutine_threadsafe(sending, loop)

    datasets = await asyncio.to_thread(open_datasets, experiment.spec, experiment.folder, report)
    probability = await asyncio.to_thread(_probability, experiment)
    servicer = await asyncio.to_thread(DataReaderServicer, datasets, probability)
    process.add(add_DataReaderServiceServicer_to_server, servicer, "nexrl.v1.DataReaderService")
    await process.set_ready()


def _probability(experiment: Experiment) -> Probability | None:
    """Return the function of data.sampler if it is the user's. Raises InvalidArgumentError."""
    sampler = experiment.spec.data.sampler
    if not isinstance(sampler, PythonSamplerSpec):
        return None
    return Probability(sampler.function, experiment.folder)
