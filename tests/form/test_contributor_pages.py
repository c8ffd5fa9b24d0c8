"""Pages name files and tests that exist; those for contributors, docs/how-to/add-*.md, quote the code as it is."""

import re
from pathlib import Path

import pytest

from tests.form.quotes import QUOTE, pages, refreshed

REPOSITORY = Path(__file__).parents[2]
HOW_TO = REPOSITORY / "docs/how-to"
PAGES = sorted(HOW_TO.glob("add-*.md"))
EXAMPLES = ("sglang",)
"""Names of what a reader would add: no such file is there yet."""

FOLDERS = ("benchmarks", "deploy", "docker", "docs", "examples", "proto", "services", "src", "tests")
EVERY_PAGE = sorted(
    [*REPOSITORY.glob("*.md"), *(page for folder in FOLDERS for page in (REPOSITORY / folder).rglob("*.md"))]
)


def _is_history(page: Path) -> bool:
    """True for pages about the past, which may name files that are gone."""
    return page.name == "CHANGELOG.md" or page.parent.name == "adr"


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_each_block_of_the_page_is_a_quote(page: Path) -> None:
    text = page.read_text()
    assert len(list(QUOTE.finditer(text))) == text.count("```") / 2 > 0


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_the_page_quotes_is_up_to_date(page: Path) -> None:
    assert page.read_text() == refreshed(page.read_text()), "run `make fix`"


@each_page
def test_the_tests_that_the_page_names_are_there(page: Path) -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in tests, name


def test_the_tables_of_the_rules_in_cel_are_there() -> None:
    crd = (REPOSITORY / "tests/envtest/test_crd.py").read_text()
    assert "\nFINE" in crd
    assert "\nWRONG" in crd


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([\w./-]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "page", [page for page in EVERY_PAGE if not _is_history(page)], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", page.read_text())
    assert paths or page not in PAGES
    assert [path for path in paths if not (REPOSITORY / path).exists() and not _is_example(path)] == []


def _is_example(path: str) -> bool:
    return any(name in path for name in EXAMPLES)
