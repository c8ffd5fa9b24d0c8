"""Builds the weight-sync process."""

import time
from collections.abc import Callable

from nexrl.errors import NexrlError
from nexrl.rpc.client import call, is_passing, new_request_id
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.spec import ExperimentSpec
from nexrl.store import START_SECONDS, connect_redis, key_prefix
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from nexrl_weight_sync.coordinator import Coordinator
from nexrl_weight_sync.records import Rules
from nexrl_weight_sync.replicas import ReplicaClients
from nexrl_weight_sync.service import WeightSyncServicer
from nexrl_weight_sync.store import WeightSyncStore
from nexrl_weight_sync.weight_sync import WeightSync

LEASE_SECONDS = 10.0
"""A replica that is silent for longer is evicted."""
MARGIN_SECONDS = 10.0
POOL_SECONDS = 30.0


def main() -> None:
    """Entry point of `nexrl serve weight-sync`."""
    run_service("weight-sync", start)


async def start(process: ServiceProcess) -> None:
    """Load the state of the experiment's model tag and serve it."""
    spec = process.experiment.spec
    redis = await connect_redis(process.settings.redis_url, wait_seconds=START_SECONDS)
    process.on_close(redis.aclose)
    store = WeightSyncStore(redis, key_prefix(process.experiment.ledger, spec.model.tag))
    timeout_seconds = spec.weight_sync.timeout_seconds
    weight_sync = WeightSync(
        Coordinator(rules(spec), await store.load(), time.monotonic()),
        store,
        ReplicaClients(timeout_seconds=timeout_seconds),
        timeout_seconds=timeout_seconds,
    )
    servicer = WeightSyncServicer(
        weight_sync,
        model_tag=spec.model.tag,
        mode=spec.weight_sync.mode,
        lease_seconds=LEASE_SECONDS,
        timeout_seconds=timeout_seconds,
    )
    process.add(add_WeightSyncServiceServicer_to_server, servicer, "nexrl.v1.WeightSyncService")
    process.spawn(weight_sync.expire())
    process.spawn(_tell_pool(process, weight_sync))
    process.spawn(_stop_waits(process, weight_sync))
    await process.set_ready()


def rules(spec: ExperimentSpec) -> Rules:
    """Return the coordinator's limits for the experiment."""
    max_lag_steps = {"sync": 0, "batch-async": spec.weight_sync.staleness_threshold, "fully-async": None}
    return Rules(
        max_lag_steps=max_lag_steps[spec.weight_sync.mode],
        lease_seconds=LEASE_SECONDS,
        sync_seconds=2 * spec.weight_sync.timeout_seconds + MARGIN_SECONDS,
        hold_seconds=spec.validation.timeout_seconds + MARGIN_SECONDS if spec.validation else MARGIN_SECONDS,
        is_due=_validation_rule(spec),
        transport=spec.weight_sync.transport,
    )


def _validation_rule(spec: ExperimentSpec) -> Callable[[int], bool]:
    validation = spec.validation
    if validation is None:
        return lambda policy_version: False

    def is_due(policy_version: int) -> bool:
        if policy_version == 0:
            return validation.before_training
        is_last = policy_version == spec.trainer.steps
        return is_last or (validation.every_steps > 0 and policy_version % validation.every_steps == 0)

    return is_due


async def _tell_pool(process: ServiceProcess, weight_sync: WeightSync) -> None:
    """Send each committed version to the pool, until it accepts it: the pool's credit counts from that version."""
    stub = TrajectoryPoolServiceStub(process.connect(process.settings.trajectory_pool))
    model_tag = process.experiment.spec.model.tag

    async def tell(policy_version: int) -> None:
        request = pool_pb.SetPolicyVersionRequest(
            request_id=new_request_id(), model_tag=model_tag, policy_version=policy_version
        )
        while True:
            try:
                await call(stub.SetPolicyVersion, request, timeout_seconds=POOL_SECONDS)
                return
            except NexrlError as error:
                if not is_passing(error):
                    raise
                await process.activity.report(error, work_context=f"sending version {policy_version} to the pool")

    await weight_sync.announce(tell)


async def _stop_waits(process: ServiceProcess, weight_sync: WeightSync) -> None:
    await process.stopping.wait()
    await weight_sync.stop()
