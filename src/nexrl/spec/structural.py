"""A section as a structural schema of Kubernetes: OpenAPI v3 without references and unions, with rules in CEL."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.spec.choices import OWN, Node, defaults_of, described, variants_with, written_out_of
from nexrl.spec.schema import SchemaView, all_keys

_KEYWORDS = (
    *("type", "description", "default", "enum", "format", "pattern", "minimum", "maximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "required"),
)


@dataclass(frozen=True)
class Rule:
    """A CEL rule at a section of the spec; `field`, relative to that section, is where it is reported."""

    section: str
    field: str
    rule: str
    message: str


def add_rule(spec: dict[str, Any], rule: Rule) -> None:
    """Adds the rule to its section of the structural schema of the spec."""
    node = spec
    for part in filter(None, rule.section.split(".")):
        node = node["properties"][part]
    node.setdefault("x-kubernetes-validations", []).append(_cel(rule.rule, rule.message, rule.field))


def structural(node: Node, view: SchemaView) -> dict[str, Any]:
    """Returns the node as a structural schema."""
    default = node.get("default")
    # With a default, a null must be kept: it means something else than a key that is not there.
    is_nullable = default is not None and {"type": "null"} in node.get("anyOf", ())
    is_section_with_defaults = "default" not in node
    node = view.resolve(node)
    kept = {key: node[key] for key in _KEYWORDS if key in node and key not in ("default", "required")}
    if node.get("required"):
        kept["required"] = node["required"]
    if "const" in node:
        kept["enum"] = [node["const"]]
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in node:
            kept |= {limit: node[bound], bound: True}
    if default is not None:
        kept["default"] = default
    if is_nullable:
        kept["nullable"] = True
    if node.get("type") == "array":
        kept["items"] = structural(node["items"], view)
        kept.setdefault("maxItems", 64)
    if node.get("type") == "object":
        kept |= _mapping(node, view, is_section_with_defaults)
    if node.get("type") == "string" and "enum" not in kept:
        kept.setdefault("maxLength", 1024)
    return kept


def _mapping(node: Node, view: SchemaView, is_section_with_defaults: bool) -> dict[str, Any]:
    if "properties" in node:
        required = node.get("required", [])
        properties = {key: _property(node, key, child, view) for key, child in all_keys(node).items()}
        rules = list(_choice_rules(node))
        # Written out: the API server tries the rules on this default before it fills in the defaults of the keys.
        default = {key: schema["default"] for key, schema in properties.items() if "default" in schema}
        has_default = is_section_with_defaults and not required and not _requires_a_key(node)
        return {
            "properties": properties,
            **({"default": default} if has_default else {}),
            **({"x-kubernetes-validations": rules} if rules else {}),
        }
    patterns = node.get("patternProperties")
    values = next(iter(patterns.values())) if patterns else view.resolve(node.get("additionalProperties", {}))
    if "type" not in values:
        return {"x-kubernetes-preserve-unknown-fields": True}
    return {"additionalProperties": structural(values, view), "default": {}}


def _property(node: Node, key: str, child: Node, view: SchemaView) -> dict[str, Any]:
    """The schema of a key. If variants differ in it, what is common to them; `_choice_rules` has the rest."""
    schema = structural(child, view)
    choice = _choice_with(node, key)
    having = [] if choice is None else [variant["properties"][key] for variant in variants_with(choice, key)]
    alternatives = [structural(one, view) for one in having]
    for bound, widest in (("minimum", min), ("maximum", max)):
        if bound in schema:
            schema[bound] = widest([one[bound] for one in alternatives] or [schema[bound]])
    if having:
        schema["description"] = " ".join(dict.fromkeys(view.resolve(one)["description"] for one in having))
    is_in_all = choice is None or len(having) == len(choice["variants"])
    if key in node.get("required", []) or not is_in_all or len(defaults_of(node, key)) > 1:
        schema.pop("default", None)
    return schema


def _choice_with(node: Node, key: str) -> Node | None:
    return next((choice for choice in node.get("x-choices", []) if variants_with(choice, key)), None)


def _requires_a_key(node: Node) -> bool:
    """True if the default variant has a required key, or there is no default variant."""
    return any(not choice["tag"] for choice in node.get("x-choices", []))


# rules of choices ----------------------------------------------------------------------------------------------------


def _choice_rules(node: Node) -> Iterator[dict[str, Any]]:
    """Which keys the chosen variants have and need."""
    for choice in node.get("x-choices", []):
        if not choice["tag"]:
            yield _exactly_one(choice)
        for key in dict.fromkeys(key for variant in choice["variants"] for key in variant["properties"]):
            yield from _key_rules(node, choice, key)


def _exactly_one(choice: Node) -> dict[str, Any]:
    keys = [variant["value"] for variant in choice["variants"]]
    present = ", ".join(f"has(self.{key})" for key in keys)
    message = f"give exactly one of {' and '.join(keys)}"
    return _cel(f"[{present}].filter(is_there, is_there).size() == 1", message, keys[-1])


def _key_rules(node: Node, choice: Node, key: str) -> Iterator[dict[str, Any]]:
    tag, having = choice["tag"], variants_with(choice, key)
    needing = [variant for variant in having if key in variant["required"]]
    if len(having) < len(choice["variants"]) and key not in [variant["value"] for variant in having if not tag]:
        # Stored objects contain old defaults of other variants, which reading drops. The types refuse null.
        written_out = [default for default in written_out_of(node, key) if default is not None]
        old = "".join(f" || self.{key} == {_literal(default)}" for default in written_out)
        rule = f"!has(self.{key}) || {_is_chosen(tag, having)}{old}"
        yield _cel(rule, f"only {described(tag, having)} has this key", key)
    if needing and tag:
        rule = f"has(self.{key}) || !({_is_chosen(tag, needing)})"
        yield _cel(rule, f"required with {described(tag, needing)}", key)
    for variant in having:
        yield from _bound_rules(choice, variant, key)


def _bound_rules(choice: Node, variant: Node, key: str) -> Iterator[dict[str, Any]]:
    """The bounds of a key in one variant, where another one has wider ones."""
    own = variant["properties"][key]
    for bound, sign, widest in (("minimum", ">=", min), ("maximum", "<=", max)):
        bounds = [one["properties"][key].get(bound) for one in variants_with(choice, key)]
        if None not in bounds and own[bound] != widest(bounds):
            rule = f"!has(self.{key}) || !({_is_chosen(choice['tag'], [variant])}) || self.{key} {sign} {own[bound]}"
            yield _cel(rule, f"must be {sign} {own[bound]} with {described(choice['tag'], [variant])}", key)


def _is_chosen(tag: str, variants: Sequence[Node]) -> str:
    """CEL: one of the variants is chosen."""
    values = [variant["value"] for variant in variants]
    if not tag:
        return " || ".join(f"has(self.{value})" for value in values)
    named = [value for value in values if value != OWN]
    conditions = [f"self.{tag} in {named}"] if named else []
    return " || ".join([*conditions, *([f"self.{tag}.contains(':')"] if OWN in values else [])])


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _cel(rule: str, message: str, field: str) -> dict[str, Any]:
    return {"rule": rule, "message": message, "fieldPath": f".{field}", "reason": "FieldValueInvalid"}
