"""What the repository offers for nodes with GPUs: it renders, and what it asks for is enough."""

from pathlib import Path

import pytest
import yaml

from nexrl.plan.roles import Available, problems, trainer_role
from nexrl.plan.table import MODELS
from nexrl.spec.load import parse_experiment
from tests.support.helm import CHART, KUBERNETES, helm, helms
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


def test_experiment_of_the_page_fits_the_resources_that_it_asks_for() -> None:
    page = (ROOT / "docs/reference/gpus.md").read_text()
    spec = parse_experiment(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]), Path("/")).spec
    available = Available(gpu_bytes=int(0.9 * 80 * GIB), host_bytes=GIB)
    assert trainer_role(SIZE, spec, available).gpus == spec.trainer.processes_per_replica == 8
    assert problems(SIZE, spec, available) == []
