"""Checkpoints: everything needed to continue a run bit for bit. A checkpoint is complete or does not exist.

    <folder>/global_step_<n>/         the weights after n updates
        config.json model.safetensors tokenizer.json ...   what `AutoModelForCausalLM.from_pretrained` opens; of an
                                      adapter, what PEFT opens (`trained_weights.py`)
        training_state.safetensors    optimizer state and random-number state
                                      of n ranks, each writes NAME-0000i-of-0000n.safetensors of both
        checkpoint.json               the commit marker, written last: metadata, SHA-256 of the other files
    <folder>/global_step_<n>.ahead-of-ledger/   never loaded again: Redis lost the batches of its last steps
    <folder>/global_step_<n>.unusable/          never loaded again: damaged, or of another model

A checkpoint is written to `global_step_<n>.<random>.tmp`, forced to disk, and renamed. A process killed at any
instruction leaves either the final name with all content, or no final name. An earlier trainer may still write, if its
node was cut off from the network: the random part is another in each process. Of several ranks, each writes its part to
the same folder, and rank 0 the marker after all of them. Any number of ranks can load it.
torch.distributed.checkpoint is not used because it needs pickle.
"""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from nexrl.checkpoint_files import FORMAT, check_files, read_marker, sha256, tensor_files
from nexrl.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from nexrl.fsync import fsync_path
from nexrl.run_layout import CHECKPOINT_MARKER, CHECKPOINT_PREFIX, checkpoint_path, checkpoints_by_step
from nexrl_trainer.held_state import TRAINING, HeldState
from nexrl_trainer.step import Learner
from nexrl_trainer.tensor_slices import SavedTensors

_PARTIAL_SUFFIX = ".tmp"
LIFE = uuid4().hex[:12]
"""In the names of what this process writes."""
AHEAD_SUFFIX = ".ahead-of-ledger"
UNUSABLE_SUFFIX = ".unusable"
SETTLED_SECONDS = 10.0
"""A checkpoint older than this is committed in every copy of the ledger. It exceeds what Redis can lose: 2 s with
appendfsync everysec, or the lag of a replica at a fail-over."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint contains besides tensors.

    `step` is the number of updates in the weights, and so their policy version. `batch_ids` are the batches trained
    since the previous checkpoint. `cursor` is the data loader's position, any JSON object. `drops_in_a_row` are the
    batches that were dropped since the last one that was trained.
    """

    step: int
    batch_ids: tuple[int, ...] = ()
    cursor: Mapping[str, Any] = field(default_factory=dict)
    model_tag: str = "default"
    drops_in_a_row: int = 0


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint in host memory, which is written once, while the training goes on."""

    folder: Path
    metadata: CheckpointMetadata
    _partial: Path
    _state: HeldState

    def write(self) -> Path:
        """Write `global_step_<n>` below `folder` and return its path. Once this returns, it survives a power cut.

        Of several ranks, the others have begun to write their files. Raises OSError if a rank cannot write.
        """
        final = checkpoint_path(self.folder, self.metadata.step)
        _commit(self._partial, self.metadata, self._state.write(self._partial))
        self._partial.rename(final)
        fsync_path(self.folder)
        return final


def hold_checkpoint(
    folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, metadata: CheckpointMetadata
) -> HeldCheckpoint:
    """Copy the learner's state to host memory. It must be written before the next one is copied, to the same memory.

    Raises FailedPreconditionError if `metadata.step` is not the learner's step, and AlreadyExistsError if `folder` has
    a checkpoint of that step.
    """
    if metadata.step != learner.step:
        raise FailedPreconditionError(
            f"checkpoint metadata says step {metadata.step}, the learner is at {learner.step}"
        )
    final = checkpoint_path(folder, metadata.step)
    if final.exists():
        raise AlreadyExistsError(f"checkpoint {final} exists")
    partial = partial_path(final)
    shutil.rmtree(partial, ignore_errors=True)  # left by a write that failed
    partial.mkdir(parents=True)
    tokenizer.save_pretrained(partial)  # first: once the state is held, the other ranks write theirs
    return HeldCheckpoint(folder, metadata, partial, learner.hold_state(partial))


def find_latest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ascending order of step, without unfinished ones and those put aside."""
    return [path for path in checkpoints_by_step(folder).values() if (path / CHECKPOINT_MARKER).is_file()]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that was checked, and whose tensors are read when it is loaded."""

    path: Path
    metadata: CheckpointMetadata
    _weights: SavedTensors
    _training: SavedTensors

    def load(self, learner: Learner) -> None:
        """Load weights, optimizer, step and random-number state. Each rank reads its slices."""
        learner.restore(self._weights, self._training, self.metadata.step, self.path)


def open_checkpoint(path: Path, learner: Learner) -> OpenedCheckpoint:
    """Open a checkpoint for `learner`, which stays unchanged. Rank 0 also compares the files with their digests.

    Raises NotFoundError if `path` is not a complete checkpoint, and FailedPreconditionError if a file is damaged or the
    checkpoint is of another model.
    """
    metadata = read_metadata(path)
    if learner.ranks.rank == 0:
        check_files(path)
    weights = learner.trained.saved(path)
    training = SavedTensors.in_files(path, tensor_files(path, TRAINING))
    learner.check_saved(training)
    return OpenedCheckpoint(path, metadata, weights, training)


def load_checkpoint(path: Path, learner: Learner) -> CheckpointMetadata:
    """Load a checkpoint into `learner`, and return its metadata. Raises what `open_checkpoint` raises."""
    opened = open_checkpoint(path, learner)
    opened.load(learner)
    return opened.metadata


def read_metadata(path: Path) -> CheckpointMetadata:
    """Return the checkpoint's metadata. Raises NotFoundError if `path` is not a complete checkpoint."""
    saved = read_marker(path)["metadata"]
    try:
        return CheckpointMetadata(**{**saved, "batch_ids": tuple(saved["batch_ids"])})
    except (LookupError, TypeError) as error:
        raise NotFoundError(f"{path} is not a complete checkpoint: {CHECKPOINT_MARKER}: metadata: {error}") from None


