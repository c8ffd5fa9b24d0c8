"""Where a trainer starts if its newest checkpoint cannot be loaded: an older one, or nowhere, with the reason."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nexrl.activity import ActivityTracker
from nexrl.client import TrainBatchClient
from nexrl.errors import InvalidArgumentError
from nexrl.restarts import FAILING_EXITS
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import train_batch_pool_service_pb2 as pb
from nexrl_trainer.checkpoint import CheckpointMetadata, OpenedCheckpoint, open_checkpoint
from nexrl_trainer.starting_point import Checkpoints, StartingPoint
from nexrl_trainer.step import Learner
from tests.support.checkpoints import save_checkpoint

BuildLearner = Callable[..., Learner]


class Ledger(TrainBatchClient):
    """A ledger with `durable` steps in checkpoints and `trained` steps after them."""

    def __init__(self, durable: int, trained: int) -> None:
        self._answer = pb.GetTrainBatchPoolStateResponse(durable_steps=durable, trained=trained)
        self.resumed_from: list[int] = []

    async def state(self) -> pb.GetTrainBatchPoolStateResponse:
        return self._answer

    async def resume(self, steps: int, data_cursor: int = 0) -> pb.ResumeFromCheckpointResponse:
        self.resumed_from.append(steps)
        return pb.ResumeFromCheckpointResponse(incarnation=1)


class Reports(ActivityTracker):
    """Keeps what would be shown in the status."""

    def __init__(self) -> None:
        super().__init__(activity_pb.Module(name="trainer"), None)
        self.messages: list[str] = []

    async def report(self, error: BaseException | str, **context: object) -> str:
        self.messages.append(str(error))
        return ""


@dataclass
class Run:
    """The checkpoints of a run, and the learner of the trainer that starts."""

    folder: Path
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    reports: Reports

    def save(self, *steps: int, learner: Learner | None = None) -> Path:
        saved = learner or self.learner
        for saved.step in steps:
            path = save_checkpoint(self.folder, saved, self.tokenizer, CheckpointMetadata(step=saved.step))
        self.learner.step = 0
        return path

    async def start(self, ledger: Ledger, start_from: Path | None = None) -> OpenedCheckpoint | None:
        async def opened(path: Path) -> OpenedCheckpoint:
            return open_checkpoint(path, self.learner)

        checkpoints = Checkpoints(self.folder, start_from, self.tokenizer)
        return (await StartingPoint(checkpoints, ledger, self.reports, opened).find())[0]

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def run(tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase) -> Run:
    """A run without checkpoints."""
    return Run(tmp_path, build_learner(), tokenizer, Reports())


def cut_short(path: Path) -> None:
    file = path / "training_state.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "model.safetensors").write_bytes(content)


def lose_a_file(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def tear_the_marker(path: Path) -> None:
    (path / "checkpoint.json").write_bytes((path / "checkpoint.json").read_bytes()[:40])


def replace_the_marker(path: Path) -> None:
    (path / "checkpoint.json").write_text("[]")


def lose_the_metadata(path: Path) -> None:
    marker = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(marker | {"metadata": {}}))


DAMAGES: Sequence[tuple[Callable[[Path], None], str]] = (
    (cut_short, "training_state.safetensors is missing or damaged"),
    (flip_a_bit, "model.safetensors is missing or damaged"),
    (lose_a_file, "tokenizer.json is missing or damaged"),
    (tear_the_marker, "is not a complete checkpoint: checkpoint.json:"),
    (replace_the_marker, "checkpoint.json is no marker of NexRL"),
    (lose_the_metadata, "is not a complete checkpoint: checkpoint.json: metadata: 'batch_ids'"),
)


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
async def test_a_damaged_checkpoint_is_put_aside_if_the_ledger_has_the_batches_after_the_one_before(
    run: Run, damage: Callable[[Path], None], reason: str
) -> None:
    run.save(2)
    damage(run.save(4))
    ledger = Ledger(durable=2, trained=2)
    opened = await run.start(ledger)
    assert opened is not None
    assert opened.path.name == "global_step_2"
    assert ledger.resumed_from == [2]
    assert run.names() == {"global_step_2", "global_step_4.unusable"}
    (message,) = run.reports.messages
    assert reason in message
    assert "kept as global_step_4.unusable and not used" in message


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
async def test_a_damaged_checkpoint_whose_batches_are_deleted_ends_the_run_with_the_reason_and_stays(
    run: Run, damage: Callable[[Path], None], reason: str
) -> None:
    run.save(2)
    damage(run.save(4))
    ledger = Ledger(durable=4, trained=1)
    for _ in range(2):  # a restart finds the same
        with pytest.raises(InvalidArgumentError, match="the ledger continues from 4 to 5 steps") as found:
            await run.start(ledger)
        assert reason in str(found.value)
        assert "Restore the files of global_step_4 from a copy" in str(found.value)
        assert found.value.exit_code in FAILING_EXITS
    assert ledger.resumed_from == []
    assert run.names() == {"global_step_2", "global_step_4"}


async def test_a_checkpoint_of_another_model_is_put_aside_if_an_older_one_can_be_continued(
    run: Run, build_learner: BuildLearner
) -> None:
    run.save(2)
    run.save(4, learner=build_learner(dtype="bfloat16"))
    opened = await run.start(Ledger(durable=2, trained=2))
    assert opened is not None
    assert opened.path.name == "global_step_2"
    assert "is of another model" in run.reports.messages[0]


async def test_checkpoints_of_another_model_end_the_run_and_none_is_renamed(
    run: Run, build_learner: BuildLearner
) -> None:
    run.save(2, 4, learner=build_learner(dtype="bfloat16"))
    for ledger in (Ledger(durable=4, trained=0), Ledger(durable=0, trained=0)):  # the second has lost everything
        with pytest.raises(InvalidArgumentError, match="another model"):
            await run.start(ledger)
    assert run.names() == {"global_step_2", "global_step_4"}


async def test_a_run_whose_first_checkpoint_is_damaged_replays_all_steps_from_the_initial_weights(run: Run) -> None:
    flip_a_bit(run.save(2))
    ledger = Ledger(durable=0, trained=2)
    assert await run.start(ledger) is None
    assert ledger.resumed_from == [0]
    assert run.names() == {"global_step_2.unusable"}


async def test_a_ledger_that_lost_everything_begins_at_an_older_checkpoint_and_never_at_the_initial_weights(
    run: Run,
) -> None:
    older = run.save(2)
    flip_a_bit(run.save(4))
    opened = await run.start(Ledger(durable=0, trained=0))
    assert opened is not None
    assert opened.path == older
    flip_a_bit(older)
    with pytest.raises(InvalidArgumentError, match=r"global_step_2: model\.safetensors is missing or damaged"):
        await run.start(Ledger(durable=0, trained=0))


async def test_a_damaged_checkpoint_that_the_experiment_names_ends_the_run(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flip_a_bit(named := run.save(2).rename(tmp_path_factory.mktemp("other") / "global_step_2"))
    with pytest.raises(InvalidArgumentError, match=r"resume\.path: .*model\.safetensors is missing or damaged"):
        await run.start(Ledger(durable=0, trained=0), named)
