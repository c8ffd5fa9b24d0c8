"""What the API server accepts of an Experiment, and what it refuses: each rule both ways."""

from pathlib import Path
from uuid import uuid4

import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.k8s.api import EXPERIMENT, Api, ApiError
from nexrl.spec import parse_experiment, yaml_core
from tests.support.documents import Object, document
from tests.support.marks import ROOT

EXAMPLES = [
    "examples/sort-digits.yaml",
    "examples/sort-digits/experiment.yaml",
    "examples/sort-digits/demonstrations.yaml",
    "examples/smollm2-arithmetic.yaml",
    "examples/lora-sums/experiment.yaml",
    "examples/high-card/experiment.yaml",
    "tests/e2e/copy-digits.yaml",
    "tests/chaos/copy-digits.yaml",
    "tests/vllm/copy-digits.yaml",
]


@pytest.mark.parametrize("path", EXAMPLES)
async def test_a_file_of_nexrl_run_is_taken_as_it_is(api: Api, path: str) -> None:
    item = yaml_core.load((ROOT / path).read_text())
    item["metadata"]["name"] = f"x-{uuid4().hex[:8]}"
    stored = await api.apply(item, manager="test")
    known = {key: stored["metadata"][key] for key in ("name", "namespace")}
    again = parse_experiment({**stored, "metadata": known}, Path("/"))
    assert again.spec == parse_experiment(item, Path("/")).spec  # the server's defaults are ours


SUPERVISED: Object = {
    "rollout__type": "demonstrations",
    "trajectoryPool__groupSize": 1,
    "algorithm__loss": "cross_entropy",
}


FINE: dict[str, Object] = {
    "demonstrations": SUPERVISED,
    "demonstrations-with-a-loss-of-ones-own": {
        **SUPERVISED,
        "algorithm__loss": "task:loss",
        "algorithm__zeroVarianceGroups": "keep",
    },
    "cross-entropy-of-groups-of-one": {"trajectoryPool__groupSize": 1, "algorithm__loss": "cross_entropy"},
    "path": {"model__scratch": ..., "model__path": "/models/x"},
    "agent": {"rollout__type": "agent", "rollout__environment": "game:Game"},
    "system-prompt": {"rollout__chat": True, "rollout__systemPrompt": "Be brief."},
    "batch": {"trajectoryPool__batchSize": 16, "trajectoryPool__groupSize": 4},
    "async": {"weightSync__mode": "batch-async", "weightSync__stalenessThreshold": 2},
    "sync": {"weightSync__mode": "sync", "weightSync__stalenessThreshold": 0},
    "vllm": {"inference__backend": "vllm", "inference__tensorParallel": 2, "inference__vllmArgs": ["--x"]},
    "own-loss": {"algorithm__loss": "task:loss", "algorithm__lossConfig": {"any": [1, {"x": 2}]}},
    "own-advantage": {"algorithm__advantage": "task:advantage", "trajectoryPool__groupSize": 1},
    "decoupled": {"algorithm__loss": "decoupled_ppo", "algorithm__weightLimit": 5.0},
    "muon-of-ranks": {"algorithm__optimizer": "muon", "trainer__processesPerReplica": 2},
    "kl-target": {"algorithm__klTarget": 0.1, "algorithm__klCoefficient": 0.05, "algorithm__entropyTarget": 1.0},
    "distillation": {"algorithm__advantage": "distillation", "algorithm__teacher": {"path": "/models/teacher"}},
    "dpo": {"algorithm__loss": "dpo", "algorithm__beta": 0.3, "algorithm__labelSmoothing": 0.1},
    "refreshed-reference": {
        "algorithm__klCoefficient": 0.1,
        "algorithm__reference": {"type": "refreshed", "everySteps": 100},
    },
    "averaged-reference": {"algorithm__loss": "dpo", "algorithm__reference": {"type": "average", "decay": 0.99}},
    "critic": {
        "algorithm__type": "ppo",
        "algorithm__discount": 0.99,
        "algorithm__gaeLambda": 0.95,
        "algorithm__critic": {"learningRate": 1e-4},
        "algorithm__criticOnlySteps": 1,
        "trajectoryPool__groupSize": 1,
    },
    "discount": {"algorithm__advantage": "return_to_go", "algorithm__discount": 0.5},
    "pass-k": {"algorithm__advantage": "pass_at_k", "algorithm__passK": 4},
    "group-of-one-for-a-mock-trainer": {"trainer__backend": "mock", "trajectoryPool__groupSize": 1},
    "seed-without-random-weights-at-its-default": {"model": {"path": "/models/x", "seed": 0}},
    "advantage-of-mock-at-its-default": {"algorithm__type": "mock", "algorithm__advantage": "group_mean"},
    "group-of-one-for-a-mock-algorithm": {"algorithm__type": "mock", "trajectoryPool__groupSize": 1},
    "constant": {"algorithm__aggregation": "constant", "algorithm__constantTokens": 16},
    "worker": {"rollout__type": "worker", "rollout__worker": "task:Worker"},
    "default-of-another-loss": {"algorithm__loss": "cispo", "algorithm__clipLow": 0.2},
    "default-of-another-backend": {"inference__tensorParallel": 1, "inference__vllmArgs": []},
    "default-of-two-other-losses": {"algorithm__loss": "reinforce", "algorithm__clipHigh": 4},
    "in-flight": {"inference__backend": "vllm", "weightSync__inFlight": "abort"},
    "nccl": {"weightSync__transport": "nccl"},
    "validation": {"validation": {"data": {"type": "mock"}, "temperature": 0.7, "samplesPerTask": 4}},
    "resume": {"resume": {"mode": "from_path", "path": "/checkpoints/global_step_1"}},
    "health": {"monitor__health": {"checkIntervalSeconds": 2, "timeoutSeconds": 3}},
    "redis": {"redis__url": "rediss://user@redis:6379"},
    "code": {"code": {"task.py": "x = 1"}},
    "jsonl": {"data": {"type": "jsonl", "path": "/data/tasks.jsonl"}},
    "python": {"data": {"type": "python", "factory": "task:tasks"}, "code": {"task.py": ""}},
    "gym": {"data": {"type": "reasoning_gym", "name": "chain_sum", "config": {"any": [1, {"x": 2}]}}},
    "template": {"trainer__template": {"spec": {"nodeSelector": {"gpu": "yes"}, "whatever": [1]}}},
    "failure-rules": {
        "failurePolicy__rules": [
            {"exitCodes": [10, -9], "action": "Fail", "components": ["trainer"]},
            {"exitCodes": [1], "action": "Ignore"},
        ]
    },
    "deadlines": {"activeDeadlineSeconds": 60, "startupDeadlineSeconds": 30, "ttlSecondsAfterFinished": 0},
}


