"""Gateways of `rollout.type: external`, which agents of other pods call."""

from typing import Any

from nexrl.spec import parse_experiment
from nexrl_operator.children import Renderer
from nexrl_operator.objects import RUN_FOLDER, Owner
from tests.support.kubelet import experiment_object, operator_settings

Object = dict[str, Any]


def objects(kind: str) -> dict[str, Object]:
    """Return the objects of an experiment of this rollout.type, by name."""
    experiment = parse_experiment(experiment_object("x", "rl", rollout={"type": kind, "maxNewTokens": 8}), RUN_FOLDER)
    made = Renderer(Owner("rl", "x", "3f0c-uid"), experiment, operator_settings())
    return {item["metadata"]["name"]: item for item in [*made.foundation(), *made.workloads(1).values()]}


def ports(workload: Object) -> set[str]:
    return {port["name"] for port in workload["spec"]["template"]["spec"]["containers"][0]["ports"]}


def test_agents_of_other_pods_reach_the_gateways_of_an_experiment_and_no_other_pod_of_it() -> None:
    made = objects("external")
    assert "http" in ports(made["x-rollout"])
    spec = made["x-agents"]["spec"]
    labels = made["x-rollout"]["spec"]["template"]["metadata"]["labels"].items()
    others = (made[name]["spec"]["template"]["metadata"]["labels"].items() for name in ("x-trainer-1", "x-inference"))
    selected = spec["podSelector"]["matchLabels"].items()
    assert selected <= labels
    assert not any(selected <= each for each in others)
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"nexrl.dev/agents-of": "x"}}}]
    assert [port["port"] for port in rule["ports"]] == [50051, 50052, 8000]
    assert "agents-of" not in str(made["x-pods"])


def test_an_experiment_without_gateways_lets_no_agent_in() -> None:
    made = objects("simple")
    assert "http" not in ports(made["x-rollout"])
    assert "x-agents" not in made
