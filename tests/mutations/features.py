"""The mutations of the developer guide: for a row, how its feature is taken out of the code and which test must fail.

They are in rows/*.yaml, one file for each component. `in` names the folder, or the folders, of the component's code;
a mutation may have an `in` of its own. Each mutation names its rows, a `text` that occurs exactly once in the files
under `in`, the text that takes its place (`without`), and the name of a test that is marked with these rows. A file
that moves within the folder and a test that moves anywhere need no change here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.mutations.copies import Mutation
from tests.support.marks import ROOT

FOLDER = Path(__file__).parent / "rows"
SUFFIXES = {".py", ".lua", ".toml", ".yaml"}


@dataclass(frozen=True)
class Feature:
    """One mutation as it is written in the file."""

    rows: tuple[str, ...]
    places: tuple[str, ...]
    text: str
    without: str
    test: str


def load_features() -> list[Feature]:
    """All mutations, file by file."""
    return [feature for path in sorted(FOLDER.glob("*.yaml")) for feature in parse(path.read_text())]


def parse(text: str) -> list[Feature]:
    """The mutations of one file."""
    component = yaml.safe_load(text)
    return [_feature({"in": component["in"], **entry}) for entry in component["mutations"]]


def resolve(features: Sequence[Feature], tests: Mapping[str, Sequence[str]]) -> list[Mutation]:
    """A mutation for each feature, given the tests by row. Raises ValueError that names every one out of date."""
    mutations = []
    problems = []
    for feature in features:
        try:
            mutations.append(_mutation(feature, tests))
        except ValueError as error:
            problems.append(f"{', '.join(feature.rows)}: {error}")
    if problems:
        raise ValueError("tests/mutations/rows is out of date:\n" + "\n".join(problems))
    return mutations


def _feature(entry: Mapping[str, Any]) -> Feature:
    rows = tuple(str(entry["rows"]).replace(",", " ").split())
    places = entry["in"] if isinstance(entry["in"], list) else [entry["in"]]
    return Feature(rows, tuple(places), entry["text"], entry["without"] or "", entry["test"])


def _mutation(feature: Feature, tests: Mapping[str, Sequence[str]]) -> Mutation:
    path = _path_of(feature)
    _check_syntax(path, feature)
    return Mutation(
        ", ".join(feature.rows),
        str(path.relative_to(ROOT)),
        feature.text,
        feature.without,
        _test_of(feature, tests),
    )


def _path_of(feature: Feature) -> Path:
    files = [file for place in feature.places for file in _files(ROOT / place)]
    found = [path for path in files for _ in range(path.read_text().count(feature.text))]
    if len(found) != 1:
        raise ValueError(
            f"{feature.text!r} occurs {len(found)} times in {', '.join(feature.places)}; it must occur once"
        )
    return found[0]


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.suffix in SUFFIXES]


def _check_syntax(path: Path, feature: Feature) -> None:
    """A file that cannot be compiled fails every test, so it would prove nothing."""
    if path.suffix != ".py":
        return
    try:
        compile(path.read_text().replace(feature.text, feature.without), str(path), "exec")
    except SyntaxError as error:
        raise ValueError(f"without {feature.text!r}, {path.name} is not valid Python: {error}") from None


def _test_of(feature: Feature, tests: Mapping[str, Sequence[str]]) -> str:
    name, bracket, parameters = feature.test.partition("[")
    marked = [{test for test in tests.get(row, ()) if test.rpartition("::")[2] == name} for row in feature.rows]
    found = set.intersection(*marked)
    if len(found) != 1:
        raise ValueError(f"{len(found)} tests named {name} are marked with all of these rows; it must be one")
    return found.pop() + bracket + parameters
