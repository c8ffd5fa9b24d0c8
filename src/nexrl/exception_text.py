"""Describes an exception of user code in one line: its type, the file and line that raised it, and its message."""

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import partial
from types import CodeType, FrameType

from nexrl.errors import NexrlError

MAX_MESSAGE_CHARACTERS = 16_384
"""Of the message of an error that is reported."""
MAX_TRACEBACK_CHARACTERS = 65_536
"""Of its traceback: the end, which contains the error itself."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def exception_text(error: BaseException, place: str = "") -> str:
    """Return `Type (file:line): message`. `place` stands in if no line of user code has raised it.

    A task that was cancelled at its time limit was at the line of user code that the exception's causes name.
    """
    chain = _causes(error)
    places = (_user_place(traceback.walk_tb(cause.__traceback__)) for cause in chain)
    found = next(filter(None, places), "") or place or _innermost_place(error)
    notes = [note for cause in chain for note in getattr(cause, "__notes__", ())]
    name = type(error).__name__ + (f" ({found})" if found else "")
    return "; ".join([f"{name}: {error}", *notes])


def defined_at(function: object) -> str:
    """Return `file:line` of the definition of a function or callable object; "" if it is not written in Python."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    for found in (function, inspect.getattr_static(type(function), "__call__", None)):
        code = getattr(found, "__code__", None)
        if isinstance(code, CodeType):
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def stack_place(thread: int | None) -> str:
    """Return the line of user code at which a thread is now, as `file:line`; "" if it runs none."""
    frame = sys._current_frames().get(thread or 0)
    return _user_place(reversed(list(traceback.walk_stack(frame)))) if frame else ""


def _causes(error: BaseException) -> list[BaseException]:
    """Return the exception and what it was raised from, each once: `raise error from error` makes a circle.

    Without a cause that is its context: `asyncio.timeout` of Python 3.11.2 names no cause.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return chain


def _user_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the last line that is in no library and not in NexRL, as `file:line`; "" if there is none."""
    place = ""
    for frame, line in frames:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        file = frame.f_code.co_filename
        if package != "nexrl" and not package.startswith("nexrl_") and not file.startswith(("<", *_LIBRARIES)):
            place = f"{file}:{line}"
    return place


def _innermost_place(error: BaseException) -> str:
    """Return the line that raised it; "" for our own errors, whose messages say what to do."""
    frames = [] if isinstance(error, NexrlError) else list(traceback.walk_tb(error.__traceback__))
    file = frames[-1][0].f_code.co_filename if frames else ""
    return f"{file}:{frames[-1][1]}" if file and not file.startswith("<") else ""  # <: Python's own import
