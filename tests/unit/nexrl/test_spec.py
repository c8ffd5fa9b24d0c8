"""The experiment file: what is accepted, and that everything else is refused with path, value, and what is allowed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nexrl.spec import SpecError, load_experiment, validate_file
from nexrl.spec.algorithm import Cispo
from nexrl.spec.data import JsonlDataSpec
from nexrl.spec.rollout import ScoredRollout

REPOSITORY = Path(__file__).parents[3]
MOCK = {"steps": 1, "backend": "mock"}
REFILL = {"type": "mock", "zeroVarianceGroups": "refill"}

Write = Callable[..., Path]


def minimal(**sections: Any) -> dict[str, Any]:
    """The smallest experiment, with these sections of spec replaced."""
    spec = {"model": {"scratch": {"alphabet": "0123456789"}}, "data": {"type": "mock"}, "trainer": {"steps": 3}}
    rollout = {"maxNewTokens": 8}
    return {
        "apiVersion": "nexrl.dev/v1alpha1",
        "kind": "Experiment",
        "metadata": {"name": "minimal"},
        "spec": {**spec, "rollout": rollout, **sections},
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an experiment, given as sections of spec, a whole document, or text."""

    def write(content: object = None, **sections: Any) -> Path:
        path = tmp_path / "experiment.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content or minimal(**sections))
        path.write_text(text)
        return path

    return write


def problems(path: Path, *overrides: str) -> dict[str, str]:
    return {violation.field: violation.description for violation in validate_file(path, overrides)}


def test_a_minimal_experiment_gets_the_documented_defaults(write: Write) -> None:
    spec = load_experiment(write()).spec
    assert spec.model.tag == "default"
    assert (spec.trajectory_pool.batch_size, spec.trajectory_pool.group_size) == (64, 8)
    assert isinstance(spec.rollout, ScoredRollout)
    assert spec.rollout.reward == "nexrl.rewards:exact_match"
    assert spec.weight_sync.staleness_threshold == 0
    assert spec.validation is None


def test_defaults_follow_the_choice_that_they_depend_on(write: Write) -> None:
    spec = load_experiment(
        write(
            rollout={"type": "single_turn_math", "maxNewTokens": 8},
            algorithm={"loss": "cispo"},
            weightSync={"mode": "batch-async"},
        )
    ).spec
    assert isinstance(spec.rollout, ScoredRollout)
    assert spec.rollout.reward == "nexrl.rewards:math_answer"
    assert isinstance(spec.algorithm, Cispo)
    assert spec.algorithm.clip_high == pytest.approx(4.0)
    assert spec.weight_sync.staleness_threshold == 1


@pytest.mark.guide("Q50", "S4", "S9")
def test_every_problem_is_reported_at_once(write: Write) -> None:
    document = minimal(
        model={"path": "nowhere"},
        data={"type": "jsonl", "path": "missing.jsonl"},
        trainer={},
        trajectoryPool={"batchSize": 10, "groupSize": 4},
        weightSync={"mode": "batch-async", "stalenessThreshold": 0},
        algorithm={"learningRate": "fast"},
        rolout={},
    )
    document["metadata"]["name"] = "Not_A_Name"
    found = problems(write(document))
    assert set(found) == {
        "metadata.name",
        "spec.algorithm.learningRate",
        "spec.data.path",
        "spec.model.path",
        "spec.rolout",
        "spec.trainer.steps",
        "spec.trajectoryPool.groupSize",
        "spec.weightSync.stalenessThreshold",
    }


