"""What cannot run ends before it begins, with one message that names the field, or the path, and the value."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from tests.support.runs import EXPERIMENT, copy_experiment, nexrl, processes_in

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an experiment that could run."""
    copy_experiment(tmp_path)
    return tmp_path


def refused(root: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and message of a `nexrl run` that does not begin, or ends at once."""
    ended = nexrl(root, "run", EXPERIMENT, *arguments, "--root", ".")
    assert not processes_in(root)
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr


@pytest.mark.guide("S9")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param(["trainer={}"], "spec.trainer.steps: missing; allowed: an integer", id="missing field"),
        pytest.param(["trainer.steps=many"], 'spec.trainer.steps: "many" is not allowed', id="wrong type"),
        pytest.param(["trainer.stepz=5"], "spec.trainer.stepz: unknown key; did you mean steps?", id="unknown key"),
        pytest.param(
            ["trajectoryPool.groupSize=7"],
            "spec.trajectoryPool.groupSize: 7 is not allowed: batchSize (128) must be a multiple of groupSize (7)",
            id="impossible combination",
        ),
        pytest.param(
            ["model.path=no/such/model", "model.scratch=null"],
            "spec.model.path: {root}/no/such/model does not exist",
            id="model path that does not exist",
        ),
        pytest.param(
            ["data={type: jsonl, path: tasks.jsonl}"],
            "spec.data.path: {root}/tasks.jsonl line 2: not JSON",
            id="data file with a broken line",
        ),
    ],
)
def test_a_wrong_experiment_is_refused_with_what_is_wrong(root: Path, overrides: list[str], said: str) -> None:
    (root / "tasks.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"prompt": "2=", "answ\n')
    code, message = refused(root, *overrides)
    assert code == InvalidArgumentError.exit_code
    assert said.format(root=root) in message
    assert not (root / "copy-digits").exists()


def test_all_problems_of_an_experiment_are_told_at_once(root: Path) -> None:
    code, message = refused(root, "trainer.stepz=5", "rollout.workers=0", "data={type: jsonl, path: nowhere}")
    assert code == InvalidArgumentError.exit_code
    for field in ("spec.trainer.stepz", "spec.rollout.workers", "spec.data.path"):
        assert f"\n  {field}: " in message


def test_a_redis_that_is_down_is_named(root: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    code, message = refused(root, f"redis.url={url}")
    assert code == UnavailableError.exit_code
    assert message.startswith(f"error: redis.url: {url}: ")
    assert "no Redis answers; start one there" in message
    assert not (root / "copy-digits").exists()


def test_a_port_that_is_taken_is_named(root: Path, taken_port: int) -> None:
    code, message = refused(root, "--port", str(taken_port))
    assert code == FailedPreconditionError.exit_code
    assert f"127.0.0.1:{taken_port}" in message
    assert message.count("\n") == 1


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which somebody else listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])
