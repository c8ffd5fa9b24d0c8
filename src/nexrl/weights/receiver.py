"""The replica's side of weight sync: receives a version while another is served, and hands it over at the commit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.weights import packing
from nexrl.weights.gpu import Gpu
from nexrl.weights.manifest import Manifest, TensorSpec, refuse_misfit, refuse_other_base
from nexrl.weights.packing import digest, unpack
from nexrl.weights.published import PublishedVersions
from nexrl.weights.rendezvous import Rendezvous, Transport
from nexrl.weights.transport import Receiver

NO_VERSION = -1


@dataclass(frozen=True)
class StagedWeights:
    """A received version. `buffers` holds the packed tensors; `digest` is that of the bytes that arrived.

    `sync_id` is empty if the version did not come from a sync.
    """

    sync_id: str
    manifest: Manifest
    buffers: Sequence[Tensor]
    digest: str

    @property
    def policy_version(self) -> int:
        """The policy version of these weights."""
        return self.manifest.policy_version

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by name, as views of the buffers."""
        return unpack(self.manifest, self.buffers)


class WeightReceiver:
    """Receives and stages weights of one model. It keeps at most one staged version, that of the newest sync."""

    def __init__(
        self,
        expected: Sequence[TensorSpec],
        allocate: Callable[[Manifest], Sequence[Tensor]] = packing.allocate,
        base_digest: str = "",
        gpu: Gpu | None = None,
    ) -> None:
        """`expected` lists the model's tensors in any order (`packing.tensor_specs`).

        `allocate` makes the buckets in host memory. `gpu` is where they are if they arrive by NCCL; None: they cannot.
        `base_digest`: if they are those of an adapter, the digest of the base that it must belong to.
        """
        self._expected = tuple(expected)
        self._base_digest = base_digest
        self._allocate = allocate
        self._gpu = gpu
        self._receiver = Receiver(gpu)
        self._newest_sync_id = ""
        self._staged: StagedWeights | None = None
        self._served_sync_id = ""
        self.policy_version = NO_VERSION
        """The version that is served; -1 if none is."""
        self.digest = ""
        """Digest of the version that is served; empty if none is."""

    async def receive(self, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        """Receive one version, stage it, and return its digest. Drops the version that an older sync staged.

        Raises InvalidArgumentError if the manifest does not fit the model, and UnavailableError if a peer failed.
        """
        self._newest_sync_id, self._staged = sync_id, None
        try:
            self._refuse_misfit(manifest)
        except InvalidArgumentError:
            self._receiver.close_group()  # a trainer that broadcasts already then sees that this member is gone
            raise
        group = self._receiver.group(rendezvous)
        try:
            buffers = self._allocate_for(rendezvous.transport, manifest)
            await asyncio.to_thread(group.receive, buffers)
            arrived = await asyncio.to_thread(digest, manifest, buffers)
        except asyncio.CancelledError:
            group.abort()
            raise
        if self._newest_sync_id == sync_id:
            self._staged = StagedWeights(sync_id, manifest, buffers, arrived)
        return arrived

    async def read(self, published: PublishedVersions, policy_version: int, digest: str) -> StagedWeights:
        """Return a version from the shared folder. A version that a sync stages meanwhile is not affected.

        Raises NotFoundError if the version is not there, FailedPreconditionError if it is incomplete or has another
        digest, and InvalidArgumentError if it does not fit the model.
        """
        manifest = await asyncio.to_thread(published.manifest, policy_version)
        if manifest.digest != digest:
            raise FailedPreconditionError(f"weights: version {policy_version} is published with other bytes")
        self._refuse_misfit(manifest)
        buffers = self._allocate(manifest)
        await asyncio.to_thread(published.read, manifest, buffers)
        return StagedWeights("", manifest, buffers, manifest.digest)

    async def take(self, sync_id: str) -> StagedWeights | None:
        """Return the version that `sync_id` staged; None if it is served already. Call `mark_served` after loading.

        Raises FailedPreconditionError if that sync staged nothing here.
        """
        if sync_id and sync_id == self._served_sync_id:
            return None
        if self._staged is None or self._staged.sync_id != sync_id:
            raise FailedPreconditionError(f"sync {sync_id!r} has staged no weights here")
        return self._staged

    def mark_served(self, staged: StagedWeights) -> None:
        """Record that the engine serves `staged`, and release the staging memory."""
        self.policy_version, self.digest = staged.policy_version, staged.digest
        self._served_sync_id = staged.sync_id
        if self._staged is staged:
            self._staged = None

    def mark_lost(self, staged: StagedWeights) -> None:
        """Record that the engine failed to load `staged`, and now serves no complete version."""
        self.policy_version, self.digest, self._served_sync_id = NO_VERSION, "", ""
        if self._staged is staged:
            self._staged = None

    def close(self) -> None:
        """Leave the broadcast group."""
        self._receiver.close_group()

    def _allocate_for(self, transport: Transport, manifest: Manifest) -> Sequence[Tensor]:
        if transport is Transport.NCCL and self._gpu is not None:
            return packing.allocate(manifest, self._gpu.device)
        return self._allocate(manifest)

    def _refuse_misfit(self, manifest: Manifest) -> None:
        refuse_misfit(manifest, self._expected)
        refuse_other_base(manifest, self._base_digest)
