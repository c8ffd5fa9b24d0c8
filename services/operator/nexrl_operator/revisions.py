"""Digests of the parts of a spec that objects are made from. Pure.

An object keeps its digest as an annotation and is applied again only when the digest differs. The digest covers the
user's spec, not the rendered object: an upgrade of the operator restarts nothing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import reduce

from pydantic.alias_generators import to_camel, to_snake

from nexrl.components import BY_NAME, WITH_PODS
from nexrl.spec import Experiment
from nexrl.spec.marks import may_change
from nexrl.spec.section import LIVE, written
from nexrl_operator.objects import GROUP, Object

REVISION = f"{GROUP}/revision"
"""Annotation with the digest."""
RENDERED = f"{GROUP}/rendered"
"""Annotation with the digest of the whole object as it was rendered. It differs after an upgrade of the operator."""
CURRENT = f"{GROUP}/current"
"""Annotation of the ConfigMap with the digest of its content, which follows changes of the spec while the pods run."""
CONFIGURATION_FILE = "experiment.yaml"
_CHANGING = (*may_change(LIVE), *(f"{to_camel(component.section)}.template" for component in WITH_PODS))


def configuration_revision(experiment: Experiment) -> str:
    """Digest of the configuration that all pods read."""
    # Without defaults: a default that another version adds or changes must not change a running experiment.
    spec = experiment.spec.model_dump(mode="json", exclude_defaults=True)
    _drop_changing(spec, to_snake)
    return digest({section: value for section, value in spec.items() if value != {}})


def configuration_digests(experiment: Experiment, data: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations of a ConfigMap with the digests of its `data`, which is the resolved `experiment`.

    RENDERED leaves out what may change while the pods run: it differs only after an upgrade or a restart. CURRENT is of
    everything.
    """
    document = written(experiment)
    _drop_changing(document["spec"], str)
    files = {name: text for name, text in data.items() if name != CONFIGURATION_FILE}
    return {RENDERED: digest([document, files]), CURRENT: digest(data)}


def _drop_changing(spec: Object, name_of: Callable[[str], str]) -> None:
    """Remove from a spec, whose keys are `name_of` those of the file, what may change while the pods run."""
    for path in _CHANGING:
        *sections, key = map(name_of, path.split("."))
        reduce(lambda section, name: section.get(name) or {}, sections, spec).pop(key, None)


def template_revision(experiment: Experiment, component: str) -> str:
    """Digest of the pod template that the user gives for a component."""
    section = getattr(experiment.spec, BY_NAME[component].section)
    template = section.template.model_dump(mode="json", exclude_defaults=True) if section.template else None
    return digest(template)


def revision_of(item: Object) -> str:
    """Return the digest that an object was made from; "" if it has none."""
    return str(item["metadata"].get("annotations", {}).get(REVISION, ""))


def with_rendered_digest(item: Object) -> Object:
    """Return the object with the digest of its own content as an annotation."""
    metadata = item["metadata"]
    made = content(item)
    # Without the number of pods, which is scaled without applying the object.
    made["spec"] = {key: value for key, value in made.get("spec", {}).items() if key != "replicas"}
    annotations = {**metadata.get("annotations", {}), RENDERED: digest(made)}
    return {**item, "metadata": {**metadata, "annotations": annotations}}


def is_rendered_alike(live: Object, rendered: Object) -> bool:
    """Return whether `live` was applied from the same rendering, whatever has happened to it since."""
    digests = [item["metadata"].get("annotations", {}).get(RENDERED) for item in (live, rendered)]
    return digests[0] is not None and digests[0] == digests[1]


def is_replaced_by_hand(live: Object) -> bool:
    """Return whether the object lacks the digest that each version of the operator writes."""
    return RENDERED not in live["metadata"].get("annotations", {})


def is_outdated(live: Object, rendered: Object) -> bool:
    """Return whether the ConfigMap `live` was rendered alike, before a change of the spec that takes effect at once."""
    digests = [item["metadata"].get("annotations", {}).get(CURRENT) for item in (live, rendered)]
    return is_rendered_alike(live, rendered) and digests[0] != digests[1]


def content(item: Object) -> Object:
    """Return what an object asks for: its fields without metadata and status."""
    return {key: value for key, value in item.items() if key not in ("apiVersion", "kind", "metadata", "status")}


def content_digest(item: Object) -> str:
    """Digest of what an object asks for."""
    return digest(content(item))


def digest(value: object) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
