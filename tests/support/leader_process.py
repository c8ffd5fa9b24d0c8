"""Processes that are the ranks of one trainer, without its services: rank 0 leads, and the others run its commands."""

import ctypes
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import FileStore

from nexrl.errors import NexrlError
from nexrl.parent_death import PR_SET_PDEATHSIG
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.packing import Snapshot
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.leader import Leader, run_commands
from nexrl_trainer.ranks import ONE_RANK, join_ranks
from nexrl_trainer.step import Learner
from tests.support.checkpoints import save_checkpoint
from tests.support.rank_process import RankCase

BUCKET_BYTES = 1000


class Work(NamedTuple):
    """Trains the batches of `case` from number `first` on, from the checkpoint `begin`; saves one into `save_in`."""

    case: RankCase
    first: int = 0
    begin: Path | None = None
    save_in: Path | None = None


class Done(NamedTuple):
    """What rank 0 has at the end: figures of each step, packed weights, and the errors of batches that failed."""

    figures: Sequence[dict[str, float]]
    weights: bytes
    errors: Sequence[str]
    references: bytes = b""
    """Log-probabilities of the case's first batch under the base of the adapter."""
    base_digest: str = ""


def main(rank: int, size: int, rendezvous_file: Path, work: Work, connection: Connection | None) -> None:
    """Be a rank. Rank 0 sends what it has `Done`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    if size == 1:
        ranks = ONE_RANK
    else:
        ranks = join_ranks(rank, size, torch.device("cpu"), FileStore(str(rendezvous_file), size))
    if rank:
        run_commands(work.case.learner(ranks))
    assert connection is not None
    connection.send(_lead(work.case.learner(ranks, Leader if size > 1 else Learner), work))


def _lead(learner: Learner, work: Work) -> Done:
    figures, errors = [], []
    if work.begin is not None:
        load_checkpoint(work.begin, learner)
    for batch in work.case.batches()[work.first :]:
        try:
            figures.append(learner.train(batch).figures())
        except NexrlError as error:
            errors.append(f"{type(error).__name__}: {error}")
    if work.save_in is not None:
        tokenizer = build_tokenizer(work.case.source)
        save_checkpoint(work.save_in, learner, tokenizer, CheckpointMetadata(step=learner.step))
    packed: Snapshot = learner.snapshot(BUCKET_BYTES)
    weights = b"".join(buffer.numpy().tobytes() for buffer in packed.buffers)
    references = learner.forward_reference(work.case.batches()[0]).tobytes() if work.case.is_lora else b""
    return Done(figures, weights, errors, references, packed.manifest.base_digest)