@pytest.mark.guide("S9")
@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"trainer": {}}, "spec.trainer.steps", ["missing", "an integer, 0 to 1000000"]),
        ({"trainer": {"steps": "3"}}, "spec.trainer.steps", ['"3" is not allowed', "an integer"]),
        ({"trainer": {"steps": -1}}, "spec.trainer.steps", ["-1 is not allowed", "0 to 1000000"]),
        ({"trainer": {"steps": 1, "step": 1}}, "spec.trainer.step", ["unknown key", "did you mean steps?"]),
        ({"trainer": {"steps": 1, "replicas": 65}}, "spec.trainer.replicas", ["65 is not allowed", "1 to 64"]),
        ({"trainer": MOCK | {"replicas": 2}}, "spec.trainer.replicas", ["mock"]),
        ({"trainer": MOCK | {"processesPerReplica": 2}}, "spec.trainer.processesPerReplica", ["mock"]),
        ({"trajectoryPool": {"group_size": 8}}, "spec.trajectoryPool.group_size", ["did you mean groupSize?"]),
        (
            {"rollout": {"type": "agents"}},
            "spec.rollout.type",
            ['"agents"', "mock, simple, demonstrations, single_turn_math, agent"],
        ),
        ({"rollout": {"temperature": 0}}, "spec.rollout.temperature", ["a number, above 0 and at most 10"]),
        ({"rollout": {"type": "agent"}}, "spec.rollout.environment", ["missing", "module:name"]),
        ({"rollout": {"environment": "a:B"}}, "spec.rollout.environment", ['"a:B"', "only type agent has"]),
        ({"rollout": {"reward": "no-colon"}}, "spec.rollout.reward", ['"no-colon"', "module:name"]),
        ({"rollout": {"systemPrompt": "Hi"}}, "spec.rollout.systemPrompt", ["chat: true"]),
        ({"rollout": {"maxNewTokens": 64}}, "spec.rollout.maxNewTokens", ["maxPositions"]),
        ({"data": {"type": "torch"}}, "spec.data.type", ['"torch"', "mock, jsonl, parquet, reasoning_gym, python"]),
        ({"data": {"size": 3}}, "spec.data.type", ["missing", "jsonl"]),
        ({"data": {"type": "mock", "path": "x"}}, "spec.data.path", ['"x"', "only type jsonl or parquet"]),
        ({"data": {"type": "python", "factory": "a b"}}, "spec.data.factory", ['"a b"']),
        ({"model": {}}, "spec.model", ["exactly one"]),
        ({"model": {"path": "package:nexrl", "scratch": {"alphabet": "a"}}}, "spec.model.scratch", ["exactly one"]),
        ({"model": {"scratch": {"alphabet": "a{a"}}}, "spec.model.scratch.alphabet", ["repeated: 'a'"]),
        ({"model": {"scratch": {"alphabet": "a", "heads": 3}}}, "spec.model.scratch.heads", ["even multiple"]),
        ({"model": {"path": "package:no_such_package"}}, "spec.model.path", ["no Python package"]),
        (
            {"weightSync": {"stalenessThreshold": 1}},
            "spec.weightSync.stalenessThreshold",
            ["1 is not", "an integer, 0"],
        ),
        ({"resume": {"mode": "from_path"}}, "spec.resume.path", ["missing"]),
        ({"resume": {"mode": "auto", "path": "x"}}, "spec.resume.path", ['"x"', "only mode from_path"]),
        (
            {"weightSync": {"inFlight": "wait"}, "inference": {}},
            "spec.inference.backend",
            ["wait", "builtin supports keep"],
        ),
        (
            {
                "weightSync": {"transport": "nccl"},
                "model": {"scratch": {"alphabet": "ab"}, "lora": {"rank": 4, "alpha": 8}},
            },
            "spec.weightSync.transport",
            ["merge adapters", "use auto or gloo"],
        ),
        (
            {"inference": {"tensorParallel": 2}},
            "spec.inference.tensorParallel",
            ["2 is not", "only backend vllm"],
        ),
        ({"inference": {"backend": "vllm", "vllmArgs": ["--port=1"]}}, "spec.inference.vllmArgs", ["--port=1"]),
        ({"inference": {"url": "http://x:1"}}, "spec.inference.url", ["unknown key"]),
        ({"inference": {"ur": None}}, "spec.inference.ur", ["unknown key"]),
        (
            {"algorithm": {"loss": "hinge"}},
            "spec.algorithm.loss",
            ['"hinge"', "ppo_clip, decoupled_ppo, gspo, cispo, dppo_tv, sapo, reinforce, cross_entropy, dpo, or `mod"],
        ),
        ({"algorithm": {"loss": "cispo", "clipLow": 0.1}}, "spec.algorithm.clipLow", ["0.1", "only loss ppo_clip"]),
        ({"algorithm": {"lossConfig": {"a": 1}}}, "spec.algorithm.lossConfig", ["only loss module:name"]),
        ({"algorithm": {"aggregation": "constant"}}, "spec.algorithm.constantTokens", ["missing", "an integer"]),
        ({"algorithm": {"constantTokens": 9}}, "spec.algorithm.constantTokens", ["9", "only aggregation constant"]),
        (
            {"algorithm": {"advantage": "mean"}},
            "spec.algorithm.advantage",
            ['"mean"', "distillation, or `module:name`"],
        ),
        (
            {"algorithm": {"learningRateDecay": "cosine"}},
            "spec.algorithm.finalLearningRateRatio",
            ["constant", "lower ratio"],
        ),
        (
            {"algorithm": {"advantage": "max_rl", "klRewardCoefficient": 0.1}},
            "spec.algorithm.advantage",
            ["max_rl", "no penalty"],
        ),
        ({"algorithm": {"advantage": "pass_at_k"}}, "spec.algorithm.passK", ["missing"]),
        ({"algorithm": {"passK": 4}}, "spec.algorithm.passK", ["4", "only advantage pass_at_k"]),
        ({"algorithm": {"discount": 0.5}}, "spec.algorithm.discount", ["0.5", "only advantage return_to_go"]),
        (
            {"algorithm": {"advantage": "pass_at_k", "passK": 8}},
            "spec.algorithm.passK",
            ["8", "below trajectoryPool.groupSize (8)"],
        ),
        (
            {"algorithm": {"loss": "decoupled_ppo", "correction": {"tokenBand": {"low": 0.5, "high": 5.0}}}},
            "spec.algorithm.correction",
            ["same ratio", "remove tokenBand"],
        ),
        (
            {
                "model": {"scratch": {"alphabet": "ab"}, "lora": {"rank": 4, "alpha": 8}},
                "algorithm": {"optimizer": "muon"},
            },
            "spec.algorithm.optimizer",
            ["muon", "factors of their changes", "use adamw"],
        ),
        ({"algorithm": {"refillLimit": 3}}, "spec.algorithm.refillLimit", ["3", "needs zeroVarianceGroups refill"]),
        (
            {"algorithm": {"zeroVarianceGroups": "refill", "teacher": {"path": "package:nexrl"}}},
            "spec.algorithm.zeroVarianceGroups",
            ["refill", "tells samples of equal rewards apart", "use keep or drop"],
        ),
        (
            {"algorithm": {"zeroVarianceGroups": "refill", "advantage": "turn_mean_std"}},
            "spec.algorithm.zeroVarianceGroups",
            ["refill", "compares turns", "use keep or drop"],
        ),
        (
            {"algorithm": {"zeroVarianceGroups": "refill", "advantage": "batch_mean_std"}},
            "spec.algorithm.zeroVarianceGroups",
            ["refill", "batch_mean_std compares the whole batch", "use drop"],
        ),
        ({"algorithm": REFILL, "trajectoryPool": {"groupSize": 1}}, "spec.algorithm.zeroVarianceGroups", ["or drop"]),
        ({"algorithm": REFILL, "trajectoryPool": {"keyList": []}}, "spec.algorithm.zeroVarianceGroups", ["or drop"]),
        ({"algorithm": {"klTarget": 0.1}}, "spec.algorithm.klTarget", ["needs klCoefficient", "above 0"]),
        ({"algorithm": {"eps": 0}}, "spec.algorithm.eps", ["0 is not allowed", "above 0"]),
        (
            {"trajectoryPool": {"groupSize": 1}},
            "spec.algorithm.advantage",
            ['"group_mean"', "groupSize is 1", "2 or more"],
        ),
        ({"trajectoryPool": {"keyList": []}}, "spec.algorithm.advantage", ["keyList is empty", "and a key"]),
        ({"rollout": {"type": "worker"}}, "spec.rollout.worker", ["missing", "module:name"]),
        ({"rollout": {"topP": 0}}, "spec.rollout.topP", ["above 0 and at most 1"]),
        ({"rollout": {"stop": [""]}}, "spec.rollout.stop[0]", ["1 to 256 characters"]),
        (
            {"inference": {"maxTokensPerRow": 8}},
            "spec.inference.maxTokensPerRow",
            ["must be above rollout.maxNewTokens"],
        ),
        ({"algorithm": {"betas": [0.9]}}, "spec.algorithm.betas", ["a list, 2 long"]),
        ({"algorithm": {"betas": [0.9, 1]}}, "spec.algorithm.betas[1]", ["1 is not allowed"]),
        ({"algorithm": {"learningRate": float("nan")}}, "spec.algorithm.learningRate", ["a number"]),
        ({"monitor": {"health": {"timeoutSeconds": 5}}}, "spec.monitor.health.timeoutSeconds", ["above"]),
        ({"storage": {"uri": "s3://key:secret@bucket"}}, "spec.storage.uri", ["s3"]),
        ({"storage": {"endpoint": "localhost:9000"}}, "spec.storage.endpoint", ["https?"]),
        ({"storage": {"endpoint": "https://h:99999"}}, "spec.storage.endpoint", ["1 to 65535"]),
        *(
            ({"storage": {"uri": uri}}, "spec.storage.uri", ["s3"])
            for uri in ("file://runs/x", "file:///", "s3:///x", "s3://", "gs://bucket", "az://bucket")
        ),
        ({"redis": {"url": "localhost:6379"}}, "spec.redis.url", ["redis"]),
        ({"redis": {"url": "redis://host:99999"}}, "spec.redis.url", ["1 to 65535"]),
        ({"redis": {"url": "redis://host:0"}}, "spec.redis.url", ["port is 0", "1 to 65535"]),
        ({"redis": {"url": "redis://[::1"}}, "spec.redis.url", ["HOST:PORT"]),
        ({"validation": {"data": {"type": "mock"}, "samplesPerTask": 4}}, "spec.validation.samplesPerTask", ["greedy"]),
        ({"trainer": 3}, "spec.trainer", ["a mapping with the keys type, backend, steps"]),
    ],
)
def test_one_mistake_gives_one_message_at_its_path(
    write: Write, sections: dict[str, Any], field: str, words: list[str]
) -> None:
    found = {at: what for at, what in problems(write(**sections)).items() if "vllm` installs it" not in what}
    assert list(found) == [field]
    assert all(word in found[field] for word in words), found


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"steps": 1, "backend": "mock"}},
        {"algorithm": {"type": "mock"}},
        {"algorithm": {"processor": "external"}},
    ],
)
def test_a_group_of_one_is_fine_where_nothing_compares_its_samples(write: Write, sections: dict[str, Any]) -> None:
    assert problems(write(trajectoryPool={"groupSize": 1}, **sections)) == {}
    assert problems(write(trajectoryPool={"keyList": []}, **sections)) == {}


