"""The results of a run on one machine, and as an archive."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nexrl.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from nexrl.local.run_folder import RunFolder, copy_run_results
from nexrl.results import result_files, unpack, write_tar
from tests.support.results import filled_run, names_in
from tests.support.services import small_experiment


def test_results_of_a_run_are_copied_to_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path, small_experiment())
    folder.close()
    filled_run(folder.path)
    copy_run_results(folder.path, tmp_path / "new" / "taken", everything=False)
    assert names_in(tmp_path / "new" / "taken") == names_in(folder.path, newest_only=True)
    assert "checkpoints/global_step_10/model.safetensors" in names_in(tmp_path / "new" / "taken")
    assert not (tmp_path / "new" / "taken" / "redis").exists()
    assert "1.0 MiB, checkpoint of step 10 in " in capsys.readouterr().out
    copy_run_results(folder.path, tmp_path / "all", everything=True)
    assert names_in(tmp_path / "all") == names_in(folder.path)
    with pytest.raises(AlreadyExistsError, match="all exists; choose another folder"):
        copy_run_results(folder.path, tmp_path / "all", everything=True)
    with pytest.raises(NotFoundError, match="not the folder of a run"):
        copy_run_results(tmp_path, tmp_path / "no", everything=True)


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_no_result(tmp_path: Path) -> None:
    filled_run(tmp_path)
    files = result_files(tmp_path, tmp_path / "checkpoints", everything=False)
    (tmp_path / "logs/trainer.log").unlink()  # a log may vanish
    write_tar(files, io.BytesIO())
    (tmp_path / "checkpoints/global_step_10/model.safetensors").unlink()
    with pytest.raises(FailedPreconditionError, match=r"model.safetensors was deleted while it was read"):
        write_tar(files, io.BytesIO())


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    filled_run(tmp_path)
    assert "logs/link.log" not in result_files(tmp_path, tmp_path / "checkpoints", everything=True)
    (tmp_path / "logs").rename(tmp_path / "secrets")
    (tmp_path / "logs").symlink_to(tmp_path / "secrets")
    files = result_files(tmp_path, tmp_path / "checkpoints", everything=True)
    assert files
    assert not [name for name in files if name.startswith("logs")]


async def test_an_archive_that_cannot_be_unpacked_is_an_error_that_names_the_cause(tmp_path: Path) -> None:
    async def chunks(content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100_000):
            yield content[start : start + 100_000]

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo("in-the-way/x")
        info.size = 1_000_000
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    await unpack(chunks(archive.getvalue()), tmp_path)
    assert (tmp_path / "in-the-way/x").stat().st_size == 1_000_000
    with pytest.raises(FailedPreconditionError, match=r"cannot be unpacked: .*unexpected end of data"):
        await unpack(chunks(archive.getvalue()[:300_000]), tmp_path)
    await asyncio.to_thread((tmp_path / "file").write_text, "")
    with pytest.raises(FailedPreconditionError, match=r"cannot be unpacked: .*Not a directory|File exists"):
        await unpack(chunks(archive.getvalue()), tmp_path / "file")
