"""What the experiment file says about code of the user: checked by `nexrl validate`, carried by `nexrl submit`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nexrl.spec import load_experiment, validate_file
from nexrl.spec.algorithm import OwnLoss
from nexrl.spec.bundle import bundle

CODE = """
from functools import wraps
from nexrl.algorithm import Processor
from nexrl.rollout_worker import RolloutWorker

def loss(inputs, *, beta=0.0, name="", nested=None): ...
def strict(inputs, *, clip): ...
def advantage(rewards, groups): ...
def of_one(rewards): ...
async def later(*arguments): ...
class Mine: ...
class Worker(RolloutWorker):
    def __init__(self, context): ...
    async def rollout(self, lease): ...
class AbstractWorker(RolloutWorker): ...
class WorkerAlone(RolloutWorker):
    async def rollout(self, lease): ...
class SyncWorker(Worker):
    def rollout(self, lease): ...
class Prepares(Processor):
    def fit(self, batch): ...
class AbstractProcessor(Processor): ...
class ProcessorAlone(Prepares):
    def __init__(self): ...
class AsyncProcessor(Processor):
    async def fit(self, batch): ...
class Environment:
    async def run(self, task, endpoint): ...
class SyncEnvironment:
    def run(self, task, endpoint): ...
class Decorated(Environment):
    run = wraps(Environment.run)(lambda *arguments: Environment.run(*arguments))
def made(size=3): ...
class EnvironmentOfASize(Environment):
    def __init__(self, size): ...
class AsyncCall:
    async def __call__(self, task, text, is_finished): ...
