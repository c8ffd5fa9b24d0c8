"""The pages for contributors, docs/how-to/add-*.md, quote the code as it is, and name files and tests that exist."""

import re
from pathlib import Path

import pytest

from tests.form.quotes import QUOTE, pages, refreshed

REPOSITORY = Path(__file__).parents[2]
HOW_TO = REPOSITORY / "docs/how-to"
PAGES = sorted(HOW_TO.glob("add-*.md"))
EXAMPLES = ("sglang",)
"""Names of what a reader would add: no such file is there yet."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_each_block_of_the_page_is_a_quote(page: Path) -> None:
    text = page.read_text()
    assert len(list(QUOTE.finditer(text))) == text.count("```") / 2 > 0


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.stem))
def test_what_the_page_quotes_is_up_to_date(page: Path) -> None:
    assert page.read_text() == refreshed(page.read_text()), "run `make fix`"


@each_page
def test_the_files_that_the_page_names_are_there(page: Path) -> None:
    paths = re.findall(r"`((?:src|services|tests|docs|deploy|docker|proto)/[\w./-]+)`", page.read_text())
    assert paths
    assert [path for path in paths if not (REPOSITORY / path).exists() and not _is_example(path)] == []


@each_page
def test_the_tests_that_the_page_names_are_there(page: Path) -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in tests, name


def test_the_tables_of_the_rules_in_cel_are_there() -> None:
    crd = (REPOSITORY / "tests/envtest/test_crd.py").read_text()
    assert "\nFINE" in crd
    assert "\nWRONG" in crd


@pytest.mark.parametrize(
    "page", [*sorted(HOW_TO.glob("*.md")), REPOSITORY / "examples/README.md"], ids=lambda page: page.stem
)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def _is_example(path: str) -> bool:
    return any(name in path for name in EXAMPLES)
