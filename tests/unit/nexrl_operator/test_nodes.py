"""The annotation with the nodes that a queue has assigned: anybody who may edit an object can change it."""

import json

import pytest

from nexrl_operator.queueing import NODES, nodes_before

TOLD = {"nodeLabels": [["pool", "a"]], "tolerations": [{"key": "gpu"}]}


def test_what_an_object_says_about_its_nodes_is_read_back() -> None:
    assert nodes_before({"metadata": {"annotations": {NODES: json.dumps(TOLD)}}}) == TOLD
    assert nodes_before({"metadata": {}}) is None


@pytest.mark.parametrize("told", ["oops", "[]", "{}", '{"nodeLabels": [1], "tolerations": []}', '{"nodeLabels": []}'])
def test_what_cannot_be_read_is_as_if_it_were_not_there(told: str) -> None:
    assert nodes_before({"metadata": {"annotations": {NODES: told}}}) is None
