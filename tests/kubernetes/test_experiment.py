"""From `helm install` to a model that was trained, all of it inside the cluster."""

import sys
from pathlib import Path

import pytest

from tests.kubernetes.conftest import RELEASE
from tests.support.cluster import WAIT, Namespace, command
from tests.support.experiments import SORT_DIGITS, Running, applied, assert_balanced, sort_digits
from tests.support.pages import HOW_TO, write_files

WITHOUT_BYTECODE = """
import os, sys, nexrl_operator.server
cached = [module.__cached__ for module in sys.modules.values() if getattr(module, "__cached__", None)]
print(*(file for file in cached if not os.path.exists(file)))
"""


def test_release_passes_its_own_tests(namespace: Namespace) -> None:
    namespace.test(RELEASE)


def test_no_module_is_compiled_at_each_start(namespace: Namespace) -> None:
    operator = f"deployment/{RELEASE}-operator"
    assert namespace.kubectl("exec", operator, "--", "python3", "-c", WITHOUT_BYTECODE).split() == []


@pytest.mark.guide("A1", "R2")
@pytest.mark.soak
def test_example_is_trained(namespace: Namespace) -> None:
    namespace.kubectl("apply", "--filename", str(SORT_DIGITS))
    ended = Running(namespace, "sort-digits").until("Complete")
    assert ended["status"]["phase"] == "Succeeded"
    assert ended["status"]["progress"]["step"] == 450
    assert float(ended["status"]["progress"]["reward"]) >= 0.9
    assert_balanced(ended)
    namespace.kubectl("delete", "experiment", "sort-digits", WAIT)


@pytest.mark.guide("A1", "R2")
def test_first_steps_of_the_example_teach_it_something(namespace: Namespace) -> None:
    with applied(namespace, sort_digits("first-steps", trainer__steps=100)) as running:
        ended = running.until("Complete")
        assert ended["status"]["phase"] == "Succeeded"
        assert ended["status"]["progress"]["step"] == 100
        assert float(ended["status"]["progress"]["reward"]) >= 0.2
        assert_balanced(ended)


@pytest.mark.vllm
@pytest.mark.soak
def test_example_is_trained_on_vllm(namespace: Namespace) -> None:
    item = sort_digits("on-vllm", inference__backend="vllm", trainer__steps=20)
    with applied(namespace, item) as running:
        assert_balanced(running.until("Complete"))


@pytest.mark.parametrize(("page", "name"), [("write-a-loss", "own-loss"), ("write-a-rollout-worker", "own-worker")])
@pytest.mark.soak
def test_submitted_code_of_the_user_trains_on_the_cluster(
    namespace: Namespace, tmp_path: Path, page: str, name: str
) -> None:
    write_files((HOW_TO / f"{page}.md").read_text(), tmp_path)
    nexrl = (sys.executable, "-m", "nexrl.cli")
    command(*nexrl, "submit", str(tmp_path / "experiment.yaml"), "--namespace", namespace.name)
    ended = Running(namespace, name).until("Complete")
    assert ended["status"]["progress"]["step"] == 4
    assert_balanced(ended)
    namespace.kubectl("delete", "experiment", name, WAIT)