@pytest.mark.parametrize("changes", FINE.values(), ids=FINE.keys())
async def test_what_can_run_is_taken(api: Api, changes: Object) -> None:
    item = document(**changes)
    await api.apply(item, manager="test")
    parse_experiment(item, Path("/"))


WRONG: dict[str, tuple[Object, str]] = {
    "demonstrations-at-a-temperature": ({**SUPERVISED, "rollout__temperature": 0.5}, "spec.rollout.temperature"),
    "demonstrations-with-top-p": ({**SUPERVISED, "rollout__topP": 0.5}, "spec.rollout.topP"),
    "demonstrations-with-top-k": ({**SUPERVISED, "rollout__topK": 5}, "spec.rollout.topK"),
    "demonstrations-without-answers": (
        {**SUPERVISED, "data": {"type": "jsonl", "path": "/tasks.jsonl", "answerField": ""}},
        "spec.rollout.type",
    ),
    "demonstrations-in-groups": ({**SUPERVISED, "trajectoryPool__groupSize": 4}, "spec.trajectoryPool.groupSize"),
    "demonstrations-with-a-policy-loss": ({**SUPERVISED, "algorithm__loss": "cispo"}, "spec.algorithm.loss"),
    "demonstrations-dropped-by-a-loss-of-ones-own": (
        {**SUPERVISED, "algorithm__loss": "task:loss"},
        "spec.algorithm.zeroVarianceGroups",
    ),
    "demonstrations-chosen-by-reward": (
        {**SUPERVISED, "data": {"type": "mock", "sampler": {"type": "difficulty"}}},
        "spec.rollout.type",
    ),
    "demonstrations-with-an-advantage": (
        {**SUPERVISED, "algorithm__advantage": "rloo"},
        "spec.algorithm.advantage",
    ),
    "demonstrations-corrected": (
        {**SUPERVISED, "algorithm__correction": {"vetoRatio": 0.1}},
        "spec.algorithm.correction",
    ),
    "demonstrations-with-a-ratio": (
        {**SUPERVISED, "algorithm__klCoefficient": 0.1, "algorithm__klEstimator": "k3_unbiased"},
        "spec.algorithm.klEstimator",
    ),
    "demonstrations-taught": (
        {
            **SUPERVISED,
            "algorithm__loss": "task:loss",
            "algorithm__zeroVarianceGroups": "keep",
            "algorithm__teacher": {"path": "/models/teacher"},
        },
        "spec.algorithm.teacher",
    ),
    "demonstrations-with-a-kl-in-the-reward": (
        {**SUPERVISED, "algorithm__klRewardCoefficient": 0.1},
        "spec.algorithm.klRewardCoefficient",
    ),
    "demonstrations-with-a-penalty": (
        {**SUPERVISED, "algorithm__overlongPenalty": {"afterTokens": 1, "fullTokens": 2}},
        "spec.algorithm.overlongPenalty",
    ),
    "demonstrations-that-age": (
        {**SUPERVISED, "weightSync": {"mode": "fully-async", "stalenessThreshold": 1}},
        "spec.weightSync.mode",
    ),
    "no-source": ({"model__scratch": ...}, "spec.model.scratch"),
    "two-sources": ({"model__path": "/models/x"}, "spec.model.scratch"),
    "heads": ({"model__scratch__heads": 3}, "spec.model.scratch.heads"),
    "alphabet": ({"model__scratch__alphabet": "aba"}, "spec.model.scratch.alphabet"),
    "environment-missing": ({"rollout__type": "agent"}, "spec.rollout.environment"),
    "environment-idle": ({"rollout__environment": "game:Game"}, "spec.rollout.environment"),
    "reward-idle": ({"rollout__type": "mock", "rollout__reward": "x:y"}, "spec.rollout.reward"),
    "reward-of-another-type": (
        {"rollout__type": "mock", "rollout__reward": "nexrl.rewards:math_answer"},
        "spec.rollout.reward",
    ),
    "default-of-another-source": ({"data__promptField": "prompt"}, "spec.data.promptField"),
    "system-prompt": ({"rollout__systemPrompt": "Be brief."}, "spec.rollout.systemPrompt"),
    "batch": ({"trajectoryPool__batchSize": 10, "trajectoryPool__groupSize": 4}, "spec.trajectoryPool.groupSize"),
    "sync": ({"weightSync__stalenessThreshold": 1}, "spec.weightSync.stalenessThreshold"),
    "async": (
        {"weightSync__mode": "batch-async", "weightSync__stalenessThreshold": 0},
        "spec.weightSync.stalenessThreshold",
    ),
    "tensor-parallel": ({"inference__tensorParallel": 2}, "spec.inference.tensorParallel"),
    "data-parallel": ({"inference__dataParallel": 2}, "spec.inference.dataParallel"),
    "vllm-args": ({"inference__vllmArgs": ["--x"]}, "spec.inference.vllmArgs"),
    "clip-of-another-loss": ({"algorithm__loss": "cispo", "algorithm__clipLow": 0.1}, "spec.algorithm.clipLow"),
    "config-of-no-loss": ({"algorithm__lossConfig": {"x": 1}}, "spec.algorithm.lossConfig"),
    "empty-config-of-no-loss": ({"algorithm__lossConfig": {}}, "spec.algorithm.lossConfig"),
    "true-is-not-one": ({"inference__tensorParallel": True}, "spec.inference.tensorParallel"),
    "constant-missing": ({"algorithm__aggregation": "constant"}, "spec.algorithm.constantTokens"),
    "constant-idle": ({"algorithm__constantTokens": 16}, "spec.algorithm.constantTokens"),
    "seed-without-random-weights": ({"model": {"path": "/models/x", "seed": 3}}, "spec.model.seed"),
    "advantage-of-mock": ({"algorithm__type": "mock", "algorithm__advantage": "rloo"}, "spec.algorithm.advantage"),
    "pass-k-missing": ({"algorithm__advantage": "pass_at_k"}, "spec.algorithm.passK"),
    "discount-of-another": ({"algorithm__discount": 0.5}, "spec.algorithm.discount"),
    "pass-k-of-another": ({"algorithm__passK": 2}, "spec.algorithm.passK"),
    "pass-k-of-a-group": (
        {"algorithm__advantage": "pass_at_k", "algorithm__passK": 8},
        "spec.algorithm.passK",
    ),
    "two-limits-of-one-ratio": (
        {"algorithm__loss": "decoupled_ppo", "algorithm__correction": {"tokenBand": {"low": 0.5, "high": 5.0}}},
        "spec.algorithm.correction",
    ),
    "muon-of-an-adapter": (
        {"model": {"scratch": {"alphabet": "ab"}, "lora": {"rank": 4, "alpha": 8}}, "algorithm__optimizer": "muon"},
        "spec.algorithm.optimizer",
    ),
    "distillation-without-a-teacher": ({"algorithm__advantage": "distillation"}, "spec.algorithm.teacher"),
    "teacher-of-an-external-processor": (
        {"algorithm__processor": "external", "algorithm__teacher": {"path": "/models/teacher"}},
        "spec.algorithm.processor",
    ),
    "critic-without-advantages": (
        {"algorithm__type": "ppo", "algorithm__loss": "cross_entropy"},
        "spec.algorithm.loss",
    ),
    "critic-and-teacher": (
        {"algorithm__type": "ppo", "algorithm__teacher": {"path": "/models/teacher"}},
        "spec.algorithm.teacher",
    ),
    "critic-and-refill": (
        {"algorithm__type": "ppo", "algorithm__zeroVarianceGroups": "refill"},
        "spec.algorithm.zeroVarianceGroups",
    ),
    "critic-alone-to-the-end": (
        {"algorithm__type": "ppo", "algorithm__criticOnlySteps": 4, "trainer__steps": 4},
        "spec.algorithm.criticOnlySteps",
    ),
    "critic-of-no-ppo": ({"algorithm__critic": {"learningRate": 1e-4}}, "spec.algorithm.critic"),
    "demonstrations-with-a-critic": (
        {**SUPERVISED, "algorithm__type": "ppo", "algorithm__loss": "task:loss"},
        "spec.algorithm.type",
    ),
    "dpo-in-parts": ({"algorithm__loss": "dpo", "algorithm__miniBatches": 2}, "spec.algorithm.miniBatches"),
    "dpo-corrected": (
        {"algorithm__loss": "dpo", "algorithm__correction": {"vetoRatio": 0.1}},
        "spec.algorithm.correction",
    ),
    "dpo-taught": (
        {"algorithm__loss": "dpo", "algorithm__teacher": {"path": "/models/teacher"}},
        "spec.algorithm.teacher",
    ),
    "reference-of-no-penalty": (
        {"algorithm__reference": {"type": "average", "decay": 0.99}},
        "spec.algorithm.reference",
    ),
    "kl-target-of-no-penalty": ({"algorithm__klTarget": 0.1}, "spec.algorithm.klTarget"),
    "group-of-one": ({"trajectoryPool__groupSize": 1}, "spec.algorithm.advantage"),
    "worker-missing": ({"rollout__type": "worker"}, "spec.rollout.worker"),
    "top-p": ({"rollout__topP": 0}, "spec.rollout.topP"),
    "in-flight": ({"weightSync__inFlight": "abort"}, "spec.inference.backend"),
    "nccl-of-adapters": (
        {"model": {"scratch": {"alphabet": "ab"}, "lora": {"rank": 4, "alpha": 8}}, "weightSync__transport": "nccl"},
        "spec.weightSync.transport",
    ),
    "nccl-into-vllm": ({"inference__backend": "vllm", "weightSync__transport": "nccl"}, "spec.inference.backend"),
    "mock of several replicas": (
        {"trainer": {"steps": 1, "backend": "mock", "replicas": 2}},
        "spec.trainer.replicas",
    ),
    "shared mock": (
        {"trainer": {"steps": 1, "backend": "mock", "processesPerReplica": 2}},
        "spec.trainer.processesPerReplica",
    ),
    "greedy": ({"validation": {"data": {"type": "mock"}, "samplesPerTask": 4}}, "spec.validation.samplesPerTask"),
    "resume-missing": ({"resume__mode": "from_path"}, "spec.resume.path"),
    "resume-idle": ({"resume__path": "/x"}, "spec.resume.path"),
    "health": ({"monitor__health__timeoutSeconds": 1}, "spec.monitor.health.timeoutSeconds"),
    "password": ({"redis__url": "redis://user:secret@redis:6379"}, "spec.redis.url"),
    "code": ({"code": {"../task.py": "x = 1"}}, "spec.code"),
    "positions": ({"rollout__maxNewTokens": 32, "inference__maxTokensPerRow": 64}, "spec.rollout.maxNewTokens"),
    "row": ({"inference__maxTokensPerRow": 8}, "spec.inference.maxTokensPerRow"),
    "micro-batch": ({"trainer__maxTokensPerMicroBatch": 16}, "spec.inference.maxTokensPerRow"),
    "other-variant": ({"data__path": "/data/tasks.jsonl"}, "spec.data.path"),
    "variant-incomplete": ({"data": {"type": "jsonl"}}, "spec.data.path"),
    "failure-rule-without-codes": (
        {"failurePolicy__rules": [{"exitCodes": [], "action": "Fail"}]},
        "spec.failurePolicy.rules[0].exitCodes",
    ),
    "failure-rule-of-no-component": (
        {"failurePolicy__rules": [{"exitCodes": [1], "action": "Fail", "components": ["redis"]}]},
        "spec.failurePolicy.rules[0].components[0]",
    ),
    "failure-rule-without-action": (
        {"failurePolicy__rules": [{"exitCodes": [1]}]},
        "spec.failurePolicy.rules[0].action",
    ),
    "type": ({"trainer__steps": "many"}, "spec.trainer.steps"),
    "range": ({"algorithm__learningRate": 0}, "spec.algorithm.learningRate"),
    "choice": ({"algorithm__loss": "hinge"}, "spec.algorithm.loss"),
    "name-of-ours": ({"managedBy": "somebody"}, "spec.managedBy"),
}


