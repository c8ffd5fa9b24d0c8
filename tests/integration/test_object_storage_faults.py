"""The copy of a run in object storage when another run has it, the storage refuses, or a file cannot be copied."""

import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.local.launcher import copy_to_storage
from nexrl.local.run_folder import RunFolder
from nexrl.mirror import Mirror
from nexrl.results import copy_stored_results
from nexrl.spec import Experiment
from nexrl.storage import RunStorage, run_id
from nexrl_trainer.checkpoint import put_aside
from nexrl_trainer.uploads import Uploads
from tests.support.object_storage import S3Server, checkpoint, new_uploads, storage_section, stored
from tests.support.services import small_experiment
from tests.support.training import World, building_worlds

LIMIT = 60.0


@pytest.fixture
async def build(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    async with building_worlds(tmp_path, redis_url, experiment_name) as start:
        yield start


def resuming(s3: S3Server) -> Experiment:
    return small_experiment(storage=storage_section(s3), resume={"mode": "auto"})


async def copy(uploads: Uploads, path: Path, seconds: float = LIMIT) -> None:
    uploads.add(path)
    await uploads.finish(seconds, seconds)


async def test_a_run_that_another_has_continued_writes_and_deletes_nothing_there_and_goes_on(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    first = new_uploads(s3, old, resuming(s3))
    await first.fetch_newest()
    (old / "metrics.jsonl").write_text("steps 1 to 6")
    await copy(first, checkpoint(old / "checkpoints", 6))
    second = new_uploads(s3, new, resuming(s3))
    await second.fetch_newest()
    assert (new / "checkpoints/global_step_6").is_dir()
    (new / "metrics.jsonl").write_text("steps 7 to 100")
    await copy(second, checkpoint(new / "checkpoints", 100))
    before = s3.names("lab/test")
    await copy(first, checkpoint(old / "checkpoints", 8), 3.0)
    assert s3.names("lab/test") == before
    assert "has the results of an earlier run, or of one that runs now" in caplog.text
    kept = {(s3.bucket / f"lab/test/records/{run_id(run)}/metrics.jsonl").read_text() for run in (old, new)}
    assert kept == {"steps 1 to 6", "steps 7 to 100"}, "no run writes over the records of another"


async def test_a_run_that_resumes_at_an_older_step_keeps_the_later_steps_of_the_earlier_run(
    s3: S3Server, tmp_path: Path
) -> None:
    first, second = (new_uploads(s3, tmp_path / name, resuming(s3)) for name in ("first", "second"))
    await copy(first, checkpoint(tmp_path / "first/checkpoints", 100))
    await second.fetch_newest()
    put_aside(tmp_path / "second/checkpoints/global_step_100")  # its ledger does not have so many steps
    for step in (6, 8):
        await copy(second, checkpoint(tmp_path / "second/checkpoints", step))
    again = new_uploads(s3, tmp_path / "second", resuming(s3))
    await again.fetch_newest()
    await copy(again, checkpoint(tmp_path / "second/checkpoints", 10))
    folders = {name.split("/")[0] for name in s3.names("lab/test/checkpoints")}
    assert {"global_step_100", "global_step_10"} <= folders


async def test_the_launcher_writes_nothing_over_the_results_of_another_run(
    s3: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = small_experiment(storage=storage_section(s3))
    folder = RunFolder(tmp_path / "runs", experiment)
    stored(s3).claim(experiment, "another")
    await copy_to_storage(folder, experiment)
    folder.close()
    assert s3.names("lab/test") == {"run.json"}
    assert "warning: the report and the newest logs are only in" in capsys.readouterr().out


async def test_a_storage_that_refuses_ends_only_a_run_that_has_not_trained(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    with pytest.raises(InvalidArgumentError):
        await new_uploads(s3, tmp_path).fetch_newest()
    with pytest.raises(UnavailableError, match="credentials"):  # its newest checkpoint may be there: restart
        await new_uploads(s3, tmp_path).fetch_newest(durable_steps=2)
    await new_uploads(s3, tmp_path).fetch_newest(trained=2)
    assert "upload: storage.uri" in caplog.text


async def test_another_run_in_the_storage_ends_a_new_run_without_a_restart(s3: S3Server, tmp_path: Path) -> None:
    stored(s3).claim(small_experiment(), "another")
    with pytest.raises(InvalidArgumentError, match="has the results of an earlier run"):
        await new_uploads(s3, tmp_path).fetch_newest()


async def test_a_full_disk_at_the_start_is_reported_if_a_checkpoint_is_there(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    await copy(new_uploads(s3, tmp_path / "first"), checkpoint(tmp_path / "first/checkpoints", 3))
    checkpoint(tmp_path / "run/checkpoints", 1)
    monkeypatch.setattr(RunStorage, "get", full)
    await new_uploads(s3, tmp_path / "run", resuming(s3)).fetch_newest()
    assert "No space left" in caplog.text


@pytest.mark.parametrize("name", ["a\nb", "a\udcffb"])
def test_a_file_whose_name_object_storage_refuses_is_left_out_and_named(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "logs").mkdir()
    for log in (name, "trainer.log"):
        (tmp_path / "logs" / log).write_text("log")
    Mirror(stored(s3), tmp_path, tmp_path / "experiment.yaml").copy_changes()
    assert s3.names(f"lab/test/records/{run_id(tmp_path)}") == {"logs/trainer.log"}
    assert repr(f"logs/{name}") in caplog.text


def test_a_copy_ends_at_its_limit(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("1")
    with pytest.raises(UnavailableError, match="not all is copied after 0 s"):
        Mirror(stored(s3), tmp_path, tmp_path / "experiment.yaml").copy_changes(0)
    assert not s3.names("lab/test")


class SlowStorage(RunStorage):
    """Takes 0.3 s for each file."""

    def put(self, name: str, path: Path) -> None:
        time.sleep(0.3)
        super().put(name, path)


async def test_the_end_waits_while_files_are_copied(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nexrl_trainer.uploads.RunStorage", SlowStorage)
    uploads = new_uploads(s3, tmp_path)
    (tmp_path / "logs").mkdir()
    for number in range(15):
        (tmp_path / f"logs/{number}.log").write_text("log")
    await uploads.finish(4.0, LIMIT)
    assert len(s3.names(f"lab/test/records/{run_id(tmp_path)}")) == 15
    assert "not complete" not in caplog.text


async def test_a_last_copy_that_is_cut_names_the_step_that_is_stored(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = new_uploads(s3, tmp_path)
    await copy(uploads, checkpoint(tmp_path / "checkpoints", 3))
    s3.stop()
    await copy(uploads, checkpoint(tmp_path / "checkpoints", 4), 0.1)
    assert "This process has stored the checkpoint of step 3" in caplog.text
    assert uploads.in_use == tmp_path / "checkpoints/global_step_4", "its thread still reads it"


async def test_fetched_results_with_the_files_of_another_checkpoint_are_refused(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    run = tmp_path / "run"
    await copy(new_uploads(s3, run), checkpoint(run / "checkpoints", 2))
    copy_stored_results(stored(s3).address, tmp_path / "good", everything=False)
    assert (tmp_path / "good/checkpoints/global_step_2/checkpoint.json").is_file()
    (run / "other").write_text("weights of the same step, made again")
    stored(s3).put("checkpoints/global_step_2/model.safetensors", run / "other")
    with pytest.raises(FailedPreconditionError, match=r"model\.safetensors is missing or damaged"):
        copy_stored_results(stored(s3).address, tmp_path / "mixed", everything=False)
    assert not (tmp_path / "mixed").exists()


async def test_results_contain_the_records_of_earlier_runs_if_everything_is_asked_for(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    for name in ("first", "second"):
        uploads = new_uploads(s3, tmp_path / name, resuming(s3))
        await uploads.fetch_newest()
        (tmp_path / name / "metrics.jsonl").write_text(name)
        await uploads.finish(LIMIT, LIMIT)
    earlier = f"records/{run_id(tmp_path / 'first')}/metrics.jsonl"
    for everything, expected in ((False, {"metrics.jsonl"}), (True, {"metrics.jsonl", earlier})):
        folder = tmp_path / f"results-{everything}"
        copy_stored_results(stored(s3).address, folder, everything=everything)
        assert (folder / "metrics.jsonl").read_text() == "second"
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == expected


async def test_the_trainer_shows_that_it_waits_for_object_storage(
    s3: S3Server, build: Callable[..., Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    world = await build("waiting", storage=storage_section(s3), trainer={"steps": 0})

    async def fetch(*_: Any) -> None:
        seen.extend((work.activity, work.waiting_on) for work in world.activity.snapshot().work)

    monkeypatch.setattr(Uploads, "fetch_newest", fetch)
    await world.live()
    assert ("fetch", "object storage") in seen
