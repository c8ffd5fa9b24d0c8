"""Gateways of `rollout.type: external`, which agents of other pods call."""

from typing import Any

from nexrl.spec import parse_experiment
from nexrl_operator.children import Renderer
from nexrl_operator.objects import RUN_FOLDER, Owner
from tests.support.kubelet import experiment_object, operator_settings

Object = dict[str, Any]


def test_agents_of_other_pods_reach_the_gateways_of_an_experiment_that_has_them_and_no_others() -> None:
    def reached(kind: str) -> tuple[set[str], list[Object]]:
        experiment = parse_experiment(
            experiment_object("x", "rl", rollout={"type": kind, "maxNewTokens": 8}), RUN_FOLDER
        )
        renderer = Renderer(Owner("rl", "x", "3f0c-uid"), experiment, operator_settings())
        made = {item["metadata"]["name"]: item for item in [*renderer.foundation(), *renderer.workloads(1).values()]}
        rules = made["x-pods"]["spec"]["ingress"]
        ports = {port["name"] for port in made["x-rollout"]["spec"]["template"]["spec"]["containers"][0]["ports"]}
        return ports, [rule for rule in rules if "agents-of" in str(rule)]

    ports, (agents,) = reached("external")
    assert "http" in ports
    assert agents["from"] == [{"podSelector": {"matchLabels": {"nexrl.dev/agents-of": "x"}}}]
    assert [port["port"] for port in agents["ports"]] == [50051, 50052, 8000]
    ports, none = reached("simple")
    assert ("http" in ports, none) == (False, [])
