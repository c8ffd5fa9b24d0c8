"""What an inference backend provides to a replica."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nexrl.rpc.server import ServiceProcess
from nexrl.stop_strings import Decode
from nexrl.weights.gpu import Gpu
from nexrl.weights.manifest import Manifest, TensorSpec
from nexrl_inference.replica import Engine, Replica


@dataclass(frozen=True)
class Backend:
    """A backend that was started in this process."""

    engine: Engine
    tensors: Sequence[TensorSpec]
    """The tensors of a version: one with others is refused."""
    allocate: Callable[[Manifest], Sequence[Tensor]]
    """Allocates the memory that a version is received into; `Engine.load` gets this memory."""
    application: Callable[[Replica], web.Application]
    """Builds the OpenAI-compatible HTTP API of the replica."""
    wait_started: Callable[[], Awaitable[None]]
    """Returns when the engine accepts requests. Raises UnavailableError when the process is told to stop first."""
    base_digest: str = ""
    """If a version is an adapter, the digest of the base that it must belong to."""
    gpu: Gpu | None = None
    """Where a version can be received by NCCL; `Engine.load` then gets memory of this GPU. None: on the host only."""


StartBackend = Callable[[ServiceProcess], Awaitable[Backend]]
"""Starts a backend. It registers what must be stopped with `on_close`, and what must not end with `spawn`."""


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the tokenizer's decoder without the wrapper of transformers, which takes ten times as long."""
    rust = tokenizer.backend_tokenizer
    return lambda token_ids: str(rust.decode(list(token_ids), skip_special_tokens=True))
