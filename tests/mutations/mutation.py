"""The mutations: how a feature or a guard is taken out of the code, and which test must fail then.

They are in rows/*.yaml, one file for each component. `in` names the folder, or the folders, of the component's code;
a mutation may have an `in` of its own. A mutation has a `text` that occurs exactly once in the files under `in`, and
the text that takes its place (`without`). It belongs to
- `rows` of the developer guide, and then `test` is the name of a test that is marked with these rows. A file that moves
  within the folder and a test that moves anywhere need no change here;
- or to an `invariant` of the ledger, whose `guard` it takes out, and then `test` is pytest's name of the test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.marks import ROOT, TESTS, find_tests

FOLDER = Path(__file__).parent / "rows"
SUFFIXES = {".py", ".lua", ".toml", ".yaml"}


@dataclass(frozen=True)
class Mutation:
    """`text` of `path`, which occurs once, becomes `without`; then `test`, a pytest node id, must fail."""

    path: str
    text: str
    without: str
    test: str
    rows: tuple[str, ...] = ()
    """Of the developer guide. A guard of the ledger has none."""
    invariant: int = 0
    """Number in ARCHITECTURE.md, section "The ledger: invariants". 0 if it is none."""
    guard: str = ""
    """What the guard of the invariant does."""

    @property
    def what(self) -> str:
        """What is taken out."""
        return f"invariant {self.invariant}: {self.guard}" if self.guard else ", ".join(self.rows)


@cache
def load_mutations() -> Sequence[Mutation]:
    """Return all mutations, file by file. Raises ValueError that names every one out of date."""
    entries = [entry for path in sorted(FOLDER.glob("*.yaml")) for entry in parse(path.read_text())]
    return resolve(entries, find_tests(TESTS))


def parse(text: str) -> list[Mapping[str, Any]]:
    """Return the entries of one file, each with an `in`."""
    component = yaml.safe_load(text)
    return [{"in": component["in"], **entry} for entry in component["mutations"]]


def resolve(entries: Sequence[Mapping[str, Any]], tests: Mapping[str, Sequence[str]]) -> list[Mutation]:
    """Return the mutations, given the tests by row. Raises ValueError that names every one out of date."""
    mutations = []
    problems = []
    for entry in entries:
        try:
            mutations.append(_mutation(entry, tests))
        except ValueError as error:
            problems.append(f"{entry.get('guard') or entry['rows']}: {error}")
    if problems:
        raise ValueError("tests/mutations/rows is out of date:\n" + "\n".join(problems))
    return mutations


def _mutation(entry: Mapping[str, Any], tests: Mapping[str, Sequence[str]]) -> Mutation:
    text, without = entry["text"], entry["without"] or ""
    path = _path_of(text, entry["in"])
    _check_syntax(path, text, without)
    place = str(path.relative_to(ROOT))
    if "guard" in entry:
        return Mutation(place, text, without, entry["test"], invariant=entry["invariant"], guard=entry["guard"])
    rows = tuple(str(entry["rows"]).replace(",", " ").split())
    return Mutation(place, text, without, _marked_test(entry["test"], rows, tests), rows)


def _path_of(text: str, places: str | list[str]) -> Path:
    given = [places] if isinstance(places, str) else places
    files = [file for place in given for file in _files(ROOT / place)]
    found = [path for path in files for _ in range(path.read_text().count(text))]
    if len(found) != 1:
        raise ValueError(f"{text!r} occurs {len(found)} times in {', '.join(given)}; it must occur once")
    return found[0]


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.suffix in SUFFIXES]


def _check_syntax(path: Path, text: str, without: str) -> None:
    """A file that cannot be compiled fails every test, so it would prove nothing."""
    if path.suffix != ".py":
        return
    try:
        compile(path.read_text().replace(text, without), str(path), "exec")
    except SyntaxError as error:
        raise ValueError(f"without {text!r}, {path.name} is not valid Python: {error}") from None


def _marked_test(name: str, rows: Sequence[str], tests: Mapping[str, Sequence[str]]) -> str:
    function, bracket, parameters = name.partition("[")
    marked = [{test for test in tests.get(row, ()) if test.rpartition("::")[2] == function} for row in rows]
    found = set.intersection(*marked)
    if len(found) != 1:
        raise ValueError(f"{len(found)} tests named {function} are marked with all of these rows; it must be one")
    return found.pop() + bracket + parameters
