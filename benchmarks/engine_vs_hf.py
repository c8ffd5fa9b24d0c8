"""Samples per CPU second of the built-in engine against Hugging Face `generate`: one run, same weights, one thread.

16 prompts of 6 tokens, 16 samples each, at most 6 new tokens, on a 2-layer Llama with random weights. Random weights
rarely draw the end of sequence; so it is switched off, and both sides generate all 6 tokens. CPU seconds, because on
one thread they equal wall seconds on an idle machine and do not count the neighbours on a busy one. The engine also
computes log-probabilities, `generate` does not.
Run: OMP_NUM_THREADS=1 python benchmarks/engine_vs_hf.py
"""

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import GenerationRequest

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY, REPEATS = 16, 16, 6, 6, 26, 15


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def run_engine(engine: Engine, prompts: list[tuple[int, ...]]) -> None:
    for index, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(str(index), prompt, max_new_tokens=NEW_TOKENS, n=SAMPLES))
    while not engine.is_idle:
        engine.step()


def run_hugging_face(model: LlamaForCausalLM, prompts: list[tuple[int, ...]]) -> None:
    # top_k=0: the whole distribution, as the engine samples.
    model.generate(  # type: ignore[misc]  # transformers types `self` as a protocol its own models do not meet
        torch.tensor(prompts),
        do_sample=True,
        top_k=0,
        num_return_sequences=SAMPLES,
        max_new_tokens=NEW_TOKENS,
    )


def samples_per_cpu_second(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return PROMPTS * SAMPLES / (time.process_time() - start)


def main() -> None:
    torch.set_num_threads(1)
    model = tiny_llama()
    model.train(False)
    engine = Engine(copy.deepcopy(model), eos_token_ids=(), limits=Limits(max_tokens_per_row=32))
    engine.load_weights(model.state_dict(), version=0)
    source = random.Random(0)
    prompts = [tuple(source.randrange(1, VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    runs = {"engine": lambda: run_engine(engine, prompts), "hugging_face": lambda: run_hugging_face(model, prompts)}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):  # alternating, so that load from outside falls on both
        for name, run in runs.items():
            rates[name].append(samples_per_cpu_second(run))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["engine"] / medians["hugging_face"]
    lines = [
        *(f"{name}: {median:.0f} samples per CPU second" for name, median in medians.items()),
        f"ratio: {ratio:.2f}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