@pytest.mark.parametrize("url", ["redis://me:s3cret@host:1", "unix:///a.sock?password=s3cret&db=1"])
def test_a_password_in_a_file_is_refused_and_not_repeated(write: Write, url: str) -> None:
    message = problems(write(redis={"url": url}))["spec.redis.url"]
    assert "NEXRL_REDIS_PASSWORD" in message
    assert "s3cret" not in message


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "rediss+cluster", "unix"])
def test_every_kind_of_redis_can_be_named(write: Write, scheme: str) -> None:
    assert load_experiment(write(redis={"url": f"{scheme}://me@host:1"})).spec.redis.url == f"{scheme}://me@host:1"


@pytest.mark.guide("H5", "Q14")
def test_guide_spellings_of_readiness_mean_the_short_ones(write: Write) -> None:
    loaded = load_experiment(write(trajectoryPool={"readiness": "batch_size_reached_and_loaded_batch_finished"}))
    assert loaded.spec.trajectory_pool.readiness == "batch_size_and_loaded_batch_finished"


@pytest.mark.guide("Q50", "S4")
def test_an_override_replaces_what_the_file_says(write: Write) -> None:
    overrides = ["algorithm.learningRate=1e-3", "trainer.steps=7", "metadata.name=other", "logger.backends=[jsonl]"]
    loaded = load_experiment(write(), overrides)
    assert loaded.spec.algorithm.learning_rate == pytest.approx(1e-3)
    assert loaded.spec.trainer.steps == 7
    assert loaded.metadata.name == "other"
    assert loaded.spec.logger.backends == ("jsonl",)


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("trainer.step=1", "spec.trainer.step", "did you mean steps?"),
        ("trainr.steps=1", "spec.trainr", "did you mean trainer?"),
        ("trainer.steps=many", "spec.trainer.steps", '"many" is not allowed'),
        ("trainer.steps.more=1", "override trainer.steps.more=1", "steps has no keys"),
        ("trainer.steps", "override trainer.steps", "KEY=VALUE"),
        ("spec.trainer.steps=1", "override spec.trainer.steps=1", "write trainer.steps=1"),
        ("trainer.steps=[", "override trainer.steps=[", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused_like_a_wrong_file(write: Write, override: str, field: str, words: str) -> None:
    found = problems(write(), override)
    assert list(found) == [field]
    assert words in found[field]


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path / 'no.yaml'}: cannot be read: No such file")):
        load_experiment(tmp_path / "no.yaml")


