"""The copy of a run in object storage, with a real S3 server: complete or absent, and what a trainer resumes from."""

import asyncio
import json
import logging
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nexrl.checkpoint_files import check_files
from nexrl.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from nexrl.models import iter_weights
from nexrl.run_layout import CHECKPOINT_MARKER
from nexrl.spec import Experiment
from nexrl.storage import RunStorage, run_id
from nexrl_trainer import uploads as uploads_module
from nexrl_trainer.checkpoint import find_latest_checkpoint, put_aside
from nexrl_trainer.stored_checkpoints import StoredCheckpoints
from nexrl_trainer.uploads import Uploads
from tests.support.object_storage import (
    BUCKET,
    CREDENTIALS,
    KEY,
    SECRET,
    S3Server,
    checkpoint,
    new_uploads,
    storage_section,
    stored,
)
from tests.support.patience import eventually
from tests.support.services import settings, small_experiment
from tests.support.trainer_process import Suicide
from tests.support.trainers import running_world
from tests.support.training import KillAt, World, building_worlds

KEEP = 2


@pytest.fixture
async def build(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    async with building_worlds(tmp_path, redis_url, experiment_name) as start:
        yield start


class FailingStorage(RunStorage):
    """Fails at put number `left`, counted from 1."""

    left = 0

    def put(self, name: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            raise UnavailableError("the test ends it here")
        super().put(name, path)


@pytest.mark.parametrize("failing_put", [1, 2, 3])
def test_a_checkpoint_whose_copy_was_cut_short_is_never_fetched(s3: S3Server, tmp_path: Path, failing_put: int) -> None:
    first, second = (checkpoint(tmp_path / "run", step) for step in (1, 2))
    StoredCheckpoints(stored(s3), KEEP).put(first)
    failing = FailingStorage(f"s3://{BUCKET}/lab/test", s3.endpoint)
    failing.left = failing_put
    with pytest.raises(UnavailableError):
        StoredCheckpoints(failing, KEEP).put(second)
    fetched = StoredCheckpoints(stored(s3), KEEP).fetch_newest(tmp_path / "new")
    assert fetched is not None
    assert fetched.name == "global_step_1"
    StoredCheckpoints(stored(s3), KEEP).put(second)
    fetched = StoredCheckpoints(stored(s3), KEEP).fetch_newest(tmp_path / "new")
    assert fetched is not None
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_a_step_that_is_made_again_replaces_its_copy_and_a_cut_short_replacement_counts_as_none(
    s3: S3Server, tmp_path: Path
) -> None:
    StoredCheckpoints(stored(s3), KEEP).put(checkpoint(tmp_path / "lost", 1, "before Redis lost its last writes"))
    again = checkpoint(tmp_path / "run", 1)
    failing = FailingStorage(f"s3://{BUCKET}/lab/test", s3.endpoint)
    failing.left = 2
    with pytest.raises(UnavailableError):
        StoredCheckpoints(failing, KEEP).put(again)
    assert f"global_step_1/{CHECKPOINT_MARKER}" not in s3.names("lab/test/checkpoints")
    assert StoredCheckpoints(stored(s3), KEEP).fetch_newest(tmp_path / "new") is None
    StoredCheckpoints(stored(s3), KEEP).put(again)
    fetched = StoredCheckpoints(stored(s3), KEEP).fetch_newest(tmp_path / "new")
    assert fetched is not None
    assert (fetched / "config.json").read_text() == "config.json 1"


def test_a_damaged_checkpoint_is_left_out_for_the_one_before(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        StoredCheckpoints(stored(s3), KEEP).put(checkpoint(tmp_path / "run", step))
    (s3.bucket / "lab/test/checkpoints/global_step_2/config.json").write_text("damaged")
    fetched = StoredCheckpoints(stored(s3), KEEP).fetch_newest(tmp_path / "new")
    assert fetched is not None
    assert fetched.name == "global_step_1"
    assert "config.json is missing or damaged" in caplog.text


def test_a_checkpoint_that_is_made_again_in_other_files_leaves_none_of_the_first(s3: S3Server, tmp_path: Path) -> None:
    checkpoints = StoredCheckpoints(stored(s3), KEEP)
    checkpoints.put(checkpoint(tmp_path / "one", 1))
    (abandoned := tmp_path / "abandoned").write_text("of another number of ranks")
    stored(s3).put("checkpoints/global_step_1/abandoned.safetensors", abandoned)
    assert checkpoints.fetch_newest(fetched := tmp_path / "fetched") is not None
    assert not (fetched / "global_step_1/abandoned.safetensors").exists()
    again = checkpoint(tmp_path / "two", 1)
    marker = json.loads((again / CHECKPOINT_MARKER).read_text())
    (again / CHECKPOINT_MARKER).write_text(json.dumps(marker | {"made": "again"}))
    checkpoints.put(again)
    assert "global_step_1/abandoned.safetensors" not in s3.names("lab/test/checkpoints")


def test_a_checkpoint_that_was_put_aside_is_not_fetched_again(s3: S3Server, tmp_path: Path) -> None:
    for step in (1, 2):
        StoredCheckpoints(stored(s3), KEEP).put(path := checkpoint(tmp_path / "run", step))
    put_aside(path)
    shutil.rmtree(tmp_path / "run/global_step_1")
    fetched = StoredCheckpoints(stored(s3), KEEP).fetch_newest(tmp_path / "run")
    assert fetched is not None
    assert fetched.name == "global_step_1"


async def test_a_damaged_checkpoint_is_replaced_by_its_copy_in_the_storage(s3: S3Server, tmp_path: Path) -> None:
    for step in (1, 2):
        StoredCheckpoints(stored(s3), KEEP).put(path := checkpoint(tmp_path / "run/checkpoints", step))
    (path / "model.safetensors").write_text("damaged")
    uploads = new_uploads(s3, tmp_path / "run")
    assert await uploads.fetch_newest(durable_steps=2) is None
    assert await uploads.fetch_newest(durable_steps=2, damaged=[path]) == path
    check_files(path)
    assert (path.with_name("global_step_2.unusable") / "model.safetensors").read_text() == "damaged"


def test_the_newest_checkpoints_stay_and_those_of_lost_steps_do_not(s3: S3Server, tmp_path: Path) -> None:
    checkpoints = StoredCheckpoints(stored(s3), KEEP)
    for step in (9, 1, 2, 3):  # 9 is ahead of the ledger, which continued from 0
        checkpoints.put(path := checkpoint(tmp_path / "run", step))
        checkpoints.prune(path)
    assert {name.split("/")[0] for name in s3.names("lab/test/checkpoints")} == {"global_step_2", "global_step_3"}


async def test_logs_metrics_and_trajectories_are_copied_when_they_change_and_links_never(
    s3: S3Server, tmp_path: Path
) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    (run / "logs").mkdir(parents=True)
    (run / "trajectories").mkdir()
    secret.write_text("a secret of the trainer's pod")
    (run / "experiment.yaml").write_text("resolved")
    (run / "metrics.jsonl").write_text("1\n")
    (run / "logs/rollout-0.log").symlink_to(secret)
    (run / "logs/trainer.log").write_text("begins\n")
    (run / "trajectories/batch_000000.pb").write_text("batch")
    (run / "trajectories/batch_000001.tmp").write_text("half a ba")
    await new_uploads(s3, run).finish(30, 30)
    expected = {"experiment.yaml", "metrics.jsonl", "logs/trainer.log", "trajectories/batch_000000.pb"}
    records = f"lab/test/records/{run_id(run)}"
    assert s3.names(records) == expected
    stored(s3).delete([f"records/{run_id(run)}/logs/trainer.log"])  # by a user
    (s3.bucket / records / "trajectories/batch_000000.pb").write_text("BATCH")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("2\n")
    await new_uploads(s3, run).finish(30, 30)  # of another process, after a restart
    assert s3.names(records) == expected
    assert (s3.bucket / records / "metrics.jsonl").read_text() == "1\n2\n"
    kept = (s3.bucket / records / "trajectories/batch_000000.pb").read_text()
    assert kept == "BATCH", "what has not changed is not copied"


async def test_a_stop_while_the_end_of_training_waits_for_the_copy_disturbs_neither(
    s3: S3Server, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "experiment.yaml").write_text("resolved")
    uploads = new_uploads(s3, run)
    await asyncio.gather(uploads.finish(30, 30), uploads.finish(30, 30))
    assert s3.names(f"lab/test/records/{run_id(run)}") == {"experiment.yaml"}


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(OSError, match="symbolic links"):
        stored(s3).put("logs/trainer.log", tmp_path / "log")


async def test_a_storage_that_is_away_stops_nothing_and_gets_everything_when_it_is_back(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads_module, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(uploads_module, "LONGEST_PAUSE_SECONDS", 0.05)

    async def told() -> bool:
        return "storage.uri: s3://results/lab/test: " in caplog.text

    async def copied() -> bool:
        return f"checkpoints/global_step_2/{CHECKPOINT_MARKER}" in s3.names("lab/test")

    run = tmp_path / "run"
    uploads = new_uploads(s3, run)
    s3.stop()
    running = asyncio.create_task(uploads.run())
    uploads.add(checkpoint(run / "checkpoints", 1))
    await eventually(told)
    uploads.add(checkpoint(run / "checkpoints", 2))
    s3.start()
    await eventually(copied)
    running.cancel()
    assert sum("upload: storage.uri" in record.message for record in caplog.records) == 1, "reported once"


async def test_the_end_waits_for_a_storage_that_is_away_only_so_long(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = new_uploads(s3, tmp_path)
    s3.stop()
    await uploads.finish(0.1, 0.1)
    assert "the copy in s3://results/lab/test is not complete" in caplog.text


async def test_a_start_without_storage_goes_on_from_the_folder_and_never_from_nothing(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "START_SECONDS", 0.0)
    s3.stop()
    with pytest.raises(UnavailableError, match=r"storage\.uri: s3://results/lab/test"):
        await new_uploads(s3, tmp_path).fetch_newest()
    checkpoint(tmp_path / "checkpoints", 1)
    await new_uploads(s3, tmp_path).fetch_newest()


async def test_wrong_credentials_end_a_new_run_at_once_and_are_in_no_message(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    with pytest.raises(InvalidArgumentError, match="check that the bucket exists, and the credentials") as refused:
        await new_uploads(s3, tmp_path).fetch_newest()
    checkpoint(tmp_path / "checkpoints", 1)
    await new_uploads(s3, tmp_path).fetch_newest()  # only reports it: there is something to continue from
    for secret in ("a-wrong-secret", SECRET, KEY):
        assert secret not in str(refused.value) + caplog.text


def test_a_large_file_comes_back_as_it_was(s3: S3Server, tmp_path: Path) -> None:
    for size in (0, 25_000_000):  # the second is uploaded in parts
        (tmp_path / "file").write_bytes(random.Random(size).randbytes(size))
        stored(s3).put("file", tmp_path / "file")
        stored(s3).get("file", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server) -> None:
    storage = RunStorage("s3://nothing-here/lab", s3.endpoint)
    with pytest.raises(InvalidArgumentError, match=r"storage\.uri: s3://nothing-here/lab: .*NoSuchBucket"):
        storage.claim(small_experiment(), "a")


def test_results_of_another_run_are_neither_resumed_nor_overwritten_unless_asked_for(s3: S3Server) -> None:
    def experiment(ledger: str, **sections: Any) -> Experiment:
        made = small_experiment(storage=storage_section(s3), **sections)
        annotations = {"nexrl.dev/ledger": ledger}
        return made.model_copy(update={"metadata": made.metadata.model_copy(update={"annotations": annotations})})

    first, resuming = experiment("first"), experiment("second", resume={"mode": "auto"})
    stored(s3).claim(first, "a", at_start=True)
    stored(s3).claim(first, "a")
    stored(s3).claim(first, "a-with-a-new-volume", at_start=True)
    with pytest.raises(AlreadyExistsError, match=r"has the results of an earlier run.*resume\.mode auto"):
        stored(s3).claim(experiment("second"), "b", at_start=True)
    with pytest.raises(AlreadyExistsError):
        stored(s3).claim(resuming, "b")
    stored(s3).claim(resuming, "b", at_start=True)
    stored(s3).claim(experiment("second"), "b")


def test_a_namespace_is_part_of_the_folder(tmp_path: Path) -> None:
    made = small_experiment(storage={"uri": f"file://{tmp_path}/all/"})
    namespaced = made.metadata.model_copy(update={"namespace": "team"})
    for experiment in (made, made.model_copy(update={"metadata": namespaced})):
        storage = RunStorage.of(experiment)
        assert storage is not None
        storage.claim(experiment, "a")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")) == [
        "all/team/test/run.json",
        "all/test/run.json",
    ]


async def test_a_trainer_that_has_lost_its_folder_makes_the_same_steps_from_the_storage(
    s3: S3Server, build: Callable[..., Awaitable[World]]
) -> None:
    whole = await build("whole")
    never_killed = await whole.live()
    assert never_killed is not None
    world = await build("emptied", storage=storage_section(s3))
    calls, checkpoints = 0, world.folder / "checkpoints"
    while find_latest_checkpoint(checkpoints) is None:
        calls += 1
        await world.live(KillAt(calls, is_seen=True))
    newest = find_latest_checkpoint(checkpoints)
    assert newest is not None
    copying = Uploads.of(world.experiment, settings(world.folder), checkpoints, world.activity)
    assert copying is not None
    copying.add(newest)
    await copying.finish(30, 30)
    shutil.rmtree(checkpoints)
    survivor = await world.live()
    assert survivor is not None
    steps = [step for step, _ in world.made]
    assert steps[-2:] == [2, 3], "it resumed from step 2"
    expected = dict(never_killed_steps := whole.made)
    assert len(never_killed_steps) == 4
    assert all(expected[step] == batch for step, batch in world.made)
    for (name, tensor), (_, other) in zip(
        iter_weights(never_killed.learner.model), iter_weights(survivor.learner.model), strict=True
    ):
        assert torch.equal(tensor, other), name
    assert f"checkpoints/global_step_4/{CHECKPOINT_MARKER}" in s3.names(f"lab/{world.experiment.metadata.name}")


@pytest.mark.soak
async def test_trainers_killed_while_they_copy_leave_a_complete_copy_and_the_same_weights(
    s3: S3Server, tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    def experiment(suffix: str, **sections: Any) -> Experiment:
        training = {"trainer": {"steps": 8}, "checkpoint": {"everySteps": 2}, "rollout": {"maxNewTokens": 8}}
        data = {"data": {"type": "mock", "size": 4096, "shuffle": False}}
        return small_experiment(f"{experiment_name}-{suffix}", **training, **data, **sections)

    async with running_world(tmp_path / "whole", redis_url, experiment("whole")) as whole:
        assert await whole.live() == 0
    killed = experiment("killed", storage=storage_section(s3))
    checked = 0
    async with running_world(tmp_path / "killed", redis_url, killed, CREDENTIALS) as world:
        for call in (2, 3, 5, 9):
            assert await world.live(Suicide("upload", call)) == -9
            fetched = StoredCheckpoints(stored(s3, killed), KEEP).fetch_newest(tmp_path / f"fetched-{call}")
            if fetched is not None:
                checked += 1
                local = world.folder / "checkpoints" / fetched.name / "model.safetensors"
                assert not local.exists() or local.read_bytes() == (fetched / "model.safetensors").read_bytes()
        assert await world.live() == 0
        assert checked
        fetched = StoredCheckpoints(stored(s3, killed), KEEP).fetch_newest(tmp_path / "fetched")
        assert fetched is not None
        assert (fetched / "model.safetensors").read_bytes() == world.final_weights() == whole.final_weights()
        for secret in (KEY, SECRET):
            assert secret not in (world.folder / "trainer.log").read_text()
