"""A process that is one of two trainer ranks. It gathers tensors that FSDP2 has sharded over both ranks, on request."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from nexrl.models import iter_weights
from nexrl.weights.gather import gathered_buckets
from nexrl.weights.packing import layout_of
from tests.support.patience import LIMIT_SECONDS

RANKS = 2


@dataclass(frozen=True)
class LlamaCase:
    """A tiny Llama."""

    heads: int
    layers: int
    vocabulary: int
    is_tied: bool
    data_type: str = "float32"

    def module(self) -> LlamaForCausalLM:
        """Return the module. Its weights are the same in every process."""
        torch.manual_seed(self.heads + self.layers)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=4 * self.heads,
            intermediate_size=10 * self.heads + 1,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=16,
            tie_word_embeddings=self.is_tied,
        )
        module = LlamaForCausalLM(config)
        module.to(getattr(torch, self.data_type))
        return module

    def whole(self) -> dict[str, Tensor]:
        """Return the weights."""
        return dict(iter_weights(self.module()))

    def sharded(self) -> dict[str, Tensor]:
        """Return the weights, sharded as in a trainer: each layer separately, and all other weights together."""
        module = self.module()
        for layer in module.model.layers:
            fully_shard(layer)
        fully_shard(module)
        return dict(iter_weights(module))


@dataclass(frozen=True)
class TensorsCase:
    """Tensors of any shape. The tensors whose index is in `plain` are not sharded."""

    shapes: tuple[tuple[int, ...], ...]
    plain: frozenset[int]

    def whole(self) -> dict[str, Tensor]:
        """Return the tensors."""
        generator = torch.Generator().manual_seed(len(self.shapes))
        return {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(self.shapes)}

    def sharded(self) -> dict[str, Tensor]:
        """Return the tensors, sharded by FSDP2."""
        tensors = self.whole()
        module = nn.ParameterDict({name: t for name, t in tensors.items() if int(name[1:]) not in self.plain})
        if module:
            fully_shard(module)
        return tensors | {name: parameter.detach() for name, parameter in module.items()}


@dataclass(frozen=True)
class Gathered:
    """The result of one rank: its buckets, the sizes of its shards in bytes, and the peak bytes of new tensors."""

    buffers: list[bytes | None]
    shard_bytes: Mapping[str, int]
    peak_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are created in this context and not freed. `peak` is the maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = {storage.data_ptr() for storage in _storages((args, kwargs))}
        returned = function(*args, **(kwargs or {}))
        for storage in _storages(returned):
            if storage.data_ptr() not in known | self._seen:
                self._add(storage)
        return returned

    def _add(self, storage: UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        self._seen.add(address)
        self._live += nbytes
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, address, nbytes)

    def _free(self, address: int, nbytes: int) -> None:
        self._seen.remove(address)
        self._live -= nbytes


def _storages(tree: object) -> list[UntypedStorage]:
    # Tensors of other classes, such as DTensor, only wrap these.
    tensors = [leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, nn.Parameter)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.nbytes]


def gather(case: LlamaCase | TensorsCase, bucket_bytes: int) -> Gathered:
    """Gather the case's tensors. Rank 0 copies each bucket, in place of sending it."""
    tensors = case.sharded()
    layout = layout_of(tensors.items(), policy_version=0, bucket_bytes=bucket_bytes)
    sent: list[bytes | None] = []
    with LiveBytes() as live:
        for buffer in gathered_buckets(layout, tensors, is_sender=dist.get_rank() == 0):
            sent.append(None if buffer is None else buffer.numpy().tobytes())
            del buffer
    shard_bytes = {name: t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for name, t in tensors.items()}
    return Gathered(sent, shard_bytes, live.peak)


def main(rank: int, rendezvous_file: str, connection: Connection) -> None:
    """Entry point. Answers each (case, bucket_bytes) until the other end of the connection is closed."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LIMIT_SECONDS),
    )
    try:
        while True:
            connection.send(gather(*connection.recv()))
    except EOFError:
        dist.destroy_process_group()
