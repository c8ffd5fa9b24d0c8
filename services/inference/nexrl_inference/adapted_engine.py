"""Serves adapters with an engine that knows none: it gets the base with each adapter merged."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nexrl.adapters import adapted_layers, adapter_specs, digest_of_base, merged
from nexrl.models import build_model, iter_weights
from nexrl.spec.model import ModelSpec
from nexrl.weights.manifest import Manifest, buckets
from nexrl.weights.packing import allocate, digest, layout_of, pack, unpack
from nexrl.weights.receiver import StagedWeights
from nexrl_inference.backend import Backend
from nexrl_inference.replica import Engine
from nexrl_inference.requests import GenerationRequest, GenerationResult

_BUCKET_BYTES = 64 * 2**20


class MergedWeights:
    """The weights of a model with its newest adapter merged, in packed buckets on the host.

    The weights of the adapted layers are there a second time, as they are in the base: each adapter is merged into
    those, so that rounding does not add up.
    """

    def __init__(self, model: ModelSpec, allocate: Callable[[Manifest], Sequence[Tensor]]) -> None:
        """Build the base, as the trainer does. `allocate` makes the buckets that the engine loads from."""
        assert model.lora is not None
        base = build_model(model, model.seed)
        layers = adapted_layers(base, model.lora)
        self.tensors = adapter_specs(layers, model.lora.rank)
        self.base_digest = digest_of_base(base, model.lora)
        self._scale = model.lora.scale
        self._layers = {name: layer.weight.detach() for name, layer in layers.items()}
        self._layout = layout_of(iter_weights(base), policy_version=0, bucket_bytes=_BUCKET_BYTES)
        self._buffers, weights = allocate(self._layout), dict(iter_weights(base))
        for bucket, buffer in zip(buckets(self._layout), self._buffers, strict=True):
            pack(bucket, weights.__getitem__, buffer)

    def merge(self, adapter: StagedWeights) -> StagedWeights:
        """Return all weights with `adapter` merged. They are valid until the next call."""
        tensors, weights = adapter.tensors(), unpack(self._layout, self._buffers)
        for name, base in self._layers.items():
            weights[f"{name}.weight"].copy_(merged(base, name, tensors, self._scale))
        policy_version = adapter.policy_version
        manifest = replace(self._layout, policy_version=policy_version, digest=digest(self._layout, self._buffers))
        return StagedWeights(adapter.sync_id, manifest, self._buffers, manifest.digest)


class AdaptedEngine:
    """An engine that loads adapters (see `Engine`): the engine inside loads all weights."""

    def __init__(self, engine: Engine, weights: MergedWeights) -> None:
        self._engine = engine
        self._weights = weights

    @property
    def active_rows(self) -> int:
        return self._engine.active_rows

    @property
    def waiting_requests(self) -> int:
        return self._engine.waiting_requests

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self._engine.generate(request)

    async def load(self, weights: StagedWeights) -> None:
        """Serve the base with the adapter `weights` from the next decode step on."""
        await self._engine.load(await asyncio.to_thread(self._weights.merge, weights))


def with_adapter(backend: Backend, model: ModelSpec) -> Backend:
    """Return a backend whose engine loads adapters of `model.lora` instead of all weights. Reads the base."""
    with torch.no_grad():
        weights = MergedWeights(model, backend.allocate)
    return replace(
        backend,
        engine=AdaptedEngine(backend.engine, weights),
        tensors=weights.tensors,
        allocate=allocate,
        base_digest=weights.base_digest,
        gpu=None,  # adapters are merged on the host
    )