later_too = AsyncCall()
number = 5
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes an experiment file with these sections, beside a module with code of the user."""
    (tmp_path / "of_the_user.py").write_text(CODE)
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit\n")

    def write(**sections: dict[str, Any]) -> Path:
        scratch = {"alphabet": "01", "hiddenSize": 8, "intermediateSize": 8, "layers": 1, "heads": 1}
        spec = {"model": {"scratch": scratch}, "data": {"type": "mock"}, "trainer": {"steps": 1}}
        spec |= {"rollout": {"maxNewTokens": 8, **sections.pop("rollout", {})}, **sections}
        document = {"apiVersion": "nexrl.dev/v1alpha1", "kind": "Experiment", "metadata": {"name": "x"}, "spec": spec}
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return write


def wrong(section: str, key: str, name: str, message: str, **others: str) -> tuple[dict[str, Any], str, str]:
    """Return the case of a reference to `name`, at whose field the message is expected."""
    return {section: {**others, key: f"of_the_user:{name}"}}, f"spec.{section}.{key}", f"of_the_user:{name} {message}"


def wrong_worker(name: str, message: str) -> tuple[dict[str, Any], str, str]:
    return wrong("rollout", "worker", name, message, type="worker")


def wrong_environment(name: str, message: str) -> tuple[dict[str, Any], str, str]:
    return wrong("rollout", "environment", name, message, type="agent")


@pytest.mark.parametrize("name", ["Environment", "SyncEnvironment", "Decorated", "made"])
def test_an_environment_is_a_class_or_made_by_a_function(write: Callable[..., Path], name: str) -> None:
    assert validate_file(write(rollout={"type": "agent", "environment": f"of_the_user:{name}"})) == []


def test_code_of_the_user_is_accepted_and_bundled(write: Callable[..., Path]) -> None:
    file = write(
        rollout={"type": "worker", "worker": "of_the_user:Worker"},
        algorithm={
            "loss": "of_the_user:loss",
            "lossConfig": {"beta": 0.1, "name": "x", "nested": {"deep": [1, 2]}},
            "advantage": "of_the_user:advantage",
            "processor": "of_the_user:Prepares",
        },
    )
    assert validate_file(file) == []
    algorithm = load_experiment(file).spec.algorithm
    assert isinstance(algorithm, OwnLoss)
    assert algorithm.loss_config == {"beta": 0.1, "name": "x", "nested": {"deep": [1, 2]}}
    assert bundle(file)["spec"]["code"] == {"of_the_user.py": CODE}


@pytest.mark.parametrize(
    ("sections", "field", "message"),
    [
        ({"algorithm": {"loss": "of_the_user:absent"}}, "spec.algorithm.loss", "has no absent"),
        (
            {"algorithm": {"loss": "exits_on_import:x"}},
            "spec.algorithm.loss",
            "cannot import exits_on_import: SystemExit",
        ),
        ({"algorithm": {"advantage": "nowhere_at_all:x"}}, "spec.algorithm.advantage", "cannot import nowhere_at_all"),
        *(
            (
                {"algorithm": {"processor": f"of_the_user:{name}"}},
                "spec.algorithm.processor",
                f"of_the_user:{name} is not a subclass of nexrl.algorithm.Processor",
            )
            for name in ("number", "loss", "Mine", "Worker", "Processor")
        ),
        *(
            (
                {"rollout": {"type": "worker", "worker": f"of_the_user:{name}"}},
                "spec.rollout.worker",
                f"of_the_user:{name} is not a subclass of nexrl.rollout_worker.RolloutWorker",
            )
            for name in ("number", "loss", "Mine", "Prepares", "RolloutWorker")
        ),
        *(
            (
                {section: {key: f"of_the_user:{name}"}},
                f"spec.{section}.{key}",
                f"of_the_user:{name} is not a function",
            )
            for section, key in (("algorithm", "loss"), ("algorithm", "advantage"), ("rollout", "reward"))
            for name in ("number", "Mine")
        ),
        wrong("algorithm", "loss", "later", "must not be `async def`"),
        wrong("algorithm", "advantage", "later", "must not be `async def`"),
        wrong("rollout", "reward", "later_too", "must not be `async def`"),
        wrong_environment("later", "must not be `async def`"),
        wrong(
            "algorithm", "advantage", "of_one", "is called with (rewards_B, groups_B), which it does not accept: too"
        ),
        wrong("rollout", "reward", "advantage", "is called with (task, text, is_finished), which it does not accept"),
        wrong_environment("EnvironmentOfASize", "is called with (), which it does not accept: missing a required"),
        wrong_environment("Mine", "must have a method `[async] def run`"),
        wrong_worker("AbstractWorker", "is abstract; override rollout"),
        wrong_worker("SyncWorker", "must have a method `async def rollout`"),
        wrong_worker("WorkerAlone", "is called with (context), which it does not accept: too many"),
        wrong("algorithm", "processor", "AbstractProcessor", "is abstract; override fit"),
        wrong("algorithm", "processor", "AsyncProcessor", "must have a method `def fit`"),
        wrong(
            "algorithm", "processor", "ProcessorAlone", "is called with (context), which it does not accept: too many"
        ),
        *(
            ({section: {key: "math:fsum"}}, f"spec.{section}.{key}", "math:fsum is a built-in function")
            for section, key in (("algorithm", "loss"), ("algorithm", "advantage"), ("rollout", "reward"))
        ),
        (
            {"rollout": {"type": "agent", "environment": "of_the_user:number"}},
            "spec.rollout.environment",
            "of_the_user:number is not a function or class",
        ),
        (
            {"algorithm": {"loss": "of_the_user:loss", "lossConfig": {"betta": 1}}},
            "spec.algorithm.lossConfig",
            "of_the_user:loss does not accept it: got an unexpected keyword argument 'betta'",
        ),
        (
            {"algorithm": {"loss": "of_the_user:loss", "lossConfig": {"inputs": 1}}},
            "spec.algorithm.lossConfig",
            "multiple values for argument 'inputs'",
        ),
        (
            {"algorithm": {"loss": "of_the_user:strict"}},
            "spec.algorithm.lossConfig",
            "of_the_user:strict does not accept it: missing a required",
        ),
        ({"algorithm": {"loss": "hinge"}}, "spec.algorithm.loss", "ppo_clip"),
        ({"algorithm": {"processor": "none"}}, "spec.algorithm.processor", "external"),
        ({"algorithm": {"lossConfig": {"beta": 1}}}, "spec.algorithm.lossConfig", "only loss module:name has this key"),
        ({"algorithm": {"aggregation": "constant"}}, "spec.algorithm.constantTokens", "missing; allowed: an integer"),
        (
            {"algorithm": {"constantTokens": 8}},
            "spec.algorithm.constantTokens",
            "only aggregation constant has",
        ),
        ({"rollout": {"type": "worker"}}, "spec.rollout.worker", "missing"),
        ({"rollout": {"worker": "of_the_user:Mine"}}, "spec.rollout.worker", "only type worker has this key"),
        ({"rollout": {"type": "worker", "worker": "of_the_user:no"}}, "spec.rollout.worker", "has no no"),
    ],
)
def test_what_is_wrong_with_a_reference_is_said_at_its_field(
    write: Callable[..., Path], sections: dict[str, Any], field: str, message: str
) -> None:
    violations = validate_file(write(**sections))
    assert [violation.field for violation in violations] == [field]
    assert message in violations[0].description
