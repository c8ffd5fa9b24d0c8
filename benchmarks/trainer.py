"""The trainer's step: memory of the logits, and tokens per CPU second of a SmolLM2 step against a padded loop.

Memory: log-probabilities and entropies of 8,192 tokens, vocabulary 49,152, with their backward pass. What PyTorch's
allocator holds at most beyond gradients, divided by one chunk of logits.

Speed: AdamW steps of SmolLM2-135M (its architecture with random weights), float32, on one thread. The other side is a
plain Hugging Face loop: all sequences padded to the longest, the model's logits at all positions, one log_softmax, the
same loss and entropy for the metrics. CPU seconds, because they do not count the neighbours on a busy machine.

Ranks: seconds of such a step on one rank, divided by those on two. Checkpoints: seconds of a step after which a
checkpoint is begun, written beside the next step as the trainer does, divided by those of a step alone. Both are wall
time and need two idle cores: one thread a rank, and one for the writer.
Run: OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/trainer.py
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer import token_scores
from nexrl_trainer.checkpoint import CheckpointMetadata, hold_checkpoint
from nexrl_trainer.checkpoint_writer import writing_thread
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.head import Head
from nexrl_trainer.ranks import ONE_RANK, Ranks, join_ranks
from nexrl_trainer.step import Learner, LearnerSettings
from tests.support.memory import peak_allocated_bytes
from tests.support.spawned_processes import SpawnedProcesses
from tests.support.tokenizers import chat_tokenizer

VOCABULARY, HIDDEN, TOKENS, ROUNDS = 49_152, 576, 8192, 3
BATCHES: dict[str, list[tuple[int, int]]] = {
    "8 x 256 tokens, half of them prompt": [(128, 128)] * 8,
    "16 sequences of 33 to 256 tokens": [(32, own) for own in np.linspace(1, 224, 16).astype(int).tolist()],
    "4 prompts of 128 tokens, 8 completions of 16 each": [(128, 16)] * 32,
}
"""Prompt and completion tokens of each sequence."""
SPEED = next(iter(BATCHES))
"""The batch on which ranks and checkpoints are measured."""


def smollm2() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def batch_of(lengths: list[tuple[int, int]]) -> TrainBatch:
    """Return sequences of which every eight of equal prompt lengths have the same prompt, unless lengths differ."""
    random = np.random.default_rng(0)
    prompts = random.integers(3, VOCABULARY, (len(lengths), 512))
    is_shared = len(lengths) > 16
    sequences = []
    for number, (prompt, own) in enumerate(lengths):
        context = prompts[number // 8 if is_shared else number][:prompt]
        ids = np.concatenate([context, random.integers(3, VOCABULARY, own)])
        mask = np.arange(len(ids)) >= prompt
        sequences.append(TrainSequence(ids, mask, np.full(len(ids), -10.8), float(random.normal())))
    return TrainBatch.pack(sequences)


def padded_loop(model: LlamaForCausalLM, batch: TrainBatch) -> Callable[[], object]:
    """Return one step of the plain loop: REINFORCE over all trained tokens of one padded batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    width = int(max(batch.lengths_B))
    sequences = np.split(np.arange(len(batch.token_ids_N)), np.cumsum(batch.lengths_B)[:-1])

    def padded(values_N: np.ndarray) -> Tensor:
        rows = [np.pad(values_N[tokens], (0, width - len(tokens))) for tokens in sequences]
        return torch.from_numpy(np.stack(rows))

    ids_BT, mask_BT, advantages_BT = (padded(a) for a in (batch.token_ids_N, batch.loss_mask_N, batch.advantages_N))
    seen_BT = padded(np.ones_like(batch.token_ids_N))

    def step() -> None:
        logprobs_BTV = functional.log_softmax(model(ids_BT, attention_mask=seen_BT).logits[:, :-1].float(), -1)
        chosen_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        with torch.no_grad():
            -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
        (-(chosen_BT * advantages_BT[:, 1:] * mask_BT[:, 1:]).sum() / mask_BT.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def learner_of(model: LlamaForCausalLM, ranks: Ranks = ONE_RANK) -> Learner:
    algorithm = AlgorithmSpec(loss="reinforce", learning_rate=1e-6)
    return Learner(model, LearnerSettings(algorithm, 100, ForwardSettings(max_tokens_per_micro_batch=4096)), ranks)


def ours(model: LlamaForCausalLM, batch: TrainBatch, ranks: Ranks = ONE_RANK) -> Callable[[], object]:
    learner = learner_of(model, ranks)
    return lambda: learner.train(batch)


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def cpu_seconds(run: Callable[[], object]) -> float:
    return seconds_of(run, time.process_time)


def speed_ratio(lengths: list[tuple[int, int]]) -> float:
    """Return the plain loop's CPU seconds of a step divided by ours: the median over rounds that alternate."""
    batch = batch_of(lengths)
    sides = [padded_loop(smollm2(), batch), ours(smollm2(), batch)]
    for side in sides:
        side()
    return statistics.median(cpu_seconds(sides[0]) / cpu_seconds(sides[1]) for _ in range(ROUNDS))


def rank_main(rank: int, rendezvous: Path, connection: Connection) -> None:
    """Answer each number of ranks with the seconds of one step on so many, until the other end is closed."""
    torch.set_num_threads(1)
    batch, steps = batch_of(BATCHES[SPEED]), dict[int, Callable[[], object]]()
    with suppress(EOFError):
        while True:
            size = connection.recv()
            if size not in steps:
                steps[size] = ours(smollm2(), batch, ranks_of(rank, size, rendezvous))
                steps[size]()
            connection.send(seconds_of(steps[size]))


def ranks_of(rank: int, size: int, rendezvous: Path) -> Ranks:
    return ONE_RANK if size == 1 else join_ranks(rank, size, torch.device("cpu"), FileStore(str(rendezvous), size))


def ranks_ratio() -> float:
    """Return the seconds of a step on one rank divided by those on two: the median over rounds that alternate."""
    with TemporaryDirectory() as folder:
        processes = SpawnedProcesses(2, rank_main, Path(folder) / "rendezvous")
        try:
            rounds = [(*processes.ask(1, 1), max(processes.ask(2))) for _ in range(ROUNDS)]
        finally:
            processes.end()
    return float(statistics.median(alone / together for alone, together in rounds))


def checkpoint_ratio() -> float:
    """Return the seconds of steps with a checkpoint each, divided by those of as many steps without."""
    learner, batch = learner_of(smollm2()), batch_of(BATCHES[SPEED])
    with TemporaryDirectory() as folder, writing_thread() as writer:
        saving = saved_steps(learner, batch, Path(folder), writer)
        next(saving)  # reserves the memory of the copy
        with_checkpoints = seconds_of(lambda: [next(saving) for _ in range(ROUNDS)])
        writer.submit(int).result()
        return with_checkpoints / seconds_of(lambda: [learner.train(batch) for _ in range(ROUNDS)])


def saved_steps(learner: Learner, batch: TrainBatch, folder: Path, writer: ThreadPoolExecutor) -> Iterator[None]:
    """Train step after step. Each ends when its checkpoint is copied, and that of the step before is written."""
    writing = writer.submit(Path)
    while True:
        learner.train(batch)
        writing.result()
        metadata = CheckpointMetadata(step=learner.step, batch_ids=())
        writing = writer.submit(hold_checkpoint(folder, learner, chat_tokenizer(), metadata).write)
        yield


def memory_ratio() -> float:
    """Return the most bytes held for the scores of TOKENS tokens, less gradients, divided by one chunk."""
    layer, token_ids_P = nn.Linear(HIDDEN, VOCABULARY, bias=False), torch.arange(TOKENS)
    hidden_PH = torch.randn(TOKENS, HIDDEN, requires_grad=True)

    def score() -> None:
        head = Head(layer, hidden_PH, lambda logits_RV: logits_RV)
        scores = token_scores.token_scores(head, token_ids_P, lambda logits_RV, _: logits_RV.log_softmax(-1))
        (scores.logprobs_P.sum() - 0.1 * scores.entropy_P.sum()).backward()

    gradient_bytes = 4 * (layer.weight.numel() + hidden_PH.numel())
    return (peak_allocated_bytes(score) - gradient_bytes) / token_scores.CHUNK_BYTES


def main() -> None:
    torch.set_num_threads(1)
    print_line(f"memory of the logits of {TOKENS} tokens, in chunks: {memory_ratio():.2f}")
    for name, lengths in BATCHES.items():
        print_line(f"tokens per CPU second against a padded loop, {name}: {speed_ratio(lengths):.2f}")
    print_line(f"seconds of a step, one rank against two: {ranks_ratio():.2f}")
    print_line(f"seconds of a step, with a checkpoint each against without: {checkpoint_ratio():.2f}")


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
