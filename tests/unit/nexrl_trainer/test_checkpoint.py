"""Checkpoints: a resumed run continues exactly, and a killed writer leaves nothing that looks complete."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from nexrl.checkpoint_files import sha256
from nexrl.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from nexrl.models import iter_weights
from nexrl.train_batch import TrainBatch
from nexrl_trainer.checkpoint import (
    CheckpointMetadata,
    find_latest_checkpoint,
    hold_checkpoint,
    load_checkpoint,
    partial_path,
    prune_checkpoints,
    put_aside,
    remove_abandoned,
)
from nexrl_trainer.ranks import Ranks
from nexrl_trainer.step import Learner
from tests.support.checkpoints import save_checkpoint

BuildLearner = Callable[..., Learner]
BuildBatch = Callable[..., TrainBatch]
KILLED = 9


def assert_equal_state(first: Learner, second: Learner) -> None:
    assert first.step == second.step
    for left, right in (
        (dict(iter_weights(first.model)), dict(iter_weights(second.model))),
        (first.optimizer.tensors(), second.optimizer.tensors()),
    ):
        assert left.keys() == right.keys()
        assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def save(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(folder, learner, tokenizer, CheckpointMetadata(step=learner.step))


def settle(folder: Path) -> None:
    """Make all checkpoints so old that no copy of the ledger can lack them."""
    for marker in folder.glob("*/checkpoint.json"):
        os.utime(marker, (0, 0))


@pytest.mark.guide("J12", "L18")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_resumed_run_equals_the_run_that_was_never_stopped(
    tmp_path: Path,
    build_learner: BuildLearner,
    build_batch: BuildBatch,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    steps_before: int,
) -> None:
    whole, resumed = build_learner(dtype=dtype), build_learner(dtype=dtype)
    for step in range(steps_before):
        whole.train(build_batch(step))
    metadata = CheckpointMetadata(steps_before, batch_ids=(0, 1, 2), cursor={"epoch": 0, "position": 12})
    path = save_checkpoint(tmp_path, whole, tokenizer, metadata)
    drawn = torch.rand(4)

    resumed.train(build_batch(99))  # whatever it held before must be gone
    assert load_checkpoint(path, resumed) == metadata
    assert torch.equal(torch.rand(4), drawn)
    assert_equal_state(whole, resumed)
    for step in range(steps_before, steps_before + 3):
        assert whole.train(build_batch(step)) == resumed.train(build_batch(step))
    assert_equal_state(whole, resumed)


def test_the_random_state_of_a_gpu_is_restored_on_a_gpu_and_ignored_on_a_cpu(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, state = build_learner(), torch.arange(16, dtype=torch.uint8)
    restored: list[tuple[list[int], str]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: restored.append((state.tolist(), str(device)))
    )
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(type(learner.model), "device", torch.device("cuda"))  # its weights stay where they are
        path = save(tmp_path, learner, tokenizer)
        load_checkpoint(path, learner)
    assert restored == [(list(range(16)), "cuda")]
    load_checkpoint(path, learner)
    assert len(restored) == 1


def test_hugging_face_opens_a_checkpoint(
    tmp_path: Path, build_learner: BuildLearner, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    learner.train(build_batch(0))
    path = save(tmp_path, learner, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(path)
    for (name, tensor), (saved_name, saved) in zip(iter_weights(learner.model), iter_weights(model), strict=True):
        assert name == saved_name
        assert torch.equal(tensor, saved)
    assert AutoTokenizer.from_pretrained(path)("42=").input_ids == tokenizer("42=").input_ids


def test_a_checkpoint_of_an_earlier_release_is_loaded(
    tmp_path: Path, build_learner: BuildLearner, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner, resumed = build_learner(dtype="bfloat16"), build_learner(dtype="bfloat16")
    learner.train(build_batch(0))
    path = save(tmp_path, learner, tokenizer)
    state = path / "training_state.safetensors"
    save_file(load_file(state), state)  # whole tensors, and nothing about slices
    marker = json.loads((path / "checkpoint.json").read_text())
    marker["sha256"][state.name] = sha256(state)
    (path / "checkpoint.json").write_text(json.dumps(marker))
    load_checkpoint(path, resumed)
    assert_equal_state(learner, resumed)


class TwoRanksOneFull(Ranks):
    """Rank 0 of two, of which the other cannot write."""

    def exchange(self, content: bytes) -> list[bytes]:
        return [content, b'{"number": 1, "error": "OSError: [Errno 28] No space left on device"}']


class TwoRanksOneBehind(Ranks):
    """Rank 0 of two, of which the other reports the state before."""

    def exchange(self, content: bytes) -> list[bytes]:
        return [content, b'{"number": 0, "weights": {}, "sha256": {}}']


def test_a_checkpoint_that_another_rank_cannot_write_is_never_complete(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    learner.ranks = TwoRanksOneFull(0, 2)
    with pytest.raises(OSError, match=r"rank 1 could not write its files: OSError: .Errno 28. No space left"):
        save(tmp_path, learner, tokenizer)
    assert find_latest_checkpoint(tmp_path) is None


def test_a_report_of_another_checkpoint_completes_none(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    learner.ranks = TwoRanksOneBehind(0, 2)
    with pytest.raises(OSError, match="rank 1 has written another one; restart the trainer"):
        save(tmp_path, learner, tokenizer)
    assert find_latest_checkpoint(tmp_path) is None


@pytest.mark.guide("D9", "L18")
def test_latest_is_judged_by_number(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert find_latest_checkpoint(tmp_path) is None
    learner = build_learner()
    for learner.step in (10, 9):
        save(tmp_path, learner, tokenizer)
    assert find_latest_checkpoint(tmp_path) == tmp_path / "global_step_10"


def sync_calls_of_a_save(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, die_at: int) -> int:
    """Save in a child process that dies, without any clean-up, at its `die_at`-th write to disk. Its exit code."""
    child = os.fork()
    if child == 0:
        real, calls = os.fsync, iter(range(1000))
        os.fsync = lambda descriptor: os._exit(KILLED) if next(calls) == die_at else real(descriptor)  # type: ignore[assignment]
        save(folder, learner, tokenizer)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.guide("D9")
def test_a_writer_killed_at_any_write_leaves_the_previous_checkpoint_the_latest(
    tmp_path: Path, build_learner: BuildLearner, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner, resumed = build_learner(), build_learner()
    previous = save(tmp_path, learner, tokenizer)
    learner.train(build_batch(0))
    kills = 0
    while sync_calls_of_a_save(tmp_path, learner, tokenizer, die_at=kills) == KILLED:
        latest = find_latest_checkpoint(tmp_path)
        assert latest is not None
        load_checkpoint(latest, resumed)
        if latest != previous:
            break  # the last write is that of the folder, after the rename: complete, and merely not yet known to be
        kills += 1
    assert kills >= 5  # model, configuration, tokenizer, state, marker
    load_checkpoint(tmp_path / "global_step_1", resumed)
    assert_equal_state(learner, resumed)
    settle(tmp_path)
    assert prune_checkpoints(tmp_path, keep=1) == [previous]
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_what_two_trainers_write_at_once_is_never_mixed(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off, current = build_learner(), build_learner()
    late = hold_checkpoint(tmp_path, cut_off, tokenizer, CheckpointMetadata(0))
    monkeypatch.setattr("nexrl_trainer.checkpoint.LIFE", "another process")
    written = hold_checkpoint(tmp_path, current, tokenizer, CheckpointMetadata(0)).write()
    prune_checkpoints(tmp_path, keep=1)  # may be called by the one that is cut off
    with pytest.raises(OSError, match="Directory not empty"):
        late.write()
    assert load_checkpoint(written, current) == CheckpointMetadata(0)


def test_a_trainer_that_has_resumed_deletes_what_earlier_ones_left_and_keeps_its_own(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    left = [tmp_path / name for name in ("global_step_1.tmp", "global_step_1.other.tmp")]
    for folder in left:
        (folder / "model").mkdir(parents=True)
    kept = [save(tmp_path, build_learner(), tokenizer), partial_path(tmp_path / "global_step_2")]
    kept[1].mkdir()
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == kept


def test_a_step_is_saved_once(tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase) -> None:
    learner = build_learner()
    save(tmp_path, learner, tokenizer)
    with pytest.raises(AlreadyExistsError):
        save(tmp_path, learner, tokenizer)


@pytest.mark.guide("S11")
def test_a_damaged_file_is_noticed_and_the_learner_left_alone(
    tmp_path: Path, build_learner: BuildLearner, build_batch: BuildBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    learner.train(build_batch(0))
    path = save(tmp_path, learner, tokenizer)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    fresh = build_learner()
    with pytest.raises(FailedPreconditionError, match=r"model\.safetensors is missing or damaged"):
        load_checkpoint(path, fresh)
    assert_equal_state(fresh, build_learner())


@pytest.mark.guide("S11")
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = save(tmp_path, build_learner(), tokenizer)
    with pytest.raises(FailedPreconditionError, match="another model"):
        load_checkpoint(path, build_learner(dtype="bfloat16"))


@pytest.mark.guide("D9", "S11")
def test_an_unfinished_checkpoint_is_not_loaded(tmp_path: Path, build_learner: BuildLearner) -> None:
    (tmp_path / "global_step_7").mkdir()
    assert find_latest_checkpoint(tmp_path) is None
    with pytest.raises(NotFoundError):
        load_checkpoint(tmp_path / "global_step_7", build_learner())


@pytest.mark.guide("Q24")
def test_pruning_keeps_the_newest(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    for learner.step in (2, 9, 10):
        save(tmp_path, learner, tokenizer)
    settle(tmp_path)
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_9"]


def test_pruning_keeps_what_a_ledger_that_lost_its_last_seconds_resumes_from(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    for learner.step in (2, 4):
        save(tmp_path, learner, tokenizer)
    settle(tmp_path)
    for learner.step in (6, 8, 10):
        save(tmp_path, learner, tokenizer)
    assert prune_checkpoints(tmp_path, keep=2) == [tmp_path / "global_step_2"]


def test_a_checkpoint_that_was_put_aside_is_never_the_latest_nor_pruned(
    tmp_path: Path, build_learner: BuildLearner, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = build_learner()
    for learner.step in (2, 4):
        save(tmp_path, learner, tokenizer)
    for name in ("global_step_4.ahead-of-ledger", "global_step_4.ahead-of-ledger1"):
        assert put_aside(tmp_path / "global_step_4") == tmp_path / name
        assert find_latest_checkpoint(tmp_path) == tmp_path / "global_step_2"
        save(tmp_path, learner, tokenizer)
    settle(tmp_path)
    assert prune_checkpoints(tmp_path, keep=1) == [tmp_path / "global_step_2"]
    assert (tmp_path / "global_step_4.ahead-of-ledger/checkpoint.json").exists()
