"""The page of exit codes agrees with `nexrl.errors`."""

import re
from pathlib import Path

from nexrl.errors import NexrlError

PAGE = Path(__file__).parents[2] / "docs/exit-codes.md"


def test_the_page_has_every_error_with_its_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    documented = {name: int(code) for code, errors in rows for name in re.findall(r"`(\w+)`", errors)}
    assert documented == {error.__name__: error.exit_code for error in _errors(NexrlError)}


def _errors(error: type[NexrlError]) -> set[type[NexrlError]]:
    """The errors of `nexrl.errors`: other modules only refine them."""
    subclasses = {found for subclass in error.__subclasses__() for found in _errors(subclass)}
    return {error, *subclasses} if error.__module__ == "nexrl.errors" else subclasses
