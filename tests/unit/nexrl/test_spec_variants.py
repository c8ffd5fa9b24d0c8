"""Sections that depend on a choice: each variant has its own keys and defaults, and one variant is the user's."""

import json
from pathlib import Path
from typing import Any

import pytest

from nexrl.spec import Experiment, SpecError, parse_experiment
from nexrl.spec.algorithm import AlgorithmSpec, Cispo, ConstantAggregation, Grpo, MockAlgorithm, OwnLoss, PpoClip
from nexrl.spec.bundle import bundle
from nexrl.spec.document import make_absolute
from nexrl.spec.inference import BuiltinInference, InferenceSpec, VllmInference
from nexrl.spec.marks import may_change
from nexrl.spec.model import PathModel
from nexrl.spec.rollout import SimpleRollout, WorkerRollout
from nexrl.spec.schema import schema_view
from nexrl.spec.section import LIVE, NEVER, NEXT_START, ROLLING
from nexrl.spec.trainer import ResumeFromPath
from nexrl.spec.variants import variants
from nexrl.spec.weight_sync import SyncWeightSync


def document(**sections: Any) -> dict[str, Any]:
    spec = {"model": {"path": "/x"}, "data": {"type": "mock"}, "trainer": {"steps": 1}, **sections}
    metadata = {"name": "x"}
    return {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": metadata, "spec": spec}


def parsed(**sections: Any) -> Experiment:
    return parse_experiment(document(**sections), Path("/"))


def test_a_section_is_the_class_of_its_variant() -> None:
    spec = parsed(
        algorithm={"loss": "cispo"},
        inference={"backend": "vllm", "tensorParallel": 2},
        resume={"mode": "from_path", "path": "steps/global_step_3"},
    ).spec
    assert isinstance(spec.model, PathModel)
    assert isinstance(spec.rollout, SimpleRollout)
    assert isinstance(spec.weight_sync, SyncWeightSync)
    assert isinstance(spec.algorithm, Cispo)
    assert spec.algorithm.clip_high == pytest.approx(4.0)
    assert isinstance(spec.inference, VllmInference)
    assert isinstance(spec.resume, ResumeFromPath)
    assert spec.resume.path == "/steps/global_step_3"


def test_a_section_with_several_choices_has_a_variant_of_each() -> None:
    chosen = {"type": "mock", "loss": "cispo", "aggregation": "constant", "constantTokens": 16}
    algorithm = parsed(algorithm=chosen).spec.algorithm
    assert algorithm.loss == "cispo"
    assert isinstance(algorithm, ConstantAggregation)
    assert algorithm.constant_tokens == 16
    assert {MockAlgorithm, Cispo} < set(type(algorithm).__mro__)


def test_a_root_class_makes_the_variant_that_its_keywords_choose() -> None:
    assert isinstance(AlgorithmSpec(loss="cispo"), Cispo)
    assert isinstance(AlgorithmSpec(), PpoClip)


def test_the_users_variant_is_the_reference_itself() -> None:
    spec = parsed(
        algorithm={"loss": "my_loss:clipped", "lossConfig": {"low": 0.1}},
        rollout={"type": "worker", "worker": "my_worker:Worker"},
    ).spec
    assert isinstance(spec.algorithm, OwnLoss)
    assert (spec.algorithm.loss, spec.algorithm.loss_config) == ("my_loss:clipped", {"low": 0.1})
    assert isinstance(spec.rollout, WorkerRollout)
    assert spec.rollout.worker == "my_worker:Worker"


def test_the_users_advantage_is_the_reference_itself() -> None:
    algorithm = parsed(algorithm={"advantage": "my:centred"}).spec.algorithm
    assert isinstance(algorithm, Grpo)
    assert algorithm.advantage == "my:centred"


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"loss": "cispo", "clipLow": 0.2}},
        {"algorithm": {"loss": "reinforce", "clipLow": 0.2, "clipHigh": 0.28}},
        {"algorithm": {"loss": "reinforce", "clipHigh": 4}},
        {"inference": {"tensorParallel": 1, "dataParallel": 1, "vllmArgs": []}},
        {"inference": {"url": None, "apiKeyEnv": None}},
        {"rollout": {"environment": None}},
        {"rollout": {"type": "worker", "worker": "a:B", "reward": None}},
        {"resume": {"path": None}},
        {"model": {"path": "/x", "scratch": None}},
        {"model": {"path": "/x", "seed": 0}},
        {"algorithm": {"type": "mock", "advantage": "group_mean"}},
        {"weightSync": {"stalenessThreshold": 0}},
    ],
)
def test_an_old_default_of_another_variant_is_dropped(sections: dict[str, dict[str, Any]]) -> None:
    ((name, section),) = sections.items()
    tag = next((key for key in ("loss", "backend", "type", "path") if key in section), "")
    chosen = {key: section[key] for key in (tag, "worker") if key in section}
    assert parsed(**sections) == parsed(**{name: chosen})


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"algorithm": {"loss": "cispo", "clipLow": 0.1}}, "spec.algorithm.clipLow", "0.1"),
        ({"inference": {"vllmArgs": ["--x"]}}, "spec.inference.vllmArgs", '["--x"]'),
        ({"rollout": {"reward": "a:b", "type": "mock"}}, "spec.rollout.reward", '"a:b"'),
        (
            {"rollout": {"type": "mock", "reward": "nexrl.rewards:math_answer"}},
            "spec.rollout.reward",
            '"nexrl.rewards:math_answer"',
        ),
        ({"rollout": {"worker": None}}, "spec.rollout.worker", "null"),
        ({"data": {"type": "mock", "promptField": "prompt"}}, "spec.data.promptField", '"prompt"'),
        ({"data": {"type": "mock", "path": None}}, "spec.data.path", "null"),
        ({"model": {"path": "/x", "seed": 3}}, "spec.model.seed", "3"),
        ({"algorithm": {"type": "mock", "advantage": "rloo"}}, "spec.algorithm.advantage", '"rloo"'),
        ({"algorithm": {"lossConfig": {}}}, "spec.algorithm.lossConfig", "{}"),
        ({"algorithm": {"loss": "cispo", "clipLow": None}}, "spec.algorithm.clipLow", "null"),
        ({"inference": {"tensorParallel": True}}, "spec.inference.tensorParallel", "true"),
        ({"inference": {"tensorParallel": 1.0}}, "spec.inference.tensorParallel", "1.0"),
        ({"inference": {"vllmArgs": {}}}, "spec.inference.vllmArgs", "{}"),
    ],
)
def test_another_value_of_another_variants_key_is_refused(sections: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parsed(**sections)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert violation.description.startswith(f"{words} is not allowed: only ")


def test_a_wrong_tag_hides_no_other_mistake_and_makes_none() -> None:
    with pytest.raises(SpecError) as refused:
        parsed(inference={"backend": "vlm", "tensorParallel": 2, "replicas": 0, "replica": 1}, trainer={"steps": -1})
    assert {violation.field for violation in refused.value.violations} == {
        *("spec.inference.backend", "spec.inference.replicas", "spec.inference.replica", "spec.trainer.steps"),
    }


def test_an_unknown_key_is_taken_for_a_required_one_that_is_missing() -> None:
    with pytest.raises(SpecError) as refused:
        parsed(rollout={"type": "worker", "works": "a:B"})
    found = {violation.field: violation.description for violation in refused.value.violations}
    assert found.keys() == {"spec.rollout.worker", "spec.rollout.works"}
    assert found["spec.rollout.works"] == "unknown key; did you mean worker?"


@pytest.mark.parametrize("root", [AlgorithmSpec, InferenceSpec])
def test_the_schema_has_every_variant(root: type[AlgorithmSpec | InferenceSpec]) -> None:
    section = {"AlgorithmSpec": "algorithm", "InferenceSpec": "inference"}[root.__name__]
    node = schema_view().section(["spec", section], {})
    for choice in node["x-choices"]:
        assert len(choice["variants"]) == len(variants(root)[choice["tag"]])


@pytest.mark.parametrize("backend", [BuiltinInference, VllmInference])
def test_in_flight_follows_from_the_backend(backend: type[InferenceSpec]) -> None:
    name = backend.model_fields["backend"].annotation.__args__[0]  # type: ignore[union-attr]
    for value in ("keep", "wait", "abort"):
        sections = {"inference": {"backend": name}, "weightSync": {"inFlight": value}}
        if value in backend.IN_FLIGHT:
            parsed(**sections)
        else:
            with pytest.raises(SpecError, match=f"backend {name} supports keep"):
                parsed(**sections)


def test_only_a_backend_that_receives_on_its_gpu_takes_weights_by_nccl() -> None:
    parsed(inference={"backend": "builtin"}, weightSync={"transport": "nccl"})
    parsed(inference={"backend": "vllm"}, weightSync={"transport": "auto"})
    with pytest.raises(SpecError, match=r"transport is nccl; backend vllm loads weights from host memory; use"):
        parsed(inference={"backend": "vllm"}, weightSync={"transport": "nccl"})


# marks ---------------------------------------------------------------------------------------------------------------


def test_what_may_change_when_is_said_at_the_fields() -> None:
    assert set(may_change(LIVE)) == {
        *("suspend", "rollout.replicas", "activeDeadlineSeconds", "startupDeadlineSeconds", "ttlSecondsAfterFinished"),
    }
    assert set(may_change(ROLLING)) == {"rollout.template", "inference.template"}
    assert may_change(NEXT_START) == ["controller"]
    assert set(may_change(NEVER)) == {
        *("model", "data", "trajectoryPool.batchSize", "trajectoryPool.groupSize", "managedBy"),
        *("storage.size", "storage.storageClassName", "storage.accessMode"),
    }


def test_every_path_of_a_document_becomes_absolute() -> None:
    tasks = {"type": "jsonl", "path": "tasks.jsonl"}
    made = document(
        model={"path": "model"},
        data=tasks,
        validation={"data": dict(tasks)},
        checkpoint={"path": "kept"},
        weightSync={"path": "versions"},
        resume={"mode": "from_path", "path": "global_step_1"},
    )
    assert make_absolute(made, Path("/at")) == []
    spec = made["spec"]
    sections = [spec["model"], spec["data"], spec["validation"]["data"], spec["checkpoint"], spec["weightSync"]]
    assert [section["path"] for section in [*sections, spec["resume"]]] == [
        *("/at/model", "/at/tasks.jsonl", "/at/tasks.jsonl", "/at/kept", "/at/versions", "/at/global_step_1"),
    ]


def test_every_reference_to_code_is_bundled(tmp_path: Path) -> None:
    names = ("factory", "reward", "environment", "worker", "loss", "advantage", "processor")
    for name in names:
        (tmp_path / f"my_{name}.py").write_text("")
    algorithm = {"loss": "my_loss:x", "advantage": "my_advantage:x", "processor": "my_processor:X"}
    bundled: set[str] = set()
    for rollout in (
        {"type": "worker", "worker": "my_worker:X"},
        {"reward": "my_reward:x"},
        {"type": "agent", "environment": "my_environment:X"},
    ):
        made = document(data={"type": "python", "factory": "my_factory:x"}, algorithm=algorithm, rollout=rollout)
        (tmp_path / "x.yaml").write_text(json.dumps(made))
        bundled |= set(bundle(tmp_path / "x.yaml")["spec"]["code"])
    assert bundled == {f"my_{name}.py" for name in names}
