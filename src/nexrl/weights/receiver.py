"""A replica's side of weight sync: receives a version beside the one it serves, and hands it over at the commit."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.weights.manifest import Manifest, TensorSpec, refuse_misfit
from nexrl.weights.packing import digest, unpack
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Receiver

NO_VERSION = -1


@dataclass(frozen=True)
class StagedWeights:
    """A received version. `digest` is that of the bytes that arrived."""

    sync_id: str
    policy_version: int
    digest: str
    tensors: Mapping[str, Tensor]


class WeightReceiver:
    """Receives and stages weights of one model. It holds at most one staged version, that of the newest sync."""

    def __init__(self, expected: Sequence[TensorSpec]) -> None:
        """`expected`: the tensors of the model, in any order (`packing.tensor_specs`)."""
        self._expected = tuple(expected)
        self._receiver = Receiver()
        self._newest_sync_id = ""
        self._staged: StagedWeights | None = None
        self._served_sync_id = ""
        self.policy_version = NO_VERSION
        """The version that is served; -1 while none is."""
        self.digest = ""
        """Digest of the version that is served; empty while none is."""

    async def receive(self, sync_id: str, rendezvous: Rendezvous, manifest: Manifest) -> str:
        """Receive one version and stage it; gives the digest of what arrived. Drops what an older sync staged.

        Raises InvalidArgumentError for a manifest that does not fit the model, UnavailableError when a peer failed.
        """
        self._newest_sync_id, self._staged = sync_id, None
        try:
            refuse_misfit(manifest, self._expected)
        except InvalidArgumentError:
            self._receiver.close_group()  # so that a trainer that broadcasts already sees that this member is gone
            raise
        group = self._receiver.group(rendezvous)
        try:
            buffers = await asyncio.to_thread(group.receive, manifest)
            arrived = await asyncio.to_thread(digest, manifest, buffers)
        except asyncio.CancelledError:
            group.abort()
            raise
        if self._newest_sync_id == sync_id:
            self._staged = StagedWeights(sync_id, manifest.policy_version, arrived, unpack(manifest, buffers))
        return arrived

    async def take(self, sync_id: str) -> StagedWeights | None:
        """What `sync_id` staged, to be loaded; None when it is served already. Call `mark_served` once it is loaded.

        Raises FailedPreconditionError when that sync staged nothing here.
        """
        if sync_id and sync_id == self._served_sync_id:
            return None
        if self._staged is None or self._staged.sync_id != sync_id:
            raise FailedPreconditionError(f"sync {sync_id!r} has staged no weights here")
        return self._staged

    def mark_served(self, staged: StagedWeights) -> None:
        """Note that the engine serves `staged` now, and release the staging memory."""
        self.policy_version, self.digest = staged.policy_version, staged.digest
        self._served_sync_id = staged.sync_id
        if self._staged is staged:
            self._staged = None

    def close(self) -> None:
        """Leave the broadcast group."""
        self._receiver.close_group()