def test_a_spec_that_is_no_mapping_is_refused(write: Write) -> None:
    assert list(problems(write({**minimal(), "spec": 3}))) == ["spec"]


def test_the_error_reads_as_a_list_of_all_problems(write: Write) -> None:
    path = write(trainer={"steps": -1, "x": 1})
    with pytest.raises(SpecError) as caught:
        load_experiment(path)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{path}: 2 problems"
    assert [line.partition(":")[0] for line in lines] == ["  spec.trainer.steps", "  spec.trainer.x"]
    assert caught.value.exit_code == 2


def test_relative_paths_start_at_the_folder_of_the_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    path = write(
        model={"path": "model"},
        data={"type": "jsonl", "path": "tasks.jsonl"},
        checkpoint={"path": "../kept"},
        weightSync={"path": "versions"},
    )
    loaded = load_experiment(path)
    assert loaded.spec.model.path == str(tmp_path / "model")
    assert isinstance(loaded.spec.data, JsonlDataSpec)
    assert loaded.spec.data.path == str(tmp_path / "tasks.jsonl")
    assert loaded.spec.checkpoint.path == str(tmp_path.parent / "kept")
    assert loaded.spec.weight_sync.path == str(tmp_path / "versions")
    assert loaded.folder == tmp_path


def test_a_broken_line_of_the_data_is_found_before_anything_starts(write: Write, tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "answer": "b"}'] * 20
    lines[16] = '{"prompt": "a", "answer"'
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    found = problems(write(data={"type": "jsonl", "path": "tasks.jsonl"}))
    assert list(found) == ["spec.data.path"]
    assert "tasks.jsonl line 17: not JSON" in found["spec.data.path"]


