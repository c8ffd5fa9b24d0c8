"""Starts the trajectory pool: data loader, trajectory pool, train batch pool and validator over one Redis."""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge

from nexrl import __version__
from nexrl.errors import UnavailableError
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.sample_states import IN_FLIGHT
from nexrl.store import START_SECONDS, Redis, connect_redis, key_prefix, room_bytes
from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceStub, add_DataLoaderServiceServicer_to_server
from nexrl.v1.train_batch_pool_service_pb2_grpc import add_TrainBatchPoolServiceServicer_to_server
from nexrl.v1.trajectory_pb2 import PURPOSE_TRAINING, PURPOSE_VALIDATION
from nexrl.v1.trajectory_pool_service_pb2_grpc import add_TrajectoryPoolServiceServicer_to_server
from nexrl.v1.validator_service_pb2_grpc import add_ValidatorServiceServicer_to_server
from nexrl_trajectory_pool.pool import Data, Pool
from nexrl_trajectory_pool.service import (
    DataLoaderServicer,
    Pools,
    TrainBatchPoolServicer,
    TrajectoryPoolServicer,
    ValidatorServicer,
    serve_packed,
)
from nexrl_trajectory_pool.task_reader import TaskReader
from nexrl_trajectory_pool.task_sampler import TaskSampler

if TYPE_CHECKING:
    from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceAsyncStub

log = logging.getLogger(__name__)

METRICS_SECONDS = 1.0

SAMPLES = Gauge("nexrl_pool_samples", "Samples in the ledger, by state.", ["model_tag", "state"])
DROPPED = Gauge("nexrl_pool_dropped_samples", "Samples dropped, by reason.", ["model_tag", "reason"])
CREDIT = Gauge("nexrl_pool_credits_available", "Samples that may be granted now.", ["model_tag"])
IMBALANCE = Gauge("nexrl_ledger_imbalance", "granted - trained - dropped - in flight; 0 or wrong.", ["model_tag"])
PAYLOAD = Gauge("nexrl_pool_payload_bytes", "Trajectories, train batches and added tasks in Redis.", ["model_tag"])
EVENTS = Gauge("nexrl_ledger_events", "Events of the ledger since the experiment began.", ["model_tag", "event"])
STATES = ("granted", *IN_FLIGHT, "trained", "durable")


def main() -> None:
    """Entry point of `nexrl serve trajectory-pool`."""
    run_service("trajectory-pool", start)


async def start(process: ServiceProcess) -> None:
    """Wait for the data reader, open Redis, serve."""
    experiment = process.experiment
    reader: DataReaderServiceAsyncStub = DataReaderServiceStub(process.connect(process.settings.data_reader))
    train = await TaskReader.open(reader, PURPOSE_TRAINING)
    validation = await TaskReader.open(reader, PURPOSE_VALIDATION) if experiment.spec.validation else None
    redis = await connect_redis(process.settings.redis_url, wait_seconds=START_SECONDS)
    process.on_close(redis.aclose)
    if not process.settings.read_only:
        prefix = key_prefix(experiment.ledger, experiment.spec.model.tag)
        await require_same_data(redis, prefix, train)
    room = await room_bytes(redis)
    spec = experiment.spec
    sampler = TaskSampler(spec.data.sampler, spec.data.seed, reader) if spec.data.sampler else None
    pool = Pool(redis, experiment.ledger, spec, Data(train, validation, sampler), room)
    pools = Pools({pool.tag: pool})
    process.add(add_DataLoaderServiceServicer_to_server, DataLoaderServicer(pools), "nexrl.v1.DataLoaderService")
    trajectory_pool, validator = TrajectoryPoolServicer(pools), ValidatorServicer(pools)
    process.add(add_TrajectoryPoolServiceServicer_to_server, trajectory_pool, "nexrl.v1.TrajectoryPoolService")
    process.add(
        add_TrainBatchPoolServiceServicer_to_server, TrainBatchPoolServicer(pools), "nexrl.v1.TrainBatchPoolService"
    )
    process.add(add_ValidatorServiceServicer_to_server, validator, "nexrl.v1.ValidatorService")
    serve_packed(process.server, trajectory_pool, validator)
    process.spawn(pool.wakeups.listen())
    if not process.settings.read_only:
        process.spawn(pool.expire_leases())
    process.spawn(measure(pool))
    await process.set_ready()


async def require_same_data(redis: Redis, prefix: str, train: TaskReader) -> None:
    """Record the training data of a new experiment. Raises InvalidArgumentError if an earlier process had other data.

    A short value in Redis, compared once per process. Validation data may change between processes: each round reads
    it from its beginning. Another release of NexRL may read the same rows as other tasks: it records its own digest.
    """
    key, record = f"{prefix}data", f"{__version__} {train.data}"
    if await redis.set(key, record, nx=True):
        return
    known: Any = await redis.get(key)
    release, _, before = known.decode().partition(" ")
    if release == __version__:
        train.require_same(before)
    else:
        log.warning("spec.data was read by NexRL %s before and is not compared; its digest is replaced", release)
        await redis.set(key, record)


async def measure(pool: Pool) -> None:
    """Update the Prometheus gauges, for as long as the task lives."""
    while True:
        with suppress(UnavailableError):  # the gauges keep their values meanwhile
            await _measure(pool)
        await asyncio.sleep(METRICS_SECONDS)


async def _measure(pool: Pool) -> None:
    state = await pool.training.state()
    for name in STATES:
        SAMPLES.labels(pool.tag, name).set(state[name])
    for reason, samples in state.dropped.items():
        DROPPED.labels(pool.tag, reason).set(samples)
    for event in ("lease_expired", "fenced_writes", "duplicates_rejected", "tasks_left_out"):
        EVENTS.labels(pool.tag, event).set(state[event])
    PAYLOAD.labels(pool.tag).set(state["payload_bytes"])
    CREDIT.labels(pool.tag).set(state.credit)
    IMBALANCE.labels(pool.tag).set(state.imbalance)
