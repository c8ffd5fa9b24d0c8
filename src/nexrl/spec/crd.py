"""The CustomResourceDefinition `Experiment`: `python -m nexrl.spec.crd > deploy/helm/files/experiments.nexrl.dev.yaml`.

Made from the schema of the experiment file. The rules between fields, which the file's validators judge, are CEL here,
and so are those that only a cluster has: what of a running experiment may change.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.spec import yaml_core
from nexrl.spec.experiment import API_VERSION
from nexrl.spec.schema import Node, SchemaView
from nexrl.spec.status_schema import STATUS_SCHEMA

GROUP, _, VERSION = API_VERSION.partition("/")
PLURAL = "experiments"
NEVER = ("model", "data", "trajectoryPool.batchSize", "trajectoryPool.groupSize", "storage", "managedBy")
"""What makes an experiment that one: another needs another name."""
LIVE = (
    "suspend",
    "rollout.replicas",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "controller",
)
"""What may change at any time; it takes effect at once, that of `controller` after the next suspension."""
ROLLING = ("rollout.template", "inference.template")
"""What replaces pods one by one."""

_NAME_CHARACTERS = 40
_KEYWORDS = (
    *("type", "description", "default", "enum", "format", "pattern", "minimum", "maximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "required"),
)


@dataclass(frozen=True)
class Rule:
    """A CEL rule at a section of the spec; `field` is where it is reported, below that section."""

    section: str
    field: str
    rule: str
    message: str


def _only_with(section: str, field: str, condition: str, message: str) -> Rule:
    """`field` is there if and only if the condition holds."""
    return Rule(section, field, f"has(self.{field}) == ({condition})", message)


_SCRATCH = "model.scratch"
RULES: Sequence[Rule] = (
    Rule("model", "scratch", "has(self.path) != has(self.scratch)", "give exactly one of path and scratch"),
    Rule(_SCRATCH, "heads", "self.hiddenSize % (2 * self.heads) == 0", "hiddenSize must be an even multiple of heads"),
    Rule(
        _SCRATCH,
        "alphabet",
        "self.alphabet.split('').all(c, self.alphabet.indexOf(c) == self.alphabet.lastIndexOf(c))",
        "each character once",
    ),
    _only_with(
        "rollout",
        "environment",
        "self.type == 'agent'",
        "rollout.type agent needs environment, and only agent may have one",
    ),
    Rule(
        "rollout",
        "reward",
        "!has(self.reward) || self.type in ['simple', 'single_turn_math']",
        "only types simple and single_turn_math have a reward function",
    ),
    Rule("rollout", "systemPrompt", "!has(self.systemPrompt) || self.chat", "needs rollout.chat: true"),
    Rule(
        "trajectoryPool",
        "groupSize",
        "self.batchSize % self.groupSize == 0",
        "batchSize must be a multiple of groupSize",
    ),
    Rule(
        "weightSync",
        "stalenessThreshold",
        "!has(self.stalenessThreshold) || (self.mode == 'sync') == (self.stalenessThreshold == 0)",
        "must be 0 in mode sync, and 1 or more in other modes",
    ),
    *(
        Rule("inference", field, f"{plain} || self.backend == 'vllm'", "only backend vllm has it")
        for field, plain in {
            "tensorParallel": "self.tensorParallel == 1",
            "dataParallel": "self.dataParallel == 1",
            "vllmArgs": "size(self.vllmArgs) == 0",
            "url": "!has(self.url)",
        }.items()
    ),
    Rule("inference", "apiKeyEnv", "!has(self.apiKeyEnv) || has(self.url)", "needs inference.url"),
    Rule(
        "validation",
        "samplesPerTask",
        "self.samplesPerTask == 1 || self.temperature > 0.0",
        "greedy samples are all alike: 1, or temperature above 0",
    ),
    _only_with(
        "resume",
        "path",
        "self.mode == 'from_path'",
        "resume.mode from_path needs path, and only from_path may have one",
    ),
    Rule(
        "monitor.health",
        "timeoutSeconds",
        "self.timeoutSeconds > self.checkIntervalSeconds",
        "must be above checkIntervalSeconds",
    ),
    Rule(
        "redis",
        "url",
        "!has(self.url) || !self.url.matches('://[^/@]*:[^/@]*@|[?&]password=')",
        "holds a password, and objects are read by many; the password comes from the chart's Secret",
    ),
    Rule("", "code", "self.code.all(name, name.matches('^[A-Za-z_][A-Za-z0-9_]{0,119}[.]py$'))", "names as `task.py`"),
    Rule(
        "",
        "rollout.maxNewTokens",
        "!has(self.model.scratch) || self.rollout.maxNewTokens < self.model.scratch.maxPositions",
        "must be below model.scratch.maxPositions",
    ),
    Rule(
        "",
        "weightSync.inFlight",
        "self.weightSync.inFlight == 'keep' || self.inference.backend == 'vllm'",
        "needs inference.backend vllm; builtin can keep",
    ),
    Rule(
        "",
        "inference.maxTokensPerRow",
        "self.rollout.maxNewTokens < self.inference.maxTokensPerRow",
        "must be above rollout.maxNewTokens",
    ),
    Rule(
        "",
        "inference.maxTokensPerRow",
        "self.inference.maxTokensPerRow <= self.trainer.maxTokensPerMicroBatch",
        "must not exceed trainer.maxTokensPerMicroBatch",
    ),
)


def crd() -> dict[str, Any]:
    """The definition, ready to be applied."""
    view = SchemaView()
    spec = _structural(view.at(("spec",), {}), view)
    for rule in [*RULES, *_change_rules(spec)]:
        _add_rule(spec, rule)
    root = {
        "type": "object",
        "description": "One training run of a language model by reinforcement learning.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": STATUS_SCHEMA,
        },
        "x-kubernetes-validations": [
            {
                "rule": f"size(self.metadata.name) <= {_NAME_CHARACTERS}"
                " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "message": f"metadata.name: at most {_NAME_CHARACTERS} lower-case letters, digits and dashes, a letter "
                "first: objects are named after it",
                "reason": "FieldValueInvalid",
            }
        ],
    }
    return _definition(root)


def _definition(root: Node) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": "Experiment",
                "plural": PLURAL,
                "singular": "experiment",
                "shortNames": ["exp"],
                "categories": ["all", "nexrl"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "additionalPrinterColumns": list(_columns()),
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.rollout.replicas",
                            "statusReplicasPath": ".status.rollout.replicas",
                            "labelSelectorPath": ".status.rollout.selector",
                        },
                    },
                }
            ],
        },
    }


def _columns() -> Iterator[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    for name, kind, path, priority in (
        ("Phase", "string", ".status.phase", 0),
        ("Step", "integer", ".status.progress.step", 0),
        ("Version", "integer", ".status.progress.policyVersion", 0),
        ("Staleness", "string", ".status.progress.staleness", 0),
        ("Rollouts", "integer", ".status.rollout.readyReplicas", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Steps", "integer", ".status.progress.totalSteps", 1),
        ("Reward", "string", ".status.progress.reward", 1),
        ("Queue", "string", r".metadata.labels.kueue\.x-k8s\.io/queue-name", 1),
        ("Reason", "string", f"{ready}.reason", 1),
        ("Message", "string", f"{ready}.message", 1),
    ):
        yield {"name": name, "type": kind, "jsonPath": path, "priority": priority}


# the structural schema -----------------------------------------------------------------------------------------------


def _structural(node: Node, view: SchemaView) -> dict[str, Any]:
    """The node as OpenAPI v3 without references, unions or anything else that a structural schema refuses."""
    default = node.get("default")
    is_section_with_defaults = "$ref" in node and "default" not in node
    node = view.resolve(node)
    if "oneOf" in node:
        return _union(node, view)
    kept = {key: node[key] for key in _KEYWORDS if key in node and key != "default"}
    if "const" in node:
        kept["enum"] = [node["const"]]
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in node:
            kept |= {limit: node[bound], bound: True}
    if default is not None:
        kept["default"] = default
    if node.get("type") == "array":
        kept["items"] = _structural(node["items"], view)
        kept.setdefault("maxItems", 64)
    if node.get("type") == "object":
        kept |= _mapping(node, view, is_section_with_defaults)
    if node.get("type") == "string" and "enum" not in kept:
        kept.setdefault("maxLength", 1024)
    return kept


def _mapping(node: Node, view: SchemaView, is_section_with_defaults: bool) -> dict[str, Any]:
    if "properties" in node:
        required = node.get("required", [])
        properties = {
            key: _without_default(_structural(child, view)) if key in required else _structural(child, view)
            for key, child in node["properties"].items()
        }
        # Written out: the rules of a section are tried on its default before the defaults of its keys are filled in.
        default = {key: schema["default"] for key, schema in properties.items() if "default" in schema}
        return {"properties": properties, **({"default": default} if is_section_with_defaults and not required else {})}
    patterns = node.get("patternProperties")
    values = next(iter(patterns.values())) if patterns else view.resolve(node.get("additionalProperties", {}))
    if "type" not in values:
        return {"x-kubernetes-preserve-unknown-fields": True}
    return {"additionalProperties": _structural(values, view), "default": {}}


def _without_default(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "default"}


def _union(node: Node, view: SchemaView) -> dict[str, Any]:
    """All keys of all variants in one mapping; which of them a variant has and needs is left to rules."""
    variants = {v["properties"]["type"]["const"]: v for v in view.variants(node)}
    properties: dict[str, Any] = {}
    for variant in variants.values():
        for key, child in variant["properties"].items():
            schema = _structural(child, view)
            same = properties.setdefault(key, schema)
            if key != "type" and (
                same.get("default") != schema.get("default") or _variants_with(variants, key) < len(variants)
            ):
                properties[key] = _without_default(same)
    properties["type"] = {"type": "string", "enum": list(variants), "description": "Kind of source."}
    return {
        "type": "object",
        "description": node["description"],
        "required": ["type"],
        "properties": properties,
        "x-kubernetes-validations": list(_union_rules(variants)),
    }


def _variants_with(variants: Mapping[str, Node], key: str) -> int:
    return sum(key in variant["properties"] for variant in variants.values())


def _union_rules(variants: Mapping[str, Node]) -> Iterator[dict[str, Any]]:
    keys = dict.fromkeys(key for variant in variants.values() for key in variant["properties"] if key != "type")
    for key in keys:
        having = [name for name, variant in variants.items() if key in variant["properties"]]
        needing = [name for name in having if key in variants[name].get("required", [])]
        if len(having) < len(variants):
            yield _cel(f"!has(self.{key}) || self.type in {having}", f"only type {' and '.join(having)} has it", key)
        if needing:
            yield _cel(f"has(self.{key}) || !(self.type in {needing})", f"type {' and '.join(needing)} needs it", key)


# rules ---------------------------------------------------------------------------------------------------------------


def _change_rules(spec: Node) -> Iterator[Rule]:
    """What of an experiment may change, and when."""
    for path in NEVER:
        yield Rule("", path, _unchanged(path, spec), f"spec.{path} never changes; create a new Experiment")
    for path in _only_while_suspended(spec):
        rule = f"self.suspend || oldSelf.suspend || {_unchanged(path, spec)}"
        yield Rule("", path, rule, f"set spec.suspend to true to change spec.{path}")


def _only_while_suspended(spec: Node) -> Iterator[str]:
    """The largest parts of the spec that hold nothing that may change at other times, or never."""
    special = (*NEVER, *LIVE, *ROLLING)
    for key, child in spec["properties"].items():
        if key in special:
            continue
        if not any(path.startswith(f"{key}.") for path in special):
            yield key
            continue
        yield from (f"{key}.{inner}" for inner in child["properties"] if f"{key}.{inner}" not in special)


def _unchanged(path: str, spec: Node) -> str:
    section, _, key = path.rpartition(".")
    node = spec
    for part in path.split("."):
        node = node["properties"][part]
    new, old = (f"{self}.{section}" if section else self for self in ("self", "oldSelf"))
    is_always_there = "default" in node or key in (spec if not section else spec["properties"][section]).get(
        "required", []
    )
    if is_always_there:
        return f"{new}.{key} == {old}.{key}"
    # The rule is at the parent, since one at the field itself would not see it come or go.
    return f"has({new}.{key}) == has({old}.{key}) && (!has({new}.{key}) || {new}.{key} == {old}.{key})"


def _add_rule(spec: dict[str, Any], rule: Rule) -> None:
    node = spec
    for part in filter(None, rule.section.split(".")):
        node = node["properties"][part]
    node.setdefault("x-kubernetes-validations", []).append(_cel(rule.rule, rule.message, rule.field))


def _cel(rule: str, message: str, field: str) -> dict[str, Any]:
    return {"rule": rule, "message": message, "fieldPath": f".{field}", "reason": "FieldValueInvalid"}


def crd_file() -> str:
    """The definition as YAML, with where it comes from."""
    return f"# Generated by `python -m nexrl.spec.crd`; edit src/nexrl/spec instead.\n{yaml_core.dump(crd())}"


if __name__ == "__main__":
    sys.stdout.write(crd_file())
