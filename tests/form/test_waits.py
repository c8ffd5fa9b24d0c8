"""Waits that depend on the speed of the machine are found, and need a reason or a place in a list that only shrinks."""

from pathlib import Path

import pytest

from tests.form import waits
from tests.form.waits import Wait, find, find_all, load, lowered, problems


def test_each_wait_of_a_test_has_a_reason_or_is_known() -> None:
    found = problems(load(), find_all())
    assert not found, "\n".join(
        [
            "waits that depend on the speed of the machine: use tests/support/patience.py, or write `# speed: REASON`",
            *found,
        ]
    )


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(0.1)",
        "await asyncio.sleep(90)",
        "subprocess.run([], timeout=10)",
        "call(method, request, timeout_seconds=5.5)",
        "with running(seconds=3): pass",
        "async with asyncio.timeout(5): pass",
        "await asyncio.wait_for(task, 2)",
        "thread.join(10)",
        "future.result(3)",
        "@pytest.mark.timeout(30)\ndef test_a(): pass",
        "CALL_SECONDS = 5",
        "class A:\n    WAIT_SECONDS: float = 0.01",
        "def until(fact, seconds=30.0): pass",
        "async def until(*, timeout: float = 1): pass",
        "def test_a():\n    assert time.monotonic() < deadline",
        "def test_a():\n    while time.time() < deadline: pass",
        "def test_a():\n    took = time.perf_counter() - began\n    assert took < 5",
        "def test_a():\n    assert (asyncio.get_running_loop().time() - began) < (\n        5\n    )",
        "class TestA:\n    def test_a(self):\n        self.began = time.time()\n        assert self.began",
    ],
)
def test_a_wait_is_found_once_unless_a_reason_is_beside_it(source: str) -> None:
    (wait,) = find(_inside(source))
    lines = _inside(source).splitlines()
    beside = [*lines]
    beside[wait.line - 1] += "  # speed: the server's own lease"
    assert find("\n".join(beside)) == []
    lines[wait.line - 1 : wait.line - 1] = [" " * _indentation(lines[wait.line - 1]) + "# speed: so"]
    assert find("\n".join(lines)) == []


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.sleep(0)",
        "await asyncio.sleep(delay)",
        "subprocess.run([], timeout=60)",
        "call(method, request, timeout_seconds=CALL_SECONDS)",
        "call(method, request, timeout_seconds=0)",
        "', '.join(names)",
        "BUILD_SECONDS = 240",
        "lease_seconds = 3",
        "def test_a():\n    seen = Result(time.monotonic() - began)\n    assert seen.lost == 0",
        "'time.sleep(3)'",
    ],
)
def test_what_does_not_depend_on_speed_is_not_found(source: str) -> None:
    assert find(_inside(source)) == []


@pytest.mark.parametrize("comment", ["# speed:", "# slow", "x = 1  # speed: of another line"])
def test_a_comment_that_is_no_reason_does_not_count(comment: str) -> None:
    assert find(f"{comment}\ntime.sleep(3)") == [Wait(2, "time.sleep(3)")]


def test_a_reason_may_have_several_lines() -> None:
    assert find("# speed: the kubelet looks\n# every ten seconds\ntime.sleep(3)") == []


def test_files_with_more_or_fewer_waits_than_are_known_are_named() -> None:
    there = {"new.py": [Wait(3, "time.sleep(3)")], "same.py": [Wait(1, "x")], "fewer.py": [Wait(1, "x")]}
    assert problems({"same.py": 1, "fewer.py": 2, "gone.py": 1}, there) == [
        "new.py: 1 waits without a reason, 0 are known:",
        "  new.py:3: time.sleep(3)",
        "fewer.py: has fewer waits than are known: run `make fix`",
        "gone.py: has fewer waits than are known: run `make fix`",
    ]


def test_counts_only_go_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "KNOWN", tmp_path / "known.yaml")
    waits.write({"more.py": 1, "fewer.py": 3, "gone.py": 1})
    monkeypatch.setattr(
        waits, "find_all", lambda: {"more.py": [Wait(1, "x")] * 2, "fewer.py": [Wait(1, "x")], "new.py": [Wait(1, "x")]}
    )
    waits.main()
    assert load() == {"fewer.py": 1, "more.py": 1}
    assert lowered({"gone.py": 1}, {}) == {}


def _inside(source: str) -> str:
    """Return the source as a module: `await` and `async with` need a function around them."""
    if not source.startswith(("await", "async with")):
        return source
    return "async def f():\n    " + source


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
