"""References to user code: where Python looks for its modules."""

import importlib
import sys
from pathlib import Path

import pytest

from nexrl.code_reference import load_reference


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_function_may_import_its_siblings_when_it_runs(tmp_path: Path) -> None:
    (tmp_path / "imports_when_called.py").write_text(
        "def f():\n    import its_sibling\n    return its_sibling.ANSWER\n"
    )
    (tmp_path / "its_sibling.py").write_text("ANSWER = 42\n")
    function = load_reference("imports_when_called:f", tmp_path)
    assert callable(function)
    assert function() == 42


def test_a_module_of_the_user_comes_first_when_user_code_is_loaded_and_last_afterwards(tmp_path: Path) -> None:
    for owner in ("user", "library"):
        (tmp_path / owner).mkdir()
        (tmp_path / owner / "module_of_both.py").write_text(f"OWNER = {owner!r}\n")
    sys.path.append(str(tmp_path / "library"))
    assert load_reference("module_of_both:OWNER", tmp_path / "user") == "user"
    del sys.modules["module_of_both"]
    assert importlib.import_module("module_of_both").OWNER == "library"


def test_a_folder_is_put_on_the_path_once(tmp_path: Path) -> None:
    for _ in range(2):
        load_reference("json:loads", tmp_path)
    assert sys.path.count(str(tmp_path.resolve())) == 1
