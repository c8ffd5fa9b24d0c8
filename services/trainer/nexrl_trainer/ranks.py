"""The ranks that train one model together: processes that hold its shards and compute shares of the same batch.

Each rank makes the same calls with the same batch. FSDP2 gathers the model layer by layer for each pass, so all ranks
must run the same number of passes. Only this module creates the mesh of ranks: another kind of parallelism adds a
dimension to it.
"""

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from nexrl_trainer.interface import interface_of

LOOPBACK = "127.0.0.1"
COLLECTIVE_SECONDS = 600.0
"""Longest time that the ranks wait for each other within a step. The end of a rank is noticed at once."""
_COMMAND_WAIT = timedelta(days=365)
"""The other ranks wait for commands as long as rank 0 waits for a batch: without limit. They end when it ends."""
_DATA = "data"
"""The dimension of the mesh over which parameters are sharded and sequences are split."""
_CPU = torch.device("cpu")

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. A single rank needs neither a process group nor FSDP.

    Methods that communicate are collectives: all ranks must call them in the same order. If a rank is gone, they raise
    RuntimeError: at once with Gloo, at the latest after the timeout of the process group.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    mesh: DeviceMesh | None = None
    commands: dist.ProcessGroup | None = None
    """The group of `broadcast`, on CPUs: its waits have no limit, and keep no GPU busy."""

    def shard(self, model: PreTrainedModel) -> None:
        """Shard the model's parameters over the ranks, each decoder layer separately. Does nothing on a single rank.

        Ranks add up their gradients, in float32, and do not average them: the loss has one denominator for all ranks.
        """
        if self.mesh is None:
            return
        # FSDP leaves the root gathered by default. Its parameters would have other identities than in the optimizer.
        for module in (*_decoder_layers(model), model):
            fully_shard(
                module,
                mesh=self.mesh[_DATA],
                reshard_after_forward=True,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            )
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it adds up

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors. The given one may be overwritten."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the largest of the ranks' values, element by element. The given tensor may be overwritten."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def of_each(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of each rank, in the order of ranks, on the CPU. All must have the same shape."""
        if self.mesh is None:
            return [tensor]
        own = tensor.to(self.device)
        tensors = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(tensors, own)
        return [each.cpu() for each in tensors]

    def gather(self, tensors: Mapping[KeyT, Tensor]) -> dict[KeyT, Tensor]:
        """Return the whole tensors, on the CPU, to rank 0, and nothing to other ranks. A single rank gets `tensors`.

        All ranks must pass their shards in the same order. A rank other than 0 holds one whole tensor at a time.
        """
        if self.mesh is None:
            return dict(tensors)
        gathered = {}
        for key, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                gathered[key] = whole.cpu()
        return gathered

    def broadcast(self, content: bytes | None) -> bytes:
        """Return the content that rank 0 passes; that of other ranks is ignored. Waits for rank 0 without limit."""
        if self.mesh is None:
            return content or b""
        size = torch.tensor([len(content or b"")])
        dist.broadcast(size, src=0, group=self.commands)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0 and content:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(buffer, src=0, group=self.commands)
        return buffer.numpy().tobytes()

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.mesh is not None:
            dist.all_reduce(tensor, operation)
        return tensor


ONE_RANK = Ranks()


def join_ranks(rank: int, size: int, device: torch.device, store: Store, address: str = LOOPBACK) -> Ranks:
    """Join the ranks of a model; returns when all `size` of them have joined.

    `device` is the one of this rank, `address` the IP address at which the other ranks reach this machine. Ranks find
    each other in `store`. They communicate by NCCL on CUDA and by Gloo on CPUs.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)  # weight sync names its interface itself
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=(_DATA,))
    return Ranks(rank, size, device, mesh, dist.new_group(backend="gloo", timeout=_COMMAND_WAIT))


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, sharded as `like` is; the tensor itself if `like` is whole.

    All ranks have the whole tensor, so they do not communicate.
    """
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]