def test_a_reward_that_is_not_there_is_found_before_anything_starts(write: Write) -> None:
    found = problems(write(rollout={"reward": "nexrl.rewards:last_numberr", "maxNewTokens": 8}))
    assert "last_numberr" in found["spec.rollout.reward"]


def test_what_a_wrong_section_names_is_looked_for_all_the_same(write: Write) -> None:
    found = problems(
        write(
            model={"path": "package:no_such_package", "sead": 1},
            data={"type": "jsonl", "path": "missing.jsonl", "sise": 3},
            rollout={"reward": "nexrl.rewards:last_numberr", "maxNewTokens": 0},
            validation={"data": {"type": "jsonl", "path": "held-out.jsonl", "sise": 3}},
        )
    )
    assert set(found) == {
        *("spec.model.path", "spec.model.sead", "spec.data.path", "spec.data.sise"),
        *("spec.rollout.reward", "spec.rollout.maxNewTokens", "spec.validation.data.path", "spec.validation.data.sise"),
    }
    both = {"path": "nowhere", "scratch": {"alphabet": "0123456789"}}
    assert set(problems(write(model=both))) == {"spec.model.path", "spec.model.scratch"}


def test_an_experiment_cannot_be_changed(write: Write) -> None:
    experiment = load_experiment(write())
    with pytest.raises(ValueError, match="frozen"):
        experiment.spec.trainer.steps = 5  # type: ignore[misc]  # that is the point
