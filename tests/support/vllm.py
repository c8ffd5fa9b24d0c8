"""Runs replicas with a real vLLM, and checks them against a forward pass of the Hugging Face model."""

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
from nexrl.spec.model import ModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.packing import snapshot
from nexrl.weights.receiver import StagedWeights
from nexrl_inference.vllm.shared import SharedBuffers
from tests.support.services import small_experiment

MAX_DIFFERENCE = 1e-4
"""Largest difference of log-probabilities in float32."""
POSITIONS = 256
SCRATCH = {"alphabet": "0123456789abcdef", "hiddenSize": 64, "layers": 2, "heads": 2, "maxPositions": POSITIONS}

Versions = dict[int, dict[str, Tensor]]


def vllm_experiment(model: dict[str, object] | None = None, **inference: object) -> Experiment:
    """Return an experiment with vLLM. By default, the model is a tiny Llama with tied embeddings."""
    return small_experiment(
        "vllm",
        model=model or {"scratch": SCRATCH},
        inference={"backend": "vllm", "maxRows": 16, "maxTokensPerRow": POSITIONS, **inference},
    )


def untied_qwen(folder: Path) -> dict[str, object]:
    """Save a tiny Qwen3 with untied embeddings in `folder`, in Hugging Face's format. Returns its model section."""
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
    """Return weights of the model. Different seeds return very different weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in iter_weights(build_model(model, 0))
    }


def staged(tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> StagedWeights:
    """Return the weights in the form in which a replica receives them."""
    packed = snapshot(tensors, policy_version=policy_version, bucket_bytes=50_000)
    shared = SharedBuffers(packed.manifest)
    for buffer, content in zip(shared, packed.buffers, strict=True):
        buffer.copy_(content)
    return StagedWeights(f"sync-{policy_version}", packed.manifest, shared, packed.manifest.digest)


class Reference:
    """The Hugging Face model with any weights."""

    def __init__(self, source: ModelSpec) -> None:
        self.model: PreTrainedModel = build_model(source, 0).eval()

    @torch.no_grad()
    def logprobs(self, weights: dict[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return the log-probability of each of `tokens` after `prompt`, shape [len(tokens)]."""
        logits = self.logits(weights, prompt, tokens)
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]

    @torch.no_grad()
    def logits(self, weights: dict[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return the logits from which each of `tokens` is sampled, shape [len(tokens), vocabulary]."""
        for name, parameter in iter_weights(self.model):
            parameter.copy_(weights[name])
        found: Tensor = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return found

    def require_equal(
        self,
        versions: Versions,
        prompt: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
    ) -> None:
        """Assert that each log-probability is the one that the token's reported version computes."""
        assert len(tokens) == len(logprobs) == len(policy_versions) > 0
        for version in set(policy_versions):
            wanted = self.logprobs(versions[version], prompt, tokens)
            where = torch.tensor(policy_versions) == version
            difference = (torch.tensor(logprobs) - wanted)[where].abs().max().item()
            assert difference < MAX_DIFFERENCE, f"version {version}: log-probabilities differ by {difference}"


def random_prompt(chance: random.Random, length: int = 8) -> list[int]:
    """Return random token ids of the tiny models, without special tokens."""
    return [chance.randrange(4, 20) for _ in range(length)]


@contextmanager
def replica_process(
    experiment: Experiment, folder: Path, name: str, weight_sync: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `nexrl serve inference`. Stops it when the block ends, and kills it after 30 s."""
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
