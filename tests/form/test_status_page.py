"""docs/reference/status.md names the conditions, phases and fields of the definition of Experiment, all of them."""

import re

from nexrl.spec.status_schema import STATUS_SCHEMA
from tests.support.marks import ROOT

PROPERTIES = STATUS_SCHEMA["properties"]


def _named(section: str) -> list[str]:
    """Return the names in the first column of a section's table."""
    page = (ROOT / "docs/reference/status.md").read_text()
    rows = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if row.startswith("|") else "")]


def _listed(field: str) -> set[str]:
    """Return the words in the description of a field that begin with a capital letter."""
    return set(re.findall(r"\b[A-Z]\w+", PROPERTIES[field]["description"]))


def test_the_page_names_each_field_of_the_status_once() -> None:
    assert sorted([*_named("Other fields"), "phase", "conditions"]) == sorted(PROPERTIES)


def test_the_page_names_the_conditions_and_phases_of_the_definition() -> None:
    assert sorted(_named("Conditions")) == sorted(_listed("conditions"))
    assert sorted(_named("Phase")) == sorted(_listed("phase"))
