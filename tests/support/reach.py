"""What code in each container of a release reaches: as SECURITY.md says, and as a probe in that container finds."""

import base64
import inspect
import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nexrl.components import COMPONENTS
from nexrl_operator.pods import container_of
from tests.support import reach_probe
from tests.support.cluster import Namespace, Object
from tests.support.experiments import Running

PAGE = Path(__file__).parents[2] / "SECURITY.md"
TABLE = re.compile(r"^\| what \| reached by code in \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", re.M)
ROW = re.compile(r"^\| (.+) \| (.+) \|$", re.M)
AT_ONCE = 5
"""Probes that run together. Most of their time is waiting for connections that nobody answers."""
OF_EXPERIMENT = tuple(component.name for component in COMPONENTS)
GROUPS = {"every container of an experiment": OF_EXPERIMENT, "none": ()}
FACTS = {
    "is_user_code": "runs code of the user (`spec.code`)",
    "capabilities": "has a Linux capability",
    "may_gain_rights": "may gain rights through a setuid program",
    "sees": "sees processes of another container in its pod",
    "reads_environment_of": "reads the environment of those processes",
    "may_end": "may end those processes",
}
"""What is said of a container if the field of its report is not empty."""
RIGHTS = {
    "tokenreviews": "a token with the right to create TokenReviews",
    "secrets": "a token with the [rights of the operator](docs/how-to/kubernetes.md#rights)",
}
"""What is said of a container whose token may touch the resource."""


@dataclass(frozen=True)
class Place:
    """A container of the cluster."""

    namespace: Namespace
    pod: str
    container: str

    def ask(self, program: ModuleType, asked: Object) -> Any:
        """Run a module in the container with its own Python: JSON on stdin, and returned from stdout."""
        where = ("exec", "--stdin", self.pod, "--container", self.container)
        answer = self.namespace.kubectl(
            *where, "--", "python3", "-c", inspect.getsource(program), text=json.dumps(asked)
        )
        return json.loads(answer)


@dataclass(frozen=True)
class Question:
    """What the probe looks for, by row of the table."""

    addresses: Mapping[str, Collection[str]]
    """host:port. A container opens either all of a row or none."""
    secrets: Mapping[str, Collection[bytes]]

    def rows(self, name: str, place: Place) -> set[str]:
        """Return the rows of the table that are true of the container `name`."""
        report = self._report(name, place)
        rights = set(report["rights"])
        rows = {row for row in self.addresses if self._are_open(row, set(report["open"]))}
        rows |= set(report["secrets"])
        rows |= {f"writes `{path}`" for path in report["writes"]}
        rows |= {text for field, text in FACTS.items() if report[field]}
        rows |= {text for resource, text in RIGHTS.items() if resource in rights}
        assert rights <= {"tokenreviews"} or "secrets" in rights, f"{name} has rights that no row names: {rights}"
        return rows | {f"is user {report['user']}"}

    def _report(self, name: str, place: Place) -> Object:
        asked = {
            "addresses": sorted({address for addresses in self.addresses.values() for address in addresses}),
            "secrets": {row: [*map(_text, secrets)] for row, secrets in self.secrets.items()},
            "others": [other for other in OF_EXPERIMENT if other != name],
        }
        report: Object = place.ask(reach_probe, asked)
        return report

    def _are_open(self, row: str, opened: Collection[str]) -> bool:
        found = {address for address in self.addresses[row] if address in opened}
        assert not found or found == {*self.addresses[row]}, f"{row}: only {found} of {self.addresses[row]}"
        return bool(found)


def promised() -> dict[str, set[str]]:
    """Return the containers by what code in them reaches, as the table of SECURITY.md says."""
    found = TABLE.search(PAGE.read_text())
    assert found, f"{PAGE.name} has no table of what code reaches"
    return {
        what: {name for part in where.split(", ") for name in GROUPS.get(part, (part,))}
        for what, where in ROW.findall(found[1])
    }


def opened(place: Place, addresses: Collection[str]) -> list[str]:
    """Return the addresses, each host:port, to which a container can connect."""
    report = place.ask(reach_probe, {"addresses": [*addresses], "secrets": {}, "others": []})
    found: list[str] = report["open"]
    return found


def measured(question: Question, places: Mapping[str, Place]) -> dict[str, set[str]]:
    """Return the containers by what the probe in them reaches; none for what is reached nowhere."""
    found: dict[str, set[str]] = {row: set() for row in _asked(question)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, rows in zip(places, pool.map(question.rows, places, places.values()), strict=True):
            for row in rows:
                found.setdefault(row, set()).add(name)
    return found


def places_of(running: Running) -> dict[str, Place]:
    """Return one container of each kind in the pods of an experiment."""
    found = {}
    for component in COMPONENTS:
        pod = next(iter(running.pods(component.beside or component.name).values()))
        found[component.name] = Place(running.namespace, pod, container_of(component))
    return found


def with_probe(experiment: Object) -> Object:
    """Have the code of an experiment answer the probe, in each process that imports it: as data, reward, advantage."""
    (module,) = experiment["spec"]["code"]
    experiment["spec"]["code"]["reach_probe.py"] = inspect.getsource(reach_probe)
    experiment["spec"]["code"][module] += ADVANTAGE
    experiment["spec"]["algorithm"]["advantage"] = f"{module.removesuffix('.py')}:advantage"
    return experiment


ADVANTAGE = """

import reach_probe

reach_probe.answer_as_user_code()


def advantage(rewards_B, groups_B):
    return (rewards_B - rewards_B.mean()).astype("float32")
"""


def _asked(question: Question) -> set[str]:
    return {*question.addresses, *question.secrets, *FACTS.values(), *RIGHTS.values()}


def _text(secret: bytes) -> str:
    return base64.b64encode(secret).decode()
