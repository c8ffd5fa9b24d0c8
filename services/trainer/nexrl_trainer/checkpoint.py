"""Checkpoints: everything needed to continue a run bit for bit, complete or not there at all.

    <folder>/global_step_<n>/         holds exactly n updates
        config.json model.safetensors tokenizer.json ...   what `AutoModelForCausalLM.from_pretrained` opens
        training_state.safetensors    optimizer state and random-number state
        checkpoint.json               the commit marker, written last: metadata, SHA-256 of the other files
    <folder>/global_step_<n>.ahead-of-ledger/   never loaded again: its last steps were made of batches that Redis lost

A checkpoint is written under `global_step_<n>.tmp`, forced to disk, and renamed. A kill at any instruction leaves
either the name without the suffix and all its content, or no such name. torch.distributed.checkpoint is not used
because its metadata file is a pickle.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nexrl.durable import force_to_disk
from nexrl.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from nexrl.models import iter_weights
from nexrl_trainer.step import Learner

_FORMAT = 1
_MARKER = "checkpoint.json"
_MODEL = "model.safetensors"
_STATE = "training_state.safetensors"
_RNG = "rng.torch_cpu"
_NAME = re.compile(r"global_step_(\d+)")
_PARTIAL_SUFFIX = ".tmp"
_AHEAD_SUFFIX = ".ahead-of-ledger"
SETTLED_SECONDS = 10.0
"""A checkpoint that is older than this has been committed in every copy of the ledger: more than Redis can lose
(appendfsync everysec: 2 s; a fail-over to a replica: as far as it may lag behind)."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint contains besides tensors.

    `step`: updates in the weights, which is also their policy version. `batch_ids`: the batches trained since the
    previous checkpoint. `cursor`: the data loader's position, any JSON object.
    """

    step: int
    batch_ids: tuple[int, ...] = ()
    cursor: Mapping[str, Any] = field(default_factory=dict)
    model_tag: str = "default"


def save_checkpoint(
    folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, metadata: CheckpointMetadata
) -> Path:
    """Write `global_step_<n>` below `folder` and return its path; when this returns, it survives a power cut.

    Raises AlreadyExistsError if that step has a checkpoint there, and FailedPreconditionError if `metadata.step` is not
    the learner's.
    """
    if metadata.step != learner.step:
        raise FailedPreconditionError(
            f"checkpoint metadata says step {metadata.step}, the learner is at {learner.step}"
        )
    final = folder / f"global_step_{metadata.step}"
    if final.exists():
        raise AlreadyExistsError(f"checkpoint {final} exists")
    partial = final.with_name(final.name + _PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)  # left by a writer that was killed
    partial.mkdir(parents=True)
    learner.model.save_pretrained(partial, max_shard_size="1TB")  # one file, so that there is one to read back
    tokenizer.save_pretrained(partial)
    save_file(_training_state(learner), partial / _STATE)
    _commit(partial, metadata)
    partial.rename(final)
    force_to_disk(folder)
    return final


def find_latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = _complete_checkpoints(folder)
    return found[-1] if found else None


def load_checkpoint(path: Path, learner: Learner) -> CheckpointMetadata:
    """Put weights, optimizer, step and random-number state back into `learner`.

    Raises NotFoundError if `path` is no complete checkpoint, and FailedPreconditionError if a file is damaged or the
    checkpoint is of another model; the learner is unchanged then.
    """
    metadata = read_metadata(path)
    _check_files(path)
    weights = load_file(path / _MODEL)
    state = load_file(path / _STATE)
    _check_weights(path, weights, learner.model)
    with torch.no_grad():
        for name, tensor in iter_weights(learner.model):
            tensor.copy_(weights[name])
    torch.set_rng_state(state.pop(_RNG))
    learner.load_optimizer_tensors(state)
    learner.step = metadata.step
    return metadata


def read_metadata(path: Path) -> CheckpointMetadata:
    """The checkpoint's metadata. Raises NotFoundError if `path` is no complete checkpoint."""
    saved = _read_marker(path)["metadata"]
    return CheckpointMetadata(**{**saved, "batch_ids": tuple(saved["batch_ids"])})


def put_aside(path: Path) -> Path:
    """Rename a checkpoint that must never be loaded again; gives its new path. Deleting it is for people."""
    names = (f"{path.name}{_AHEAD_SUFFIX}{number or ''}" for number in count())
    aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(aside)
    force_to_disk(path.parent)
    return aside


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Delete what no resume can need, and what killed writers left; return the paths of checkpoints deleted.

    The `keep` newest stay, and so does each whose successor is younger than SETTLED_SECONDS: a ledger that has lost its
    last writes may know of no newer one. Not to be called while a checkpoint is being written to `folder`.
    """
    if keep < 1:
        raise FailedPreconditionError(f"keep is {keep}; must be at least 1, or a run could not be resumed")
    settled = time.time() - SETTLED_SECONDS
    followed = list(pairwise(_complete_checkpoints(folder)))[: -(keep - 1) or None]
    deleted = [path for path, successor in followed if (successor / _MARKER).stat().st_mtime < settled]
    for path in deleted:
        # Renamed first: a kill within rmtree must not leave a checkpoint that looks complete.
        path.rename(path.with_name(path.name + _PARTIAL_SUFFIX))
    for leftover in folder.glob(f"global_step_*{_PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)
    return deleted


def _complete_checkpoints(folder: Path) -> list[Path]:
    """In ascending order of step; unfinished ones, and those put aside, are not seen."""
    # By number, since global_step_10 sorts before global_step_9 as text.
    steps = {
        int(match[1]): path
        for path in folder.glob("global_step_*")
        if (match := _NAME.fullmatch(path.name)) and (path / _MARKER).is_file()
    }
    return [steps[step] for step in sorted(steps)]


def _read_marker(path: Path) -> dict[str, Any]:
    marker = path / _MARKER
    if not marker.is_file():
        raise NotFoundError(f"{path} is not a complete checkpoint: no {_MARKER}")
    content: dict[str, Any] = json.loads(marker.read_text())
    if content["format"] != _FORMAT:
        raise FailedPreconditionError(f"checkpoint {path} has format {content['format']}; this version reads {_FORMAT}")
    return content


def _check_files(path: Path) -> None:
    for name, digest in _read_marker(path)["sha256"].items():
        if not (path / name).is_file() or _sha256(path / name) != digest:
            raise FailedPreconditionError(f"checkpoint {path}: {name} is missing or damaged")


def _training_state(learner: Learner) -> dict[str, Tensor]:
    return {_RNG: torch.get_rng_state(), **learner.optimizer_tensors()}


def _commit(partial: Path, metadata: CheckpointMetadata) -> None:
    """Force all files to disk, then write the marker that says so."""
    files = sorted(path for path in partial.iterdir() if path.is_file())
    for path in files:
        force_to_disk(path)
    digests = {path.name: _sha256(path) for path in files}
    marker = {"format": _FORMAT, "metadata": asdict(metadata), "sha256": digests}
    (partial / _MARKER).write_text(json.dumps(marker, indent=2))
    force_to_disk(partial / _MARKER)
    force_to_disk(partial)


def _check_weights(path: Path, weights: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    for name, tensor in iter_weights(model):
        saved = weights.get(name)
        if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            found = "nothing" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
            wanted = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise FailedPreconditionError(f"checkpoint {path} is of another model: {name} is {found}, not {wanted}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
