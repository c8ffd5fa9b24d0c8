"""Follows the committed policy version."""

from typing import TYPE_CHECKING

from nexrl.rpc.client import watch
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl_controller.controller import Controller
from nexrl_controller.events import VersionCommitted

if TYPE_CHECKING:
    from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceAsyncStub


async def follow_policy_versions(
    controller: Controller, weight_sync: "WeightSyncServiceAsyncStub", model_tag: str
) -> None:
    """Apply every commit to the controller's state, until the task is cancelled.

    A resumed run starts with a committed version, which counts only when a replica serves it.
    """
    async for seen in watch(weight_sync.WatchReplicas, pb.WatchReplicasRequest(model_tag=model_tag)):
        is_served = controller.state.has_version or any(replica.ready for replica in seen.replicas)
        if seen.committed_version >= 0 and is_served:
            await controller.apply(VersionCommitted(seen.committed_version))
