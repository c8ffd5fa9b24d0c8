"""The controller's process."""

import time

from nexrl.errors import InvalidArgumentError
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.store import START_SECONDS, Redis, connect_redis
from nexrl.v1.activity_service_pb2_grpc import add_ActivityServiceServicer_to_server
from nexrl.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl_controller.attempt_counts import follow_attempts
from nexrl_controller.controller import ROLE, Controller
from nexrl_controller.logging_backends import open_backends
from nexrl_controller.policy_versions import follow_policy_versions
from nexrl_controller.retention import Retention
from nexrl_controller.service import ActivityServicer, ControllerServicer
from nexrl_controller.state_store import StateStore
from nexrl_controller.validation import Validation


def main() -> None:
    """Entry point of `nexrl serve controller`."""
    run_service(ROLE, start)


async def start(process: ServiceProcess) -> None:
    """Build the controller and serve it."""
    redis = await connect_redis(process.settings.redis_url, wait_seconds=START_SECONDS)
    process.on_close(redis.aclose)
    backends = open_backends(process.experiment, process.settings.run_dir)
    store = StateStore(redis, process.experiment.ledger)
    controller = Controller(process.experiment, store, backends, time.time)
    process.on_close(controller.close)
    await controller.start()
    await _retain(process, controller, redis)
    process.add(add_ControllerServiceServicer_to_server, ControllerServicer(controller), "nexrl.v1.ControllerService")
    process.add(add_ActivityServiceServicer_to_server, ActivityServicer(controller), "nexrl.v1.ActivityService")
    process.spawn(controller.run_health_checks())
    process.spawn(controller.bound_stop())
    process.spawn(_end_watches_when_stopping(process, controller))
    if not process.experiment.spec.suspend:
        _follow_training(process, controller)
    await process.set_ready()


async def _retain(process: ServiceProcess, controller: Controller, redis: Redis) -> None:
    if process.settings.redis_is_managed:
        return
    retention = Retention(
        redis, controller, process.experiment.ledger, process.experiment.spec.redis.ttl_seconds_after_finished
    )
    await retention.begin()
    process.spawn(retention.run())
    process.on_close(retention.sweep)  # on one machine the controller stops last, so no component writes after this


def _follow_training(process: ServiceProcess, controller: Controller) -> None:
    settings, spec = process.settings, process.experiment.spec
    if not settings.weight_sync or not settings.trajectory_pool:
        raise InvalidArgumentError(
            "settings: the controller requires NEXRL_WEIGHT_SYNC and NEXRL_TRAJECTORY_POOL; set both to gRPC addresses"
        )
    weight_sync = WeightSyncServiceStub(process.connect(settings.weight_sync))
    process.spawn(follow_policy_versions(controller, weight_sync, spec.model.tag))
    trajectory_pool = process.connect(settings.trajectory_pool)
    process.spawn(follow_attempts(controller, TrajectoryPoolServiceStub(trajectory_pool), spec.model.tag))
    if spec.validation is not None:
        validator = ValidatorServiceStub(trajectory_pool)
        validation = Validation(controller, weight_sync, validator, spec.model.tag, spec.validation.timeout_seconds)
        process.spawn(validation.run())


async def _end_watches_when_stopping(process: ServiceProcess, controller: Controller) -> None:
    """End the watches: they last until their deadlines, and the drain would wait for them."""
    await process.stopping.wait()
    controller.end_watches()
