"""The ledger's Lua code: every name is declared and used, and keys, counters and moves are those of the Python code."""

import re
from importlib import resources
from pathlib import Path

import pytest

from nexrl_trajectory_pool import ledger
from nexrl_trajectory_pool.ledger import SCRIPT
from nexrl_trajectory_pool.ledger.names import COUNTERS, KEYS
from nexrl_trajectory_pool.ledger.script import PARTS
from tests.support.lua import literals, problems

FOLDER = Path(str(resources.files(ledger)))
COUNTER_FUNCTIONS = ("count", "add", "set_counter", "unset_counter", "is_counted", "drop")
PYTHON = "".join(path.read_text() for path in FOLDER.parent.rglob("*.py"))
MOVES = set(re.findall(r"^function moves\.(\w+)", SCRIPT, re.MULTILINE))


def test_every_name_is_declared_before_it_is_used_and_used_after_it_is_declared() -> None:
    assert problems(SCRIPT) == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("local x = 1\nreturn y", ["line 1: x is never used", "line 2: y is not declared"]),
        ("return f()\nlocal function f() end", ["line 1: f is not declared", "line 2: f is never used"]),
        ("for i = 1, 2 do redis.call(i) end\nreturn i", ["line 2: i is not declared"]),
        ("local t = { x = 1, y = t }\nreturn function(a, b) return a.x + t.y end", ["line 2: b is never used"]),
        ("if KEYS then local a = 1 else return a end", ["line 1: a is never used", "line 1: a is not declared"]),
        ("local s = 'x = y' -- z\nreturn s .. \"local\"", []),
        ("for _, v in ipairs(ARGV) do redis.call(v) end", []),
    ],
)
def test_the_linter_finds_what_is_wrong_and_nothing_else(script: str, problem: list[str]) -> None:
    assert sorted(problems(script)) == sorted(problem)


def test_the_script_is_made_of_all_files() -> None:
    assert sorted(PARTS) == sorted(path.stem for path in FOLDER.glob("*.lua"))


def test_every_key_is_declared_once_and_used() -> None:
    used = set(re.findall(r"\bK\.(\w+)", SCRIPT)) | set(re.findall(r"_key\(\"(\w+)\"", PYTHON))
    assert used == set(KEYS)
    assert len(set(KEYS.values())) == len(KEYS)


def test_every_counter_is_declared_once_and_used() -> None:
    third = {text for _, text in literals(SCRIPT, ("drop",), argument=2)}  # the state that a sample is dropped from
    listed = set(re.findall(r'"(\w+)"', re.search(r"ipairs\(\{ (\"start_steps\".*?) \}\)", SCRIPT)[1]))  # type: ignore[index]
    used = {text for name, text in literals(SCRIPT, COUNTER_FUNCTIONS[:-1]) if name} | third | listed
    assert used == COUNTERS


def test_every_move_is_called_by_its_name() -> None:
    assert set(re.findall(r'_move\(\s*"(\w+)"', PYTHON)) == MOVES
