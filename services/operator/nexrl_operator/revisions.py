"""Digests of the parts of a spec that objects are made from. Pure.

An object keeps its digest as an annotation and is applied again only when the digest differs. The digest covers the
user's spec, not the rendered object: an upgrade of the operator restarts nothing.
"""

import hashlib
import json
from functools import reduce
from typing import Any

from pydantic.alias_generators import to_snake

from nexrl.components import BY_NAME, COMPONENTS
from nexrl.spec import Experiment
from nexrl.spec.marks import may_change
from nexrl.spec.section import LIVE
from nexrl_operator.objects import GROUP

REVISION = f"{GROUP}/revision"
"""Annotation with the digest."""


def configuration_revision(experiment: Experiment) -> str:
    """Digest of the configuration that all pods read."""
    # Without defaults: a default that another version adds or changes must not change a running experiment.
    spec = experiment.spec.model_dump(mode="json", exclude_defaults=True)
    for section in {component.section for component in COMPONENTS}:
        spec.get(section, {}).pop("template", None)
    for path in may_change(LIVE):
        *sections, key = map(to_snake, path.split("."))
        reduce(lambda section, name: section.get(name, {}), sections, spec).pop(key, None)
    return _digest({section: value for section, value in spec.items() if value != {}})


def template_revision(experiment: Experiment, component: str) -> str:
    """Digest of the pod template that the user gives for a component."""
    section = getattr(experiment.spec, BY_NAME[component].section)
    template = section.template.model_dump(mode="json", exclude_defaults=True) if section.template else None
    return _digest(template)


def revision_of(item: dict[str, Any]) -> str:
    """Return the digest that an object was made from; "" if it has none."""
    return str(item["metadata"].get("annotations", {}).get(REVISION, ""))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
