"""Which GPUs the processes of a run on one machine use, without a GPU."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nexrl.gpus import VISIBLE, usable_gpus
from nexrl.local.gpu_assignment import SHARE, assign_gpus
from nexrl.spec import ExperimentSpec, load_experiment
from nexrl.spec.violations import SpecError
from nexrl_inference.vllm import server

VLLM = {"backend": "vllm"}
BASE = {"model": {"path": "x"}, "data": {"type": "mock"}}


def spec(trainer: dict[str, Any] | None = None, inference: dict[str, Any] | None = None) -> ExperimentSpec:
    sections = {**BASE, "trainer": {"steps": 1, **(trainer or {})}, "inference": inference or {}}
    return ExperimentSpec.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize(
    ("visible", "files", "found"),
    [
        (None, [], ()),
        (None, ["nvidia0", "nvidia3", "nvidiactl"], ("0", "1")),  # CUDA counts what a container may use
        ("2, GPU-5f", ["nvidia0"], ("2", "GPU-5f")),
        ("", ["nvidia0"], ()),
        ("1,-1,0", ["nvidia0", "nvidia1"], ("1",)),
    ],
)
def test_usable_are_the_gpus_that_cuda_would_show(
    tmp_path: Path, visible: str | None, files: list[str], found: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert usable_gpus({} if visible is None else {VISIBLE: visible}, tmp_path) == found


@pytest.mark.parametrize(
    ("trainer", "inference", "gpus", "assigned"),
    [
        ({}, VLLM, "", {}),
        ({}, VLLM, "0", {"trainer": "0 0.500", "inference": "0 0.500"}),
        ({}, {}, "0 1", {"trainer": "0", "inference": "1"}),
        ({}, VLLM | {"replicas": 2}, "0", {"trainer": "0 0.333", "inference": "0 0.333", "inference1": "0 0.333"}),
        ({}, VLLM | {"replicas": 2}, "0 1", {"trainer": "0", "inference": "1 0.500", "inference1": "1 0.500"}),
        (
            {"processesPerReplica": 2, "replicas": 2},
            VLLM | {"replicas": 2, "tensorParallel": 2},
            "0 1 2 3 4 5 6 7",
            {"trainer": "0,1", "trainer1": "2,3", "inference": "4,5", "inference1": "6,7"},
        ),
        ({"processesPerReplica": 2}, VLLM, "0 1", {"trainer": "0,1 0.500", "inference": "0 0.500"}),
        ({"device": "cpu"}, VLLM, "0 1", {"inference": "0"}),
        ({"backend": "mock"}, {"device": "cpu"}, "0", {}),
        ({"gpus": [2]}, VLLM | {"gpus": [2, 0]}, "a b c", {"trainer": "c 0.500", "inference": "c 0.500"}),
        ({"gpus": [1]}, VLLM, "a b", {"trainer": "b", "inference": "a"}),
    ],
)
def test_the_trainer_gets_the_first_gpus_and_inference_the_rest_unless_the_file_names_them(
    trainer: dict[str, Any], inference: dict[str, Any], gpus: str, assigned: dict[str, str]
) -> None:
    found = assign_gpus(spec(trainer, inference), gpus.split())
    described = {
        f"{component}{number or ''}": " ".join([own[VISIBLE], *([own[SHARE]] if SHARE in own else [])])
        for (component, number), own in found.items()
    }
    assert described == assigned


@pytest.mark.parametrize(
    ("visible", "trainer", "ranks"),
    [
        ("0", {"processesPerReplica": 2}, 1),
        ("0,1", {"replicas": 3}, 2),
        ("0,1,2", {"processesPerReplica": 2, "gpus": [1]}, 1),
        ("0,1", {"processesPerReplica": 2}, None),
        ("0", {"processesPerReplica": 2, "device": "cpu"}, None),
        ("", {"processesPerReplica": 2}, None),
    ],
)
def test_ranks_that_would_share_a_gpu_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, trainer: dict[str, Any], ranks: int | None
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    sections = {
        **BASE,
        "model": {"scratch": {"alphabet": "01", "maxPositions": 512}},
        "trainer": {"steps": 1, **trainer},
    }
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "x"}, "spec": sections}
    (tmp_path / "experiment.yaml").write_text(json.dumps(document))
    if ranks is None:
        load_experiment(tmp_path / "experiment.yaml")
        return
    with pytest.raises(SpecError, match=f"ranks need a GPU each, and the trainer may use {ranks}; use fewer"):
        load_experiment(tmp_path / "experiment.yaml")


@pytest.mark.parametrize(
    ("visible", "message"),
    [("4,5", "2: there are 2 GPUs here; allowed: 0 to 1"), ("", "2: there is no GPU here; remove it")],
)
@pytest.mark.parametrize("section", ["trainer", "inference"])
def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, visible: str, message: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    sections = {
        **BASE,
        "trainer": {"steps": 1},
        section: {"gpus": [2], **({"steps": 1} if section == "trainer" else {})},
    }
    document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "x"}, "spec": sections}
    (tmp_path / "experiment.yaml").write_text(json.dumps(document))
    with pytest.raises(SpecError) as refused:
        load_experiment(tmp_path / "experiment.yaml")
    assert (f"spec.{section}.gpus", message) in [(each.field, each.description) for each in refused.value.violations]


@pytest.mark.parametrize(("share", "argument"), [(1.0, None), (0.5, "0.450")])
def test_vllm_takes_its_share_of_a_gpu_that_it_does_not_have_alone(
    monkeypatch: pytest.MonkeyPatch, share: float, argument: str | None
) -> None:
    monkeypatch.setattr(server, "_has_gpu", lambda: True)
    own = ["--gpu-memory-utilization", "0.8"]
    line = server.command(spec(inference=VLLM | {"vllmArgs": own}), Path("m"), Path("s"), share)
    found = [after for name, after in pairwise(line) if name == "--gpu-memory-utilization"]
    assert found == [*filter(None, [argument]), "0.8"]  # vLLM takes the last, which is the user's
