"""Waits that depend on the speed of the machine are found, and need a reason or a place in a list that only shrinks."""

from pathlib import Path

import pytest

from tests.form import waits
from tests.form.waits import Wait, find, find_all, load, problems, shortened


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
        "PAUSE = 0.5\ntime.sleep(PAUSE)",
        "def test_a():\n    limit = 5\n    call(timeout=limit)\ndef test_b():\n    limit = 70",
        "time.sleep(2 * 3)",
        "nothing.sleep(3)",
        "await asyncio.sleep(10 * server.CHECK_SECONDS)",
        "LIMIT = 5\ncall(timeout=LIMIT)",
        "call(timeout=5 * 2)",
        "WAIT_SECONDS = 0.5 * 2",
        "CALL_SECONDS = 5",
        "class A:\n    WAIT_SECONDS: float = 0.01",
        "def until(fact, seconds=30.0): pass",
        "async def until(*, timeout: float = 1): pass",
        "def test_a():\n    assert time.monotonic() < deadline",
        "def test_a():\n    while time.time() < deadline: pass",
        "def test_a():\n    took = time.perf_counter() - began\n    assert took < 5",
        "def test_a():\n    assert (asyncio.get_running_loop().time() - began) < (\n        5\n    )",
        "def test_a():\n    loop = asyncio.get_running_loop()\n    assert loop.time() < 5",
        "def test_a():\n    assert time.monotonic_ns() < 5",
        "def test_a():\n    took: float = time.monotonic()\n    assert took < 5",
        "began = time.time()\nif began < 5: pass",
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
        "LIMIT = 30 * 2\ncall(timeout=LIMIT)",
        "await asyncio.sleep(self.delay)",
        "def test_a():\n    assert event.time < 5",
        "def test_a():\n    assert event.time() < 5",
        "value = 1 / 0",
        "def test_a():\n    delay = 3\nasync def pause(delay):\n    await asyncio.sleep(delay)",
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


def test_waits_that_are_not_known_or_no_longer_there_are_named() -> None:
    wait, other = Wait(3, "time.sleep(3)"), Wait(4, "timeout=2")
    there = {"new.py": [wait], "same.py": [wait, other], "swapped.py": [other], "fewer.py": [wait]}
    known = {
        "same.py": [wait.what, other.what],
        "swapped.py": [wait.what],
        "fewer.py": [wait.what] * 2,
        "gone.py": [wait.what],
    }
    assert problems(known, there) == [
        "new.py:3: time.sleep(3)",
        "swapped.py:4: timeout=2",
        "fewer.py: has fewer waits than are known: run `make fix`",
        "gone.py: has fewer waits than are known: run `make fix`",
        "swapped.py: has fewer waits than are known: run `make fix`",
    ]


def test_the_list_only_gets_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "KNOWN", tmp_path / "known.yaml")
    waits.write({"more.py": ["x"], "fewer.py": ["x", "y", "y"], "gone.py": ["x"]})
    there = {"more.py": [Wait(1, "x")] * 2, "fewer.py": [Wait(1, "y")], "new.py": [Wait(1, "x")]}
    monkeypatch.setattr(waits, "find_all", lambda: there)
    waits.main()
    assert load() == {"fewer.py": ["y"], "more.py": ["x"]}
    assert shortened({"gone.py": ["x"]}, {}) == {}


def _inside(source: str) -> str:
    """Return the source as a module: `await` and `async with` need a function around them."""
    if not source.startswith(("await", "async with")):
        return source
    return "async def f():\n    " + source


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
