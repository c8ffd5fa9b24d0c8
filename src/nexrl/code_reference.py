"""Imports the object that a `module:name` reference names. No other module imports user code."""

import importlib
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from nexrl.errors import InvalidArgumentError
from nexrl.exception_text import exception_text

USER_CODE_ERRORS = (Exception, SystemExit)
"""What to catch around user code. Without SystemExit, a `sys.exit()` in it would end the process without an error."""


def load_reference(reference: str, folder: Path) -> object:
    """Return the object that `module:name` names. Python looks for the module in `folder` first, then on sys.path.

    Raises InvalidArgumentError if the name does not exist or the import fails. The message contains the exception that
    the user code raised.
    """
    module_name, _, name = reference.partition(":")
    try:
        with _first_on_path(folder):
            module = importlib.import_module(module_name)
    except USER_CODE_ERRORS as error:
        raise InvalidArgumentError(f"{reference}: cannot import {module_name}: {exception_text(error)}") from error
    try:
        found: object = getattr(module, name)
    except AttributeError as error:
        raise InvalidArgumentError(f"{reference}: {module_name} ({module.__file__}) has no {name}") from error
    return found


def is_a(found: object, needed: str) -> bool:
    """Return whether code is `needed`: `a function`, `a function or class`, or `a subclass of MODULE.CLASS`.

    The base class is compared by its name, so that its module need not be imported here.
    """
    if needed.startswith("a subclass of "):
        base = needed.removeprefix("a subclass of ")
        bases = found.__mro__[1:] if isinstance(found, type) else ()
        return base in [f"{one.__module__}.{one.__qualname__}" for one in bases]
    return callable(found) and (needed == "a function or class" or not isinstance(found, type))


def unfit(found: object, kind: str, arguments: Sequence[str] | None = None, method: str = "") -> str:
    """Return why code is not what its mark says, see `nexrl.spec.section.code`; empty if it is."""
    if not is_a(found, kind):
        return f"is not {kind}"
    if inspect.isbuiltin(found):
        return "is a built-in function; write a function that calls it"
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(cast(Any, type(found)).__call__):
        return "must not be `async def`"
    if inspect.isabstract(found):
        return f"is abstract; override {', '.join(sorted(cast(Any, found).__abstractmethods__))}"
    if isinstance(found, type) and not has_method(found, method):
        return f"must have a method `{method}`"
    problem = "" if arguments is None else refused_arguments(found, arguments)
    return f"is called with ({', '.join(arguments or ())}), which it does not accept: {problem}" if problem else ""


def has_method(found: object, method: str) -> bool:
    """Return whether an object or class has this method, `def NAME`, `async def NAME` or either, `[async] def NAME`."""
    kind, _, name = method.rpartition("def ")
    function = getattr(found, name, None)
    if not callable(function) or kind == "[async] ":
        return callable(function)
    return is_async(function) if kind else not inspect.iscoroutinefunction(function)


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a function was written as `async def`. A decorator may hide it."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def refused_arguments(function: object, arguments: Sequence[str], keywords: Mapping[str, Any] | None = None) -> str:
    """Return why a function does not accept these arguments, or needs more; empty if it accepts them."""
    try:
        signature = inspect.signature(cast(Any, function))
    except ValueError:  # a function without a signature, such as a built-in one
        return ""
    try:
        signature.bind(*arguments, **(keywords or {}))
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""


@contextmanager
def _first_on_path(folder: Path) -> Generator[None, None, None]:
    """Make `folder` the first entry of sys.path, and afterwards the last one.

    It stays because user code may import its siblings inside functions. It is last so that a file of the user does not
    shadow a library's module that the service imports later.
    """
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)
