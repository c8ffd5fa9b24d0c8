"""An engine that gets the base with an adapter merged."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nexrl.adapters import merged, write_adapter, write_base
from nexrl.models import build_model, iter_weights
from nexrl.run_layout import CHECKPOINT_MARKER
from nexrl.spec.model import ModelSpec
from nexrl.weights.packing import allocate, digest, snapshot
from nexrl.weights.receiver import StagedWeights
from nexrl_inference.adapted_engine import MergedWeights
from nexrl_inference.fixed_weights import INITIAL, fixed_weights
from tests.support.adapters import DataType, adapter_model

SCALE = 2.0
"""That of the tiny model."""


def adapter(weights: MergedWeights, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in weights.tensors}


def staged(tensors: Mapping[str, Tensor], policy_version: int) -> StagedWeights:
    packed = snapshot(tensors.items(), policy_version=policy_version, bucket_bytes=1000)
    return StagedWeights(f"sync-{policy_version}", packed.manifest, packed.buffers, packed.manifest.digest)


def base_of(model: ModelSpec) -> dict[str, Tensor]:
    return dict(iter_weights(build_model(model, model.seed)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_adapter_is_merged_into_the_unchanged_base(dtype: DataType) -> None:
    model = adapter_model(dtype=dtype)
    weights, base = MergedWeights(model, allocate), base_of(model)
    for version in range(20):  # rounding would add up
        tensors = adapter(weights, version)
        loaded = weights.merge(staged(tensors, version))
        assert (loaded.policy_version, loaded.digest) == (version, digest(loaded.manifest, loaded.buffers))
        found = loaded.tensors()
        assert found.keys() == base.keys()
        for name, weight in base.items():
            layer = name.removesuffix(".weight")
            is_adapted = f"{layer}.lora_A.weight" in tensors
            assert torch.equal(found[name], merged(weight, layer, tensors, SCALE) if is_adapted else weight)
            assert torch.equal(found[name], weight) != is_adapted


def test_an_adapter_of_zeros_is_the_base() -> None:
    weights = MergedWeights(adapter_model(), allocate)
    zeros = {spec.name: torch.zeros(spec.shape) for spec in weights.tensors}
    found = weights.merge(staged(zeros, 0)).tensors()
    assert all(torch.equal(found[name], weight) for name, weight in base_of(adapter_model()).items())


def test_only_targets_change() -> None:
    model = adapter_model(target_modules=("up_proj",))
    weights = MergedWeights(model, allocate)
    found, base = weights.merge(staged(adapter(weights, 0), 0)).tensors(), base_of(model)
    changed = {name for name, weight in base.items() if not torch.equal(found[name], weight)}
    assert changed == {name for name in base if name.endswith("up_proj.weight")}


def test_the_digest_of_the_base_differs_with_weights_type_and_scale() -> None:
    models = [adapter_model(), adapter_model(seed=1), adapter_model(dtype="bfloat16"), adapter_model(alpha=5.0)]
    assert len({MergedWeights(model, allocate).base_digest for model in models}) == len(models)
    assert MergedWeights(adapter_model(), allocate).base_digest == MergedWeights(models[0], allocate).base_digest


def test_a_replica_of_fixed_weights_gets_the_adapter_of_a_checkpoint(tmp_path: Path) -> None:
    model = adapter_model()
    weights = MergedWeights(model, allocate)
    tensors = adapter(weights, 5)
    write_adapter(tmp_path, tensors)
    write_base(tmp_path, model, weights.base_digest)
    (tmp_path / CHECKPOINT_MARKER).write_text('{"metadata": {"step": 7}}')
    fixed = fixed_weights(model, str(tmp_path), allocate)
    assert fixed.policy_version == 7
    assert all(torch.equal(fixed.tensors()[name], tensor) for name, tensor in tensors.items())


def test_a_replica_of_the_initial_weights_gets_an_adapter_that_changes_nothing() -> None:
    tensors = fixed_weights(adapter_model(), INITIAL, allocate).tensors()
    assert all(not tensor.any() for tensor in tensors.values())
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    assert layers == {spec.name.rpartition(".lora_")[0] for spec in MergedWeights(adapter_model(), allocate).tensors}
