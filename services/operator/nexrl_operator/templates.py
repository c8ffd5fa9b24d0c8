"""Merges a user's template into a rendered object. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

_KEYS = ("name", "mountPath", "key", "topologyKey")
"""Fields that identify the items of a list: containers, volumes, variables; mounts; tolerations; spread constraints."""


def lay_over(rendered: Any, template: Any) -> Any:
    """`rendered` with `template` merged in: mappings by key, lists by the names of their items; others are replaced."""
    if isinstance(rendered, Mapping) and isinstance(template, Mapping):
        return {
            **rendered,
            **{key: lay_over(rendered[key], value) if key in rendered else value for key, value in template.items()},
        }
    if isinstance(rendered, list) and isinstance(template, list):
        key = next((key for key in _KEYS if _is_keyed(rendered, key) and _is_keyed(template, key)), None)
        return template if key is None else _lay_over_items(rendered, template, key)
    return template


def _is_keyed(items: Sequence[Any], key: str) -> bool:
    return all(isinstance(item, Mapping) and isinstance(item.get(key), str) for item in items)


def _lay_over_items(rendered: Sequence[Any], template: Sequence[Any], key: str) -> list[Any]:
    over = {item[key]: item for item in template}
    known = {item[key] for item in rendered}
    merged = [lay_over(item, over[item[key]]) if item[key] in over else item for item in rendered]
    return merged + [item for item in template if item[key] not in known]