def partial_path(path: Path) -> Path:
    """Return the name of a checkpoint while this process writes or deletes it."""
    return path.with_name(f"{path.name}.{LIFE}{_PARTIAL_SUFFIX}")


def remove_abandoned(folder: Path) -> None:
    """Delete what other processes have not written or deleted completely.

    Must be called when the ledger has fenced them off: one that still writes fails then, and could not commit anyway.
    """
    for path in folder.glob(f"{CHECKPOINT_PREFIX}*{_PARTIAL_SUFFIX}"):
        if not path.name.endswith(f".{LIFE}{_PARTIAL_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)  # a writer may add files meanwhile; the next trainer deletes those


def is_ahead_of_ledger(path: Path) -> bool:
    """Return whether a checkpoint of this name was put aside because its ledger has fewer steps."""
    return any(path.parent.glob(f"{path.name}{AHEAD_SUFFIX}*"))


def put_aside(path: Path, suffix: str = AHEAD_SUFFIX) -> Path:
    """Rename a checkpoint that must never be loaded again; return its new path. Only people delete it."""
    names = (f"{path.name}{suffix}{number or ''}" for number in count())
    aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(aside)
    fsync_path(path.parent)
    return aside


def prune_checkpoints(folder: Path, keep: int, in_use: Path | None = None) -> list[Path]:
    """Delete checkpoints that no resume can need, and return them.

    The `keep` newest stay. A checkpoint whose successor is younger than SETTLED_SECONDS stays too: a ledger that lost
    its last writes may know no newer one. So does `in_use`, which is being copied. Must not be called while
    this process writes one to `folder`.
    """
    if keep < 1:
        raise FailedPreconditionError(f"keep is {keep}; must be at least 1, or a run could not be resumed")
    settled = time.time() - SETTLED_SECONDS
    followed = list(pairwise(complete_checkpoints(folder)))[: -(keep - 1) or None]
    old = [path for path, successor in followed if (successor / CHECKPOINT_MARKER).stat().st_mtime < settled]
    deleted = [path for path in old if path != in_use]
    for path in deleted:
        # Renamed first: a kill within rmtree must not leave a checkpoint that looks complete.
        path.rename(partial_path(path))
    for leftover in folder.glob(f"{CHECKPOINT_PREFIX}*.{LIFE}{_PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)
    return deleted


def _commit(partial: Path, metadata: CheckpointMetadata, written: Mapping[str, str]) -> None:
    """Force all files to disk, then write the marker. `written`: the digests of those that are on disk already."""
    digests = dict(written)
    for path in sorted(path for path in partial.iterdir() if path.name not in written):
        fsync_path(path)
        digests[path.name] = sha256(path)
    marker = {"format": FORMAT, "metadata": asdict(metadata), "sha256": digests}
    (partial / CHECKPOINT_MARKER).write_text(json.dumps(marker, indent=2))
    fsync_path(partial / CHECKPOINT_MARKER)
    fsync_path(partial)
