"""Work that parallel test processes share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.once import SharedFailureError, once
from tests.support.patience import LIMIT_SECONDS, eventually_blocking


def test_the_work_is_done_once_and_all_get_its_result(tmp_path: Path) -> None:
    calls: list[int] = []

    def work() -> dict[str, int]:
        calls.append(1)
        return {"steps": 3}

    assert [once(tmp_path / "seen.json", work) for _ in range(3)] == [{"steps": 3}] * 3
    assert len(calls) == 1


def test_a_failure_is_kept_with_its_first_cause_and_not_repeated(tmp_path: Path) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise TimeoutError(f"attempt {len(calls)}")

    with pytest.raises(TimeoutError, match="attempt 1"):
        once(tmp_path / "seen.json", work)
    for _ in range(2):
        with pytest.raises(SharedFailureError, match="TimeoutError: attempt 1"):
            once(tmp_path / "seen.json", work)
    assert len(calls) == 1


def test_those_that_come_during_the_work_wait_for_its_failure(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(LIMIT_SECONDS)
        raise ValueError("the first cause")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(once, tmp_path / "seen.json", work)
        assert begun.wait(LIMIT_SECONDS)
        second = threads.submit(once, tmp_path / "seen.json", lambda: "done again")
        eventually_blocking(second.running)
        may_end.set()
        assert isinstance(first.exception(LIMIT_SECONDS), ValueError)
        assert isinstance(second.exception(LIMIT_SECONDS), SharedFailureError)
