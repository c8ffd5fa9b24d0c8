"""What the specification says of itself: descriptions, bounds, and the reference page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nexrl.spec import json_schema
from nexrl.spec.reference import reference_page
from nexrl.spec.section import Section

REPOSITORY = Path(__file__).parents[2]


def sections_of(section: type[Section]) -> set[type[Section]]:
    return {section}.union(*(sections_of(child) for child in section.__subclasses__()))


def test_every_key_says_what_it_means() -> None:
    for section in sections_of(Section):
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert field.description.endswith("."), f"{section.__name__}.{name}"


def test_every_number_and_list_has_bounds() -> None:
    for name, option in _options():
        if option.get("type") in {"integer", "number"}:
            assert {"minimum", "exclusiveMinimum"} & option.keys(), name
            assert {"maximum", "exclusiveMaximum"} & option.keys(), name
        if option.get("type") == "array":
            assert "maxItems" in option, name


def _options() -> Iterator[tuple[str, dict[str, Any]]]:
    for section, definition in json_schema()["$defs"].items():
        for key, node in definition.get("properties", {}).items():
            for option in node.get("anyOf", [node]):
                yield f"{section}.{key}", option


def test_the_reference_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs/reference/experiment.md").read_text()
    assert page == reference_page(), "run: make spec"
