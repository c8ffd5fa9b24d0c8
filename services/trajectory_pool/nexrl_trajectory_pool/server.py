"""Starts the trajectory pool: data loader, trajectory pool, train batch pool and validator over one Redis."""

import asyncio

from prometheus_client import Gauge

from nexrl.datasets import open_datasets
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.store import connect_redis
from nexrl.v1.data_loader_service_pb2_grpc import add_DataLoaderServiceServicer_to_server
from nexrl.v1.train_batch_pool_service_pb2_grpc import add_TrainBatchPoolServiceServicer_to_server
from nexrl.v1.trajectory_pool_service_pb2_grpc import add_TrajectoryPoolServiceServicer_to_server
from nexrl.v1.validator_service_pb2_grpc import add_ValidatorServiceServicer_to_server
from nexrl_trajectory_pool.pool import Pool
from nexrl_trajectory_pool.service import (
    DataLoaderServicer,
    Pools,
    TrainBatchPoolServicer,
    TrajectoryPoolServicer,
    ValidatorServicer,
)

METRICS_SECONDS = 1.0

SAMPLES = Gauge("nexrl_pool_samples", "Samples in the ledger, by state.", ["model_tag", "state"])
DROPPED = Gauge("nexrl_pool_dropped_samples", "Samples dropped, by reason.", ["model_tag", "reason"])
CREDIT = Gauge("nexrl_pool_credits_available", "Samples that may be granted now.", ["model_tag"])
IMBALANCE = Gauge("nexrl_ledger_imbalance", "granted - trained - dropped - in flight; 0 or wrong.", ["model_tag"])
STATES = ("granted", "open", "leased", "grouping", "ready", "batched", "trained", "durable")


def main() -> None:
    """Entry point of `nexrl serve trajectory-pool`."""
    run_service("trajectory-pool", start)


async def start(process: ServiceProcess) -> None:
    """Read the data, open Redis, serve."""
    experiment = process.experiment
    datasets = await asyncio.to_thread(open_datasets, experiment.spec, experiment.folder)
    redis = await connect_redis(process.settings.redis_url)
    process.on_close(redis.aclose)
    pool = Pool(redis, experiment.metadata.name, experiment.spec, datasets.train, datasets.validation)
    pools = Pools({pool.tag: pool})
    process.add(add_DataLoaderServiceServicer_to_server, DataLoaderServicer(pools), "nexrl.v1.DataLoaderService")
    process.add(
        add_TrajectoryPoolServiceServicer_to_server, TrajectoryPoolServicer(pools), "nexrl.v1.TrajectoryPoolService"
    )
    process.add(
        add_TrainBatchPoolServiceServicer_to_server, TrainBatchPoolServicer(pools), "nexrl.v1.TrainBatchPoolService"
    )
    process.add(add_ValidatorServiceServicer_to_server, ValidatorServicer(pools), "nexrl.v1.ValidatorService")
    process.spawn(pool.wakeups.listen())
    process.spawn(pool.expire_leases())
    process.spawn(measure(pool))
    await process.set_ready()


async def measure(pool: Pool) -> None:
    """Keep the Prometheus gauges true, for as long as the task lives."""
    while True:
        state = await pool.training.state()
        for name in STATES:
            SAMPLES.labels(pool.tag, name).set(state[name])
        for reason, samples in state.dropped.items():
            DROPPED.labels(pool.tag, reason).set(samples)
        CREDIT.labels(pool.tag).set(state.credit)
        IMBALANCE.labels(pool.tag).set(state.imbalance)
        await asyncio.sleep(METRICS_SECONDS)
