"""One rank's part of a checkpoint, copied to host memory, and how the ranks write their parts together."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nexrl.checkpoint_files import sha256
from nexrl.fsync import fsync_path
from nexrl_trainer.model_files import ranked_file
from nexrl_trainer.ranks import Ranks
from nexrl_trainer.tensor_slices import Slice, write_slices
from nexrl_trainer.trained_weights import TrainedWeights

TRAINING = "training_state"
_RNG, _CUDA_RNG = "rng.torch_cpu", "rng.torch_cuda"


@dataclass(frozen=True)
class HeldState:
    """What this rank writes of a checkpoint: whole weights, and its slices of optimizer and random-number state."""

    ranks: Ranks
    trained: TrainedWeights
    weights: Mapping[str, Tensor]
    training: Mapping[str, Slice]
    number: int
    """How many states this rank has held: the same on all ranks, or their reports would be of different ones."""

    def write(self, folder: Path) -> dict[str, str]:
        """Write this rank's files, and wait for those of the other ranks. Return the SHA-256 of the files on disk.

        All ranks must call this. Raises OSError if any rank cannot write.
        """
        try:
            report = self._write_own(folder)
        except Exception as error:  # noqa: BLE001  # all ranks must learn of it
            report = {"error": f"{type(error).__name__}: {error}"}
        report["number"] = self.number
        reports = [json.loads(content) for content in self.ranks.exchange(json.dumps(report).encode())]
        for rank, each in enumerate(reports):
            if each["number"] != self.number:
                raise OSError(f"checkpoint {folder}: rank {rank} has written another one; restart the trainer")
            if "error" in each:
                raise OSError(f"checkpoint {folder}: rank {rank} could not write its files: {each['error']}")
        if self.ranks.rank == 0:
            files = [each["weights"] for each in reports]
            self.trained.write_rest(folder, {name: sizes for written in files for name, sizes in written.items()})
        return {name: digest for each in reports for name, digest in each["sha256"].items()}

    def _write_own(self, folder: Path) -> dict[str, Any]:
        training = ranked_file(TRAINING, self.ranks.rank, self.ranks.size)
        weights = self.trained.write(folder, self.weights, self.ranks.rank, self.ranks.size)
        write_slices(folder / training, self.training)
        for name in (*weights, training):
            fsync_path(folder / name)
        return {"weights": weights, "sha256": {name: sha256(folder / name) for name in (*weights, training)}}


def name_at(name: str, rank: int) -> str:
    """Return the name of a rank's own tensor in a checkpoint; that of rank 0 is the one of a single rank."""
    return f"{name}.{rank}" if rank else name


def random_states(device: torch.device) -> dict[str, tuple[Tensor, Callable[[Tensor], None]]]:
    """Return a copy of each random-number state, and what sets it."""
    states: dict[str, tuple[Tensor, Callable[[Tensor], None]]] = {_RNG: (torch.get_rng_state(), torch.set_rng_state)}
    if device.type == "cuda":
        states[_CUDA_RNG] = (
            torch.cuda.get_rng_state(device).clone(),
            lambda state: torch.cuda.set_rng_state(state, device),
        )
    return states
