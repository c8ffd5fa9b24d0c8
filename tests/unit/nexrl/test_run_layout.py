"""The layout of a run's folder: what is written is found again, and nothing else is."""

from pathlib import Path

from nexrl.run_layout import batch_path, batches_by_number, checkpoint_path, checkpoints_by_step, checkpoints_path


def test_checkpoints_are_found_by_number_and_those_put_aside_or_being_written_are_not(tmp_path: Path) -> None:
    for step in (10, 9):
        checkpoint_path(tmp_path, step).mkdir()
    for name in ("global_step_11.tmp", "global_step_12.ahead-of-ledger", "global_step_x", "notes"):
        (tmp_path / name).mkdir()
    assert list(checkpoints_by_step(tmp_path)) == [9, 10]
    assert checkpoints_by_step(tmp_path)[10] == tmp_path / "global_step_10"


def test_checkpoints_are_in_the_runs_folder_unless_the_experiment_names_another(tmp_path: Path) -> None:
    assert checkpoints_path(tmp_path, None) == tmp_path / "checkpoints"
    assert checkpoints_path(tmp_path, "/shared/checkpoints") == Path("/shared/checkpoints")


def test_batches_are_found_by_number_and_those_being_written_are_not(tmp_path: Path) -> None:
    for number in (1_000_000, 2):
        batch_path(tmp_path, number).touch()
    (tmp_path / "batch_000003.tmp").touch()
    assert list(batches_by_number(tmp_path)) == [2, 1_000_000]
    assert batches_by_number(tmp_path)[2].name == "batch_000002.pb"
