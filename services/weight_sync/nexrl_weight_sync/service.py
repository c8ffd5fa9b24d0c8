"""nexrl.v1.WeightSyncService: translates messages to calls of WeightSync and back."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from nexrl.errors import InvalidArgumentError, NotFoundError
from nexrl.v1 import policy_pb2
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceServicer
from nexrl.weights.manifest_proto import manifest_from_wire
from nexrl.weights.rendezvous import TRAINER_RANK, Rendezvous
from nexrl.weights.rendezvous_proto import rendezvous_to_wire
from nexrl_weight_sync.records import NO_VERSION, Replica, Weights
from nexrl_weight_sync.weight_sync import Offer, WeightSync

Context = grpc.aio.ServicerContext[Any, Any]


class WeightSyncServicer(WeightSyncServiceServicer):
    """Serves one model tag; requests for another are refused with NOT_FOUND."""

    def __init__(
        self, weight_sync: WeightSync, *, model_tag: str, mode: str, lease_seconds: float, timeout_seconds: float
    ) -> None:
        """`mode`: spec.weightSync.mode. `timeout_seconds`: how long the trainer waits for a silent peer."""
        self._weight_sync = weight_sync
        self._model_tag = model_tag
        self._mode = mode
        self._lease_seconds = lease_seconds
        self._timeout_seconds = timeout_seconds

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, context: Context) -> pb.RegisterReplicaResponse:
        self._require_tag(request.model_tag)
        await self._weight_sync.register(_replica_from_wire(request.replica, request.digest))
        committed = self._weight_sync.coordinator.committed
        return pb.RegisterReplicaResponse(
            committed_version=committed.policy_version,
            committed_digest=committed.digest,
            lease_seconds=self._lease_seconds,
        )

    async def DeregisterReplica(
        self, request: pb.DeregisterReplicaRequest, context: Context
    ) -> pb.DeregisterReplicaResponse:
        self._require_tag(request.model_tag)
        await self._weight_sync.deregister(request.replica_id)
        return pb.DeregisterReplicaResponse()

    async def WatchReplicas(
        self, request: pb.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[pb.WatchReplicasResponse]:
        self._require_tag(request.model_tag)
        async for view in self._weight_sync.watch():
            yield pb.WatchReplicasResponse(
                replicas=[_replica_to_wire(replica, ready) for replica, ready in view.replicas],
                committed_version=view.committed_version,
                gate=view.gate,
            )

    async def PrepareSync(self, request: pb.PrepareSyncRequest, context: Context) -> pb.PrepareSyncResponse:
        self._require_tag(request.model_tag)
        manifest = manifest_from_wire(request.manifest)
        newest_version = request.newest_version if request.HasField("newest_version") else None
        offer = Offer(
            request.request_id, manifest, request.host, request.port, request.open_epoch, newest_version, request.gpu
        )
        sync = await self._weight_sync.prepare(offer, request.wait_seconds)
        if isinstance(sync, str):
            return pb.PrepareSyncResponse(waiting_on=sync)
        world_size = len(sync.members) + 1
        rendezvous = Rendezvous(
            *(sync.epoch, request.host, request.port, TRAINER_RANK, world_size, self._timeout_seconds),
            sync.route.transport,
        )
        return pb.PrepareSyncResponse(sync_id=sync.sync_id, rendezvous=rendezvous_to_wire(rendezvous))

    async def CommitSync(self, request: pb.CommitSyncRequest, context: Context) -> pb.CommitSyncResponse:
        self._require_tag(request.model_tag)
        outcome = await self._weight_sync.commit(request.sync_id, transferred=request.transferred)
        return pb.CommitSyncResponse(
            committed=outcome.committed,
            committed_version=self._committed_version,
            evicted_replica_ids=outcome.evicted,
            reason=outcome.reason,
        )

    async def CheckRolloutStatus(
        self, request: pb.CheckRolloutStatusRequest, context: Context
    ) -> pb.CheckRolloutStatusResponse:
        self._require_tag(request.model_tag)
        reason = await self._weight_sync.check_gate(request.wait_seconds)
        status = pb.ROLLOUT_STATUS_BLOCK if reason else pb.ROLLOUT_STATUS_CONTINUE
        return pb.CheckRolloutStatusResponse(status=status, reason=reason, committed_version=self._committed_version)

    async def WaitForValidation(
        self, request: pb.WaitForValidationRequest, context: Context
    ) -> pb.WaitForValidationResponse:
        self._require_tag(request.model_tag)
        held_version = await self._weight_sync.wait_for_validation(request.wait_seconds)
        return pb.WaitForValidationResponse(waiting=held_version != NO_VERSION, policy_version=held_version)

    async def EndValidationHold(
        self, request: pb.EndValidationHoldRequest, context: Context
    ) -> pb.EndValidationHoldResponse:
        self._require_tag(request.model_tag)
        await self._weight_sync.end_hold(request.policy_version)
        return pb.EndValidationHoldResponse()

    async def GetWeightSyncState(
        self, request: pb.GetWeightSyncStateRequest, context: Context
    ) -> pb.GetWeightSyncStateResponse:
        self._require_tag(request.model_tag)
        coordinator = self._weight_sync.coordinator
        return pb.GetWeightSyncStateResponse(
            committed_version=coordinator.committed.policy_version,
            digest=coordinator.committed.digest,
            epoch=coordinator.state.epoch,
            sync_id=coordinator.sync.sync_id if coordinator.sync else "",
            waiting_for_validation=coordinator.held_version != NO_VERSION,
            replicas=[_replica_to_wire(replica, ready) for replica, ready in self._weight_sync.view().replicas],
            mode=self._mode,
        )

    @property
    def _committed_version(self) -> int:
        return self._weight_sync.coordinator.committed.policy_version

    def _require_tag(self, model_tag: str) -> None:
        if model_tag != self._model_tag:
            raise NotFoundError(f"model_tag: {model_tag!r} is not synced here; this service has {self._model_tag!r}")


def _replica_from_wire(replica: policy_pb2.Replica, digest: str) -> Replica:
    if not replica.replica_id or not replica.address:
        raise InvalidArgumentError("replica: replica_id and address must be set")
    if (replica.policy_version == NO_VERSION) != (digest == ""):
        raise InvalidArgumentError(
            f"digest: {digest!r} for policy_version {replica.policy_version}; a version requires its digest, "
            f"and {NO_VERSION} (no weights) requires an empty digest"
        )
    holds = Weights(replica.policy_version, digest)
    return Replica(replica.replica_id, replica.address, replica.http_url, holds, replica.token_address, replica.gpu)


def _replica_to_wire(replica: Replica, ready: bool) -> policy_pb2.Replica:
    return policy_pb2.Replica(
        replica_id=replica.replica_id,
        address=replica.address,
        http_url=replica.http_url,
        token_address=replica.token_address,
        gpu=replica.gpu,
        policy_version=replica.holds.policy_version,
        ready=ready,
    )