@pytest.mark.parametrize(("changes", "field"), WRONG.values(), ids=WRONG.keys())
async def test_what_cannot_run_is_refused_at_its_field(api: Api, changes: Object, field: str) -> None:
    item = document(**changes)
    with pytest.raises(ApiError) as refused:
        await api.create(item)
    assert refused.value.reason == "Invalid"
    assert f"{field}:" in refused.value.message
    with pytest.raises(InvalidArgumentError):  # and so it is by `nexrl run`
        parse_experiment(item, Path("/"))


async def test_a_null_of_a_removed_key_is_pruned(api: Api) -> None:
    item = document(inference__url=None, inference__apiKeyEnv=None)
    stored = await api.create(item)
    assert stored["spec"]["inference"].keys().isdisjoint({"url", "apiKeyEnv"})
    parse_experiment(item, Path("/"))


async def test_an_unknown_key_is_refused_when_asked_strictly(api: Api) -> None:
    with pytest.raises(ApiError, match=r"unknown field .spec.trainer.stepz"):
        await api.request(
            "POST", EXPERIMENT.path("default"), query={"fieldValidation": "Strict"}, body=document(trainer__stepz=1)
        )


@pytest.mark.parametrize("name", ["a" * 41, "1abc", "a.b"])
async def test_a_name_that_is_too_long_or_no_label_is_refused(api: Api, name: str) -> None:
    item = document()
    item["metadata"]["name"] = name
    with pytest.raises(ApiError, match="lower-case letters"):
        await api.create(item)


async def test_a_name_of_forty_characters_is_taken(api: Api) -> None:
    item = document()
    item["metadata"]["name"] = "a" * 40
    await api.create(item)


async def test_scale_reads_and_writes_the_rollouts(api: Api) -> None:
    item = await api.create(document())
    path = EXPERIMENT.path("default", item["metadata"]["name"], "scale")
    patch: Object = {"spec": {"replicas": 5}}
    scale = await api.request("PATCH", path, body=patch, content_type="application/merge-patch+json")
    assert scale["spec"]["replicas"] == 5
    stored = await api.get(EXPERIMENT, "default", item["metadata"]["name"])
    assert stored is not None
    assert stored["spec"]["rollout"]["replicas"] == 5
