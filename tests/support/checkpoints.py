"""Checkpoints that are written at once."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nexrl_trainer.checkpoint import CheckpointMetadata, hold_checkpoint
from nexrl_trainer.step import Learner


def save_checkpoint(
    folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, metadata: CheckpointMetadata
) -> Path:
    """Write a checkpoint of the learner below `folder`, and return its path when it is complete."""
    return hold_checkpoint(folder, learner, tokenizer, metadata).write()
