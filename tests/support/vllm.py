"""Replicas with a real vLLM, and what they should have answered: a forward pass of Hugging Face's model."""

import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from nexrl.models import build_config, build_model, iter_weights
from nexrl.spec import Experiment, dump_resolved
from nexrl.spec.experiment import ModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.packing import snapshot
from nexrl.weights.receiver import StagedWeights
from nexrl.weights.shared import SharedBuffers
from tests.support.services import small_experiment

MAX_DIFFERENCE = 1e-4
"""Of log-probabilities in float32."""
POSITIONS = 256
SCRATCH = {"alphabet": "0123456789abcdef", "hiddenSize": 64, "layers": 2, "heads": 2, "maxPositions": POSITIONS}
START_SECONDS = 180.0

Versions = dict[int, dict[str, Tensor]]


def vllm_experiment(model: dict[str, object] | None = None, **inference: object) -> Experiment:
    """A tiny Llama with tied embeddings unless `model` says otherwise, sampled by vLLM."""
    return small_experiment(
        "vllm",
        model=model or {"scratch": SCRATCH},
        inference={"backend": "vllm", "maxRows": 16, "maxTokensPerRow": POSITIONS, **inference},
    )


def untied_qwen(folder: Path) -> dict[str, object]:
    """A tiny Qwen3 with a head of its own, as a folder of Hugging Face files."""
    source = vllm_experiment().spec.model
    tokens = build_config(source).vocab_size
    config = Qwen3Config(
        vocab_size=tokens,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer(source).save_pretrained(folder)
    return {"path": str(folder)}


def weights_of(model: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Weights of the model that differ a lot from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in iter_weights(build_model(model, 0))
    }


def staged(tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> StagedWeights:
    """Weights as a replica has received them."""
    packed = snapshot(tensors, policy_version=policy_version, bucket_bytes=50_000)
    shared = SharedBuffers(packed.manifest)
    for buffer, content in zip(shared, packed.buffers, strict=True):
        buffer.copy_(content)
    return StagedWeights(f"sync-{policy_version}", packed.manifest, shared, packed.manifest.digest)


class Reference:
    """Hugging Face's model under any weights."""

    def __init__(self, source: ModelSpec) -> None:
        self.model: PreTrainedModel = build_model(source, 0).eval()

    @torch.no_grad()
    def logprobs(self, weights: dict[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Of each of `tokens` after `prompt`, shape [len(tokens)]."""
        for name, parameter in iter_weights(self.model):
            parameter.copy_(weights[name])
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        found: Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return found

    def require_equal(
        self,
        versions: Versions,
        prompt: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
    ) -> None:
        """Each token's log-probability is that of the version that it is said to be of."""
        assert len(tokens) == len(logprobs) == len(policy_versions) > 0
        for version in set(policy_versions):
            wanted = self.logprobs(versions[version], prompt, tokens)
            where = torch.tensor(policy_versions) == version
            difference = (torch.tensor(logprobs) - wanted)[where].abs().max().item()
            assert difference < MAX_DIFFERENCE, f"version {version}: log-probabilities differ by {difference}"


def random_prompt(chance: random.Random, length: int = 8) -> list[int]:
    """Token ids of the tiny models, no special ones."""
    return [chance.randrange(4, 20) for _ in range(length)]


@contextmanager
def replica_process(
    experiment: Experiment, folder: Path, name: str, weight_sync: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`nexrl serve inference`; killed at the end, and with it whatever it has started."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "experiment.yaml"
    file.write_text(dump_resolved(experiment))
    environment = {
        "NEXRL_EXPERIMENT_FILE": str(file),
        "NEXRL_RUN_DIR": str(folder),
        "NEXRL_INSTANCE": name,
        "NEXRL_LISTEN": "127.0.0.1:0",
        "NEXRL_WEIGHT_SYNC": weight_sync,
    }
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nexrl.cli", "serve", "inference"],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
