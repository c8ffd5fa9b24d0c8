"""The replica's side: what it stages, hands over, and refuses."""

import asyncio

import pytest
import torch

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.weights.packing import Snapshot, snapshot, tensor_specs
from nexrl.weights.receiver import NO_VERSION, WeightReceiver
from nexrl.weights.rendezvous import Rendezvous
from nexrl.weights.transport import Sender

TENSORS = [("a", torch.arange(10.0)), ("b", torch.ones(2, 3, dtype=torch.bfloat16))]


def packed(policy_version: int) -> Snapshot:
    tensors = [(name, tensor + policy_version) for name, tensor in TENSORS]
    return snapshot(tensors, policy_version=policy_version, bucket_bytes=32)


async def receive(receiver: WeightReceiver, sender: Sender, sync_id: str, weights: Snapshot) -> str:
    ends = [Rendezvous(1, sender.host, sender.port, rank, 2, 20.0) for rank in (0, 1)]
    sending = asyncio.to_thread(sender.group(ends[0]).send, weights.buffers)
    digest, _ = await asyncio.gather(receiver.receive(sync_id, ends[1], weights.manifest), sending)
    return digest


async def test_a_version_is_served_only_after_it_was_taken_and_loaded() -> None:
    receiver, sender, weights = WeightReceiver(tensor_specs(TENSORS)), Sender("127.0.0.1"), packed(4)
    assert await receive(receiver, sender, "s", weights) == weights.manifest.digest
    assert (receiver.policy_version, receiver.digest) == (NO_VERSION, "")
    staged = await receiver.take("s")
    assert staged is not None
    assert torch.equal(staged.tensors()["a"], TENSORS[0][1] + 4)
    assert receiver.policy_version == NO_VERSION
    receiver.mark_served(staged)
    assert (receiver.policy_version, receiver.digest) == (4, weights.manifest.digest)
    assert await receiver.take("s") is None
    receiver.close()
    sender.close()


async def test_a_newer_sync_drops_what_was_staged() -> None:
    receiver, sender = WeightReceiver(tensor_specs(TENSORS)), Sender("127.0.0.1")
    await receive(receiver, sender, "first", packed(1))
    await receive(receiver, sender, "second", packed(2))
    with pytest.raises(FailedPreconditionError, match="first"):
        await receiver.take("first")
    staged = await receiver.take("second")
    assert staged is not None
    assert staged.policy_version == 2
    receiver.close()
    sender.close()


async def test_a_manifest_of_another_model_is_refused_before_anything_is_received() -> None:
    receiver = WeightReceiver(tensor_specs(TENSORS[:1]))
    with pytest.raises(InvalidArgumentError, match="b: not a tensor of this model"):
        await receiver.receive("s", Rendezvous(1, "127.0.0.1", 1, 1, 2, 20.0), packed(1).manifest)


async def test_nothing_can_be_taken_that_was_not_received() -> None:
    with pytest.raises(FailedPreconditionError, match="staged no weights"):
        await WeightReceiver(tensor_specs(TENSORS)).take("")
