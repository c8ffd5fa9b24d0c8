"""A process that is one rank of a trainer. Rank 0 has the batches; the other ranks get them from it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nexrl.errors import NexrlError
from nexrl.models import build_model, iter_weights
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import LoraSpec, ScratchModel, ScratchModelSpec
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.train_batch_proto import decode_train_batch, encode_train_batch
from nexrl.v1 import trainer_service_pb2 as pb
from nexrl_trainer import token_scores
from nexrl_trainer.critic import give_value_head
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.ranks import ONE_RANK, Ranks, join_ranks
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.step_metrics import known
from nexrl_trainer.trained_weights import AdapterSettings

TEMPERATURE = 0.8
_SCRATCH = ScratchModelSpec(
    alphabet="0123456789=", hidden_size=16, intermediate_size=36, layers=2, heads=2, max_positions=64
)

_VOCABULARY_SIZE = 15


@dataclass(frozen=True)
class RankCase:
    """What a learner trains. The model has 15 tokens, which no number of ranks in the tests divides."""

    sequences: Sequence[int]
    """Of each step."""
    algorithm: Mapping[str, Any]
    folder: Path = Path()
    data_type: Literal["float32", "bfloat16"] = "float32"
    max_tokens: int = 40
    chunk_rows: int = 0
    """Tokens whose logits are in memory together; 0 = the trainer's own limit."""
    is_lora: bool = False
    """Whether an adapter is trained."""

    @property
    def source(self) -> ScratchModel:
        """The model."""
        lora = LoraSpec(rank=2, alpha=4.0) if self.is_lora else None
        return ScratchModel(scratch=_SCRATCH, dtype=self.data_type, lora=lora)

    def learner(self, ranks: Ranks, kind: type[Learner] = Learner) -> Learner:
        """Return the learner of one rank."""
        # Adam divides a gradient by its own size. Rounding noise then moves a weight as far as a gradient does, unless
        # eps is larger than the noise.
        algorithm = AlgorithmSpec.model_validate(
            {"learning_rate": 1e-2, "warmup_steps": 1, "eps": 1e-4, **self.algorithm}
        )
        model = on_device(build_model(self.source, seed=0), ranks.device)
        forward = ForwardSettings(TEMPERATURE, self.max_tokens)
        adapter = AdapterSettings(self.source, seed=0) if self.is_lora else None
        critic = partial(self._critic_model, ranks) if algorithm.type == "ppo" else None
        return kind(model, LearnerSettings(algorithm, 20, forward, self.folder, adapter=adapter), ranks, critic)

    def _critic_model(self, ranks: Ranks) -> PreTrainedModel:
        model = on_device(build_model(self.source, seed=1), ranks.device)
        give_value_head(model)
        return model

    def batches(self) -> list[TrainBatch]:
        """Return the batch of each step."""
        return [_batch(step, sequences) for step, sequences in enumerate(self.sequences)]


@dataclass(frozen=True)
class Trained:
    """What one rank has of a case: figures and log-probabilities of each step, and the weights at the end."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    references: list[NDArray[np.float32]] = field(default_factory=list)
    """Log-probabilities of each step under the base of the adapter."""
    passes: list[int] = field(default_factory=list)
    """Forward passes of each step."""
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    masters: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    shard_bytes: int = 0
    error: str = ""


def main(rank: int, device_type: str, connection: Connection) -> None:
    """Entry point. Answers each (number of ranks, rendezvous file, cases) until the other end is closed."""
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with suppress(EOFError):
        while True:
            size, rendezvous_file, cases = connection.recv()
            ranks = join_ranks(rank, size, device, FileStore(rendezvous_file, size))
            connection.send([train(case, ranks) for case in cases])
            dist.destroy_process_group()


def train(case: RankCase, ranks: Ranks = ONE_RANK) -> Trained:
    """Train the case on this rank. Its other ranks do the same."""
    learner, trained = case.learner(ranks), Trained()
    if case.chunk_rows:
        token_scores.BLOCK_BYTES = token_scores.CHUNK_BYTES = 4 * _VOCABULARY_SIZE * case.chunk_rows
    own = case.batches() if ranks.rank == 0 else [None] * len(case.sequences)
    for batch in (_shared(batch, ranks) for batch in own):
        trained.passes.append(len(learner.forward_pass.micro_batches(batch)))
        trained.logprobs.append(learner.forward(batch))
        if case.is_lora:
            trained.references.append(learner.forward_reference(batch))
        try:
            trained.metrics.append(known(learner.train(batch)))
        except NexrlError as error:
            return Trained(error=f"{type(error).__name__}: {error}")
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for _, tensor in iter_weights(learner.model)]
    weights = dict(iter_weights(learner.model))
    if learner.critic:
        weights |= {name: each for name, each in learner.critic.tensors().items() if ".weight." in name}
    whole = {name: _whole(tensor).float().cpu().numpy() for name, tensor in weights.items()}
    masters = {
        name: _whole(tensor).cpu().numpy() for name, tensor in learner.optimizer.tensors().items() if "master." in name
    }
    return replace(trained, weights=whole, masters=masters, shard_bytes=sum(shard.nbytes for shard in shards))


def on_device(model: PreTrainedModel, device: Any) -> PreTrainedModel:
    """Move the model; transformers has no type for the device."""
    moved: PreTrainedModel = model.to(device)
    return moved


def _shared(batch: TrainBatch | None, ranks: Ranks) -> TrainBatch:
    own = None if batch is None else pb.ForwardRequest(tensors=encode_train_batch(batch)).SerializeToString()
    return decode_train_batch(pb.ForwardRequest.FromString(ranks.broadcast(own)).tensors)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _batch(seed: int, sequences: int) -> TrainBatch:
    """Samples of one task for every four sequences. Lengths differ by a factor of up to 20."""
    random = np.random.default_rng(seed)
    contexts = [random.integers(4, 15, int(random.integers(1, 12))) for _ in range(math.ceil(sequences / 4))]
    batch = TrainBatch.pack([_sequence(random, number, contexts[number // 4]) for number in range(sequences)])
    return batch if sequences else replace(batch, reference_logprobs_N=np.zeros(0, np.float32))


def _sequence(random: np.random.Generator, number: int, context: NDArray[np.int64]) -> TrainSequence:
    own = int(random.integers(1, 21))
    mask = np.concatenate([np.zeros(len(context), bool), [True], random.random(own - 1) < 0.6])
    return TrainSequence(
        token_ids=np.concatenate([context, random.integers(4, 15, own)]),
        loss_mask=mask,
        rollout_logprobs=-2.5 - 0.2 * random.random(len(mask)),
        advantage=float(random.normal()),
        reference_logprobs=-2.5 - 0.2 * random.random(len(mask)),
        columns={
            "number": number,
            "pair": (number // 2 + 1) * (-1 if number % 2 else 1),
            "rewards": np.random.default_rng(number).normal(size=len(mask)) * mask,
            "sample": number // 2,
        },
    )
