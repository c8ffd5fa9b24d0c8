"""What an exception of user code says about itself: type, file and line, message."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from nexrl.errors import DeadlineExceededError, NexrlError
from nexrl.exception_text import defined_at, exception_text


def raises() -> None:
    raise ValueError("no answer")


def line_of(text: str) -> str:
    """`file:line` of the first line of this file that contains `text`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def caught(function: object) -> BaseException:
    with pytest.raises(Exception) as seen:  # noqa: PT011
        function()  # type: ignore[operator]
    return seen.value


def test_the_line_that_raised_is_named() -> None:
    assert exception_text(caught(raises)) == f"ValueError ({line_of('raise ValueError')}): no answer"


def test_of_an_error_in_a_library_the_line_that_called_it_is_named() -> None:
    def reads() -> None:
        json.loads("{")

    assert exception_text(caught(reads)).startswith(f"JSONDecodeError ({line_of('json.loads')}): Expecting")


def test_without_user_code_the_given_place_or_else_the_innermost_line_is_named() -> None:
    error = caught(partial(json.loads, "{"))
    error = error.with_traceback(
        error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    )
    assert "json/decoder.py:" in exception_text(error)
    assert exception_text(error, "mine.py:3").startswith("JSONDecodeError (mine.py:3): ")


def test_an_error_of_ours_needs_no_place() -> None:
    assert exception_text(NexrlError("rollout returned None")) == "NexrlError: rollout returned None"


async def test_code_that_ran_over_its_time_is_named_by_the_line_at_which_it_waited() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)  # it begins
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    late = DeadlineExceededError("no result after 1 s")
    late.__cause__ = cancelled.value
    assert exception_text(late) == f"DeadlineExceededError ({line_of('await asyncio.Event')}): no result after 1 s"


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_the_notes_of_what_it_was_raised_from_are_told(link: str) -> None:
    late, cause = DeadlineExceededError("no result after 1 s"), TimeoutError()
    cause.add_note("the reward had not returned")
    setattr(late, link, cause)
    assert exception_text(late) == "DeadlineExceededError: no result after 1 s; the reward had not returned"


def test_the_notes_of_what_was_handled_before_are_not_told_if_suppressed() -> None:
    error = ValueError("again")
    error.__context__, error.__suppress_context__ = KeyError(), True
    error.__context__.add_note("not told")
    assert exception_text(error) == "ValueError: again"


def test_an_exception_that_is_its_own_cause_is_told_once() -> None:
    error = ValueError("again")
    error.__cause__ = error
    assert exception_text(error) == "ValueError: again"


class Callable:
    """An object that is called like a function."""

    def __call__(self) -> None:
        """Do nothing."""


def test_a_function_is_named_by_the_line_of_its_definition() -> None:
    assert defined_at(raises) == defined_at(partial(partial(raises))) == line_of("def raises")
    assert defined_at(Callable()) == line_of("def __call__")
    assert defined_at(len) == ""
