"""Sections that depend on a choice: `VariantSection` is the union of its subclasses, flat in the file.

A root class has the keys that all variants share, and names in `TAGS` the keys that choose. Each subclass without
subclasses is a variant: it narrows one tag to its value (or, for the user's variant, to a `module:name`) and adds the
keys that only it has. With two tags a section has one variant of each. Without tags, the variant is the one whose
required key is given, as in `model: {path: …}`.

CEL rules, reference page and error messages read the node that `_json_schema` returns.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, ClassVar, Self, cast, get_args

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from nexrl.spec.choices import OWN, is_chosen
from nexrl.spec.section import CODE, Mark, NameOrReference, Section


def _is_union(section: type["VariantSection"]) -> bool:
    return bool(section.__subclasses__()) and VariantSection in section.__bases__


class VariantSection(Section):
    """The union of the subclasses of its subclass."""

    model_config = ConfigDict(defer_build=True)  # the union has a schema of each class; few are used by themselves

    TAGS: ClassVar[tuple[str, ...]] = ()
    _is_combination: ClassVar[bool] = False

    def __new__(cls, **keys: Any) -> Self:
        return cast(Self, super().__new__(_combinations(cls)[_chosen(cls, keys)] if _is_union(cls) else cls))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if not _is_union(cls):
            return handler(source)
        return core_schema.tagged_union_schema(
            {name: handler.generate_schema(variant) for name, variant in _combinations(cls).items()},
            discriminator=lambda value: _chosen(cls, value),
            metadata={"pydantic_js_functions": [lambda schema, handler: _json_schema(cls, schema, handler)]},
        )


def variants(root: type[VariantSection]) -> dict[str, list[type[VariantSection]]]:
    """The variants of a section by tag; a section without tags has them under the empty tag."""
    by_tag: dict[str, list[type[VariantSection]]] = {tag: [] for tag in root.TAGS or [""]}
    for leaf in _leaves(root):
        by_tag[next((tag for tag in root.TAGS if tag in leaf.__annotations__), "")].append(leaf)
    return by_tag


def value_of(variant: type[VariantSection], tag: str) -> str | None:
    """The value that chooses the variant; None for the user's, which a `module:name` chooses."""
    values = get_args(variant.model_fields[tag].annotation)
    return values[0] if values else None


def _leaves(section: type[VariantSection]) -> list[type[VariantSection]]:
    children = [child for child in section.__subclasses__() if not child._is_combination]
    return [leaf for child in children for leaf in _leaves(child)] or [section]


@cache
def _combinations(root: type[VariantSection]) -> Mapping[str, type[VariantSection]]:
    """The classes of the union: with one tag its variants, with more a class for each combination."""
    combined: dict[str, type[VariantSection]] = {}
    for leaves in product(*variants(root).values()):
        name = "And".join(leaf.__name__ for leaf in leaves)
        combined[name] = leaves[0]
        if len(leaves) > 1:
            # Named, since pydantic would take a field that two variants have from the first one.
            own: dict[str, Any] = {
                key: (leaf.model_fields[key].annotation, leaf.model_fields[key])
                for tag, leaf in zip(root.TAGS, leaves, strict=True)
                for key in [tag, *_own(leaf)]
            }
            combined[name] = create_model(
                name, __base__=leaves, __doc__=root.__doc__, __module__=root.__module__, **own
            )
            combined[name]._is_combination = True
    return combined


def _chosen(root: type[VariantSection], section: Any) -> str:
    """Return the name of the variant (or combination) that a section chooses.

    If it chooses none, return the first, whose validation reports the error.
    """
    if isinstance(section, VariantSection):
        return type(section).__name__
    given = section if isinstance(section, Mapping) else {}
    return "And".join(_pick(leaves, tag, given).__name__ for tag, leaves in variants(root).items())


def _pick(leaves: Sequence[type[VariantSection]], tag: str, given: Mapping[str, Any]) -> type[VariantSection]:
    default = _default(leaves, tag)
    return next((leaf for leaf in leaves if is_chosen(_value(leaf, tag), tag, given, default)), leaves[0])


def _default(leaves: Sequence[type[VariantSection]], tag: str) -> str | None:
    """The value of the tag in a section without it; None if it must be given."""
    fields = [leaf.model_fields[tag] for leaf in leaves] if tag else []
    return next((field.default for field in fields if not field.is_required()), None)


def _value(leaf: type[VariantSection], tag: str) -> str:
    """What chooses the variant, as the schema has it: the tag's value, or without tags the key that must be given."""
    if tag:
        return value_of(leaf, tag) or OWN
    return next(name for name in _own(leaf) if leaf.model_fields[name].is_required())


def _own(leaf: type[VariantSection]) -> list[str]:
    """Field names that the variant adds or overrides."""
    classes = [section for section in leaf.__mro__ if VariantSection in section.__mro__[2:]]
    names = dict.fromkeys(name for section in reversed(classes) for name in section.__annotations__)
    return [name for name in names if name in leaf.model_fields and name not in leaf.TAGS]


def _json_schema(root: type[VariantSection], schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """One flat mapping; `x-choices` lists, for each tag, its variants and what each adds."""
    nodes = {name: handler.resolve_ref_schema(handler(choice)) for name, choice in schema["choices"].items()}
    choices: list[dict[str, Any]] = [
        {"tag": tag, "variants": [_variant(root, leaf, tag, nodes) for leaf in leaves]}
        for tag, leaves in variants(root).items()
    ]
    own = {key for choice in choices for variant in choice["variants"] for key in variant["properties"]}
    first = next(iter(nodes.values()))
    shared = {key: child for key, child in first["properties"].items() if key not in own}
    tags = {tag: _tag(root, tag) for tag in root.TAGS}
    return {
        "type": "object",
        "about": root.__doc__,
        "properties": {key: tags.get(key, child) for key, child in shared.items()},
        "required": [key for key in first.get("required", []) if key in shared and key not in tags]
        + [tag for tag in tags if "default" not in tags[tag]],
        "additionalProperties": False,
        "x-choices": choices,
    }


def _variant(
    root: type[VariantSection], leaf: type[VariantSection], tag: str, nodes: Mapping[str, Any]
) -> dict[str, Any]:
    node = next(nodes[name] for name, combined in _combinations(root).items() if issubclass(combined, leaf))
    keys = [leaf.model_fields[name].alias or name for name in _own(leaf)]
    required = [key for key in keys if key in node.get("required", [])]
    return {
        "value": _value(leaf, tag),
        "about": _about(leaf),
        "properties": {key: node["properties"][key] for key in keys},
        "required": required,
    }


def _tag(root: type[VariantSection], tag: str) -> dict[str, Any]:
    """The node of a key that chooses."""
    leaves = variants(root)[tag]
    values = [value_of(leaf, tag) for leaf in leaves]
    names = tuple(value for value in values if value is not None)
    meanings = [f"{_value(leaf, tag)}: {_about(leaf)}" for leaf in leaves]
    description = " ".join([root.model_fields[tag].description or "", *meanings])
    node: dict[str, Any] = {"type": "string", "description": description}
    if None in values:
        own = leaves[values.index(None)].model_fields[tag]
        needed = next(mark.value for mark in own.metadata if isinstance(mark, Mark) and mark.key == CODE)
        node |= {"pattern": NameOrReference(names).pattern, "maxLength": 256, "x-names": names, CODE: needed}
    else:
        node["enum"] = list(names)
    default = _default(leaves, tag)
    return node if default is None else {**node, "default": default}


def _about(variant: type[VariantSection]) -> str:
    return " ".join((variant.__doc__ or "").split())
