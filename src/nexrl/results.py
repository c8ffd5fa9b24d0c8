"""The results of a run: what is worth keeping of its folder when the run is gone.

`python -m nexrl.results RUN_FOLDER [--all]` writes them to standard output as a tar archive. `nexrl get results` runs
it in a pod with the volume of an experiment.
"""

import asyncio
import os
import re
import shutil
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nexrl.checkpoint_files import check_files
from nexrl.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from nexrl.run_layout import (
    CHECKPOINT_MARKER,
    CHECKPOINT_PREFIX,
    CHECKPOINTS_FOLDER,
    CODE_FOLDER,
    EVAL_FILE,
    EXPERIMENT_FILE,
    LOGS_FOLDER,
    METRICS_FILE,
    REWARD_FILE,
    SUMMARY_FILE,
    TRAJECTORIES_FOLDER,
    checkpoints_by_step,
)
from nexrl.storage import RECORDS_FOLDER, RunStorage

_STORED_MARKER = re.compile(rf"{CHECKPOINTS_FOLDER}/{CHECKPOINT_PREFIX}(\d+)/{re.escape(CHECKPOINT_MARKER)}")
_KEPT = (EXPERIMENT_FILE, CODE_FOLDER, METRICS_FILE, SUMMARY_FILE, REWARD_FILE, EVAL_FILE, LOGS_FOLDER)


def result_files(run: Path, checkpoints: Path, *, everything: bool) -> dict[str, Path]:
    """Return the files of the results by their names there, which are relative paths.

    These are the experiment, its code, metrics, report, logs and the newest checkpoint; with `everything`, all
    checkpoints and the trajectories as well.
    """
    steps = [path for path in checkpoints_by_step(checkpoints).values() if (path / CHECKPOINT_MARKER).is_file()]
    parts = {f"{CHECKPOINTS_FOLDER}/{path.name}": path for path in (steps if everything else steps[-1:])}
    return records(run, everything=everything) | _files(parts)


def records(run: Path, *, everything: bool) -> dict[str, Path]:
    """Return the files of the results without the checkpoints."""
    names = (*_KEPT, *([TRAJECTORIES_FOLDER] if everything else []))
    return _files({name: run / name for name in names})


def _files(parts: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files in folders, and files, by name. Links are left out: user code may have made them."""
    files: dict[str, Path] = {}
    for name, part in parts.items():
        if part.is_symlink():
            continue
        for path in sorted(part.rglob("*")) if part.is_dir() else [part]:
            if path.is_file() and not path.is_symlink():
                files[str(Path(name) / path.relative_to(part))] = path
    return files


def copy_results(files: dict[str, Path], folder: Path) -> None:
    """Copy the files of the results to `folder`. Raises FailedPreconditionError if a checkpoint vanishes meanwhile."""
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with _unless_gone(name):
            shutil.copy2(path, folder / name)


def copy_stored_results(uri: str, folder: Path, *, everything: bool) -> None:
    """Copy the results of a run from object storage to `folder`. `uri` ends with the name of the experiment.

    Raises NotFoundError if there is no run, AlreadyExistsError if `folder` exists, FailedPreconditionError if a
    checkpoint is damaged or replaced meanwhile, and what RunStorage raises.
    """
    storage = RunStorage(uri.rstrip("/"))
    if (owner := storage.owner()) is None:
        raise NotFoundError(f"{uri}: not the folder of a run; name it as <storage.uri>/[<namespace>/]<experiment>")
    with new_folder(folder) as partial:
        for kept, name in _chosen(storage.names(), owner.run, everything=everything).items():
            (partial / kept).parent.mkdir(parents=True, exist_ok=True)
            storage.get(name, partial / kept)
        for checkpoint in checkpoints_by_step(partial / CHECKPOINTS_FOLDER).values():
            check_files(checkpoint)
    sys.stdout.write(f"{uri}: {described(folder)} in {folder}\n")


def stored_steps(names: Sequence[str]) -> dict[int, str]:
    """Return the markers among the names of files in object storage, by step: the complete checkpoints."""
    return {int(match[1]): match[0] for name in names if (match := _STORED_MARKER.fullmatch(name))}


def _chosen(names: Sequence[str], run: str, *, everything: bool) -> dict[str, str]:
    """Return the files to copy from the storage, by their names in the results. Incomplete checkpoints are left out.

    With `everything`, these contain the records of earlier runs as well, named as in the storage.
    """
    steps = stored_steps(names)
    newest = {marker.rpartition("/")[0] for step, marker in steps.items() if everything or step == max(steps)}
    checkpoints = [name for name in names if name.rpartition("/")[0] in newest]
    own = f"{RECORDS_FOLDER}/{run}/"
    kept = {name.removeprefix(own): name for name in names if name.startswith(f"{RECORDS_FOLDER}/")}
    left_out = () if everything else (RECORDS_FOLDER, TRAJECTORIES_FOLDER)
    wanted = {short: name for short, name in kept.items() if short.split("/")[0] not in left_out}
    return wanted | {name: name for name in checkpoints}


def write_tar(files: dict[str, Path], out: BinaryIO) -> None:
    """Write the files of the results as a tar archive. Raises FailedPreconditionError as `copy_results`."""
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for name, path in files.items():
            with _unless_gone(name), path.open("rb") as file:
                # Of the open file: a log may be rotated, which gives its name to a shorter file.
                archive.addfile(archive.gettarinfo(arcname=name, fileobj=file), file)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` if the block succeeds, and is deleted otherwise.

    Raises AlreadyExistsError if `folder` exists.
    """
    if folder.exists():
        raise AlreadyExistsError(f"{folder} exists; choose another folder for the results, or delete it")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


async def unpack(archive: AsyncIterator[bytes], folder: Path) -> None:
    """Unpack a tar archive to `folder` as it arrives. Raises what `archive` raises, and FailedPreconditionError."""
    source, sink = os.pipe()
    unpacking = asyncio.create_task(asyncio.to_thread(_extract, source, folder))
    try:
        async for content in archive:
            await asyncio.to_thread(_write_all, sink, content)
    except BrokenPipeError:
        pass  # unpacking has failed
    finally:
        os.close(sink)  # which ends the thread
        (problem,) = await asyncio.gather(unpacking, return_exceptions=True)
    if problem:
        raise FailedPreconditionError(f"{folder}: the results cannot be unpacked: {problem}")


def _extract(source: int, folder: Path) -> None:
    with os.fdopen(source, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # absent before Python 3.11.4
        archive.extractall(folder)
        while file.read(tarfile.RECORDSIZE):  # the padding at the end
            pass


def _write_all(sink: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(sink, view) :]


def described(folder: Path) -> str:
    """Return what `folder` contains, in one line."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    steps = checkpoints_by_step(folder / CHECKPOINTS_FOLDER)
    return f"{size / 2**20:.1f} MiB, {'checkpoint of step ' + str(max(steps)) if steps else 'no checkpoint'}"


@contextmanager
def _unless_gone(name: str) -> Iterator[None]:
    """Ignore a file that was deleted while the run goes on, unless that makes a checkpoint incomplete."""
    try:
        yield
    except FileNotFoundError:
        if name.startswith(CHECKPOINTS_FOLDER):
            raise FailedPreconditionError(f"{name} was deleted while it was read: the run goes on; try again") from None


def main(run: Path, *, everything: bool) -> None:
    """Write the results of the run to standard output."""
    try:
        write_tar(result_files(run, run / CHECKPOINTS_FOLDER, everything=everything), sys.stdout.buffer)
    except FailedPreconditionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), everything="--all" in sys.argv)
