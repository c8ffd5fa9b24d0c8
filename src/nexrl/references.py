"""`module:name` references of an experiment file: the one place where code of the user is imported."""

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from nexrl.errors import InvalidArgumentError


def load_reference(reference: str, folder: Path) -> object:
    """What `module:name` refers to. The module is looked up in `folder` first, then as any installed module.

    Raises InvalidArgumentError, whatever goes wrong while the module is imported: its code is the user's, and the
    message names the error in it.
    """
    module_name, _, name = reference.partition(":")
    try:
        with _importable(folder):
            module = importlib.import_module(module_name)
    except Exception as error:  # code of the user may raise anything; the cause is kept
        raise InvalidArgumentError(
            f"{reference}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    try:
        found: object = getattr(module, name)
    except AttributeError as error:
        raise InvalidArgumentError(f"{reference}: {module_name} ({module.__file__}) has no {name}") from error
    return found


@contextmanager
def _importable(folder: Path) -> Generator[None, None, None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
