"""The ranks that train one model together: processes that hold its shards and compute shares of the same batch.

Each rank makes the same calls with the same batch. A model is gathered layer by layer for each pass (FSDP2), so every
rank must do the same number of passes. Here is the one place that makes the mesh of ranks: a further kind of
parallelism is a further dimension of it.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

_DATA = "data"
"""The dimension of the mesh over which parameters are sharded and sequences are split."""
_CPU = torch.device("cpu")


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

    def shard(self, model: PreTrainedModel) -> None:
        """Shard the model's parameters over the ranks, each decoder layer for itself. Does nothing on a single rank.

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

    def broadcast(self, content: bytes | None) -> bytes:
        """Return the bytes that rank 0 gives; what other ranks give is ignored."""
        if self.mesh is None:
            return content or b""
        size = torch.tensor([len(content or b"")], device=self.device)
        dist.broadcast(size, src=0)
        buffer = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == 0 and content:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.mesh is not None:
            dist.all_reduce(tensor, operation)
        return tensor


ONE_RANK = Ranks()


def join_ranks(rank: int, size: int, device: torch.device, rendezvous: str, timeout_seconds: float) -> Ranks:
    """Join the ranks of a model; returns when all `size` of them have joined. `device` is the one of this rank.

    `rendezvous` is a URL of torch.distributed, such as tcp://HOST:PORT of rank 0. Ranks communicate by NCCL on CUDA
    and by Gloo on CPUs.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return Ranks(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=(_DATA,)))


def _decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]
