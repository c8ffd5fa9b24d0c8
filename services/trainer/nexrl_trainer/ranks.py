"""The ranks that train one model together: processes that hold its shards and compute shares of the same batch.

Each rank makes the same calls with the same batch. FSDP2 gathers the model layer by layer for each pass, so all ranks
must run the same number of passes. Only this module creates the mesh of ranks: another kind of parallelism adds a
dimension to it.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nexrl_trainer.interface import interface_of

LOOPBACK = "127.0.0.1"
COLLECTIVE_SECONDS = 600.0
"""Longest time that the ranks wait for each other within a step. The end of a rank is noticed at once."""
JOIN_SECONDS = 1800.0
"""Longest time that the replicas wait for each other at their start: a node may have to be added first."""
MARGIN_SECONDS = 60.0
"""Within it, replica 0 ends all ranks and names the replica that did not start."""
REPORT_SECONDS = 3600.0
"""Longest time that a rank which has written its files of a checkpoint waits for the others."""
_COMMAND_WAIT = timedelta(days=365)
"""The other ranks wait for commands as long as rank 0 waits for a batch: without limit. They end when it ends."""
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
    commands: dist.ProcessGroup | None = None
    """The group of `broadcast`, on CPUs: its waits have no limit, and keep no GPU busy."""
    reports: dist.ProcessGroup | None = None
    """The group of `exchange`, on CPUs."""

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

    def gather(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that this rank owns, one at a time.

        All ranks must pass their shards in the same order, and take every item. A rank holds one gathered tensor.
        """
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if owners[name] == self.rank:
                yield name, whole

    def exchange(self, content: bytes) -> list[bytes]:
        """Return the content of each rank. May be called in another thread than the other collectives."""
        if self.mesh is None:
            return [content]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self.reports)
        padded = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in range(self.size)]
        own = torch.frombuffer(bytearray(content.ljust(len(padded[0]))), dtype=torch.uint8)
        dist.all_gather(padded, own, group=self.reports)
        return [each.numpy().tobytes()[: int(size)] for each, size in zip(padded, sizes, strict=True)]

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
    store.set(f"joins/{rank}", "")
    store.wait([f"joins/{other}" for other in range(size)], timedelta(seconds=JOIN_SECONDS + MARGIN_SECONDS))
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=(_DATA,))
    commands = dist.new_group(backend="gloo", timeout=_COMMAND_WAIT)
    reports = dist.new_group(backend="gloo", timeout=timedelta(seconds=REPORT_SECONDS))
    return Ranks(rank, size, device, mesh, commands, reports)


def _decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]
