"""Exports a checkpoint as a plain Hugging Face folder, which transformers and vLLM open."""

import shutil
from pathlib import Path

from nexrl.adapters import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, merged_model
from nexrl.checkpoint_files import check_files, read_marker
from nexrl.errors import AlreadyExistsError
from nexrl.run_layout import CHECKPOINT_MARKER

_ADAPTER_FILES = {WEIGHTS_FILE, CONFIG_FILE, BASE_FILE}
_STATE = "training_state"
"""What the names of files begin with that are only needed to resume."""


def export(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint, with its tokenizer, to the new folder. An adapter is merged into its base.

    Raises NotFoundError if `checkpoint` is none, FailedPreconditionError if it is damaged or its base has changed, and
    AlreadyExistsError if `folder` exists. The folder is there completely or not at all.
    """
    if folder.exists():
        raise AlreadyExistsError(f"{folder} exists; give a folder that does not")
    check_files(checkpoint)
    partial = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    partial.mkdir(parents=True)
    for name in read_marker(checkpoint)["sha256"].keys() - _ADAPTER_FILES - {CHECKPOINT_MARKER}:
        if not name.startswith(_STATE):
            shutil.copy2(checkpoint / name, partial / name)
    if (checkpoint / BASE_FILE).exists():
        merged_model(checkpoint).save_pretrained(partial)
    partial.rename(folder)
