"""The folder of one run, `runs/<name>`: who may write to it, and what it contains (nexrl.run_layout)."""

import fcntl
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexrl.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from nexrl.results import copy_results, described, new_folder, result_files
from nexrl.run_layout import (
    CHECKPOINTS_FOLDER,
    CODE_FOLDER,
    ENDPOINTS_FILE,
    EXPERIMENT_FILE,
    LOGS_FOLDER,
    METRICS_FILE,
    REDIS_FOLDER,
    TRAJECTORIES_FOLDER,
    checkpoints_by_step,
    checkpoints_path,
)
from nexrl.spec import Experiment, dump_resolved, load_resolved, write_code


def is_running(run: Path) -> bool:
    """Return whether a launcher is running the run in folder `run`."""
    try:
        lock = _lock_path(run.resolve()).open()
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def experiment_of(run: Path) -> Experiment:
    """Return the resolved experiment of the run in folder `run`. Raises NotFoundError if the folder has no run."""
    path = run / EXPERIMENT_FILE
    if not path.is_file():
        raise NotFoundError(f"{run}: not the folder of a run: it has no {EXPERIMENT_FILE}")
    return load_resolved(path)


def is_put_aside(run: Path) -> bool:
    """Return whether the run was renamed because a later run took its name."""
    return run.resolve().name != experiment_of(run).metadata.name


def checkpoints_of(run: Path, experiment: Experiment) -> Mapping[int, Path]:
    """Return the complete checkpoints of the run in folder `run`, by step."""
    return checkpoints_by_step(checkpoints_path(run, experiment.spec.checkpoint.path))


def copy_run_results(run: Path, folder: Path, *, everything: bool) -> None:
    """Copy the results of the run in folder `run` to `folder`.

    Raises NotFoundError if `run` has no run, and AlreadyExistsError if `folder` exists.
    """
    checkpoints = checkpoints_path(run, experiment_of(run).spec.checkpoint.path)
    with new_folder(folder) as partial:
        copy_results(result_files(run, checkpoints, everything=everything), partial)
    sys.stdout.write(f"{run}: {described(folder)} in {folder}\n")


def endpoint(run: Path, service: str) -> str:
    """Return the address of a service of a running run. Raises NotFoundError if its launcher has not written it."""
    try:
        return str(json.loads((run / ENDPOINTS_FILE).read_text())[service])
    except FileNotFoundError:
        raise NotFoundError(f"{run}: it has no {ENDPOINTS_FILE}: the run is not running, or is starting") from None


class RunFolder:
    """The folder of a run, locked until `close`, so that two launchers never share a folder."""

    def __init__(self, root: Path, experiment: Experiment) -> None:
        """Create and lock the folder. An earlier run of this name is renamed, unless the experiment resumes it.

        Raises AlreadyExistsError if another launcher is running this experiment here, and InvalidArgumentError if the
        experiment cannot resume the earlier run.
        """
        self.path = (root / experiment.metadata.name).resolve()
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_path(self.path).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise AlreadyExistsError(
                f"metadata.name: {experiment.metadata.name!r} is running in {self.path}; stop it or choose another name"
            ) from None
        self.put_aside: Path | None = None
        """New folder of an earlier run of this name, if there was one."""
        if self.path.exists() and experiment.spec.resume.mode == "auto":
            self._refuse_another_run(experiment)
        elif self.path.exists():
            self.put_aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            self.path.rename(self.put_aside)
        for part in (LOGS_FOLDER, REDIS_FOLDER, CHECKPOINTS_FOLDER, TRAJECTORIES_FOLDER):
            (self.path / part).mkdir(parents=True, exist_ok=True)
        (self.path / ENDPOINTS_FILE).unlink(missing_ok=True)  # left behind by a launcher that was killed
        self.experiment_file.write_text(dump_resolved(write_code(experiment, self.path / CODE_FOLDER)))

    def _refuse_another_run(self, experiment: Experiment) -> None:
        """Raise InvalidArgumentError for a change that a run cannot make when it resumes."""
        if not self.experiment_file.is_file():
            return
        before, now = _fixed_fields(load_resolved(self.experiment_file)), _fixed_fields(experiment)
        for field in now | before:
            old, new = before.get(field, "nothing"), now.get(field, "nothing")
            if old != new:
                self.close()
                raise InvalidArgumentError(
                    f"spec.{field}: {new}; the run to be resumed has {old}; keep that value, or choose another "
                    "metadata.name"
                )

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    @property
    def experiment_file(self) -> Path:
        """File with the resolved experiment."""
        return self.path / EXPERIMENT_FILE

    @property
    def logs(self) -> Path:
        """Folder with one log per process."""
        return self.path / LOGS_FOLDER

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` as JSON to a file of the run, which others may read at any time."""
        partial = self.path / f"{name}.tmp"
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(self.path / name)

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each step, in order. If a step was replayed, its newest values count.

        `time` is that of the training step. A later validation of the same policy version does not change it.
        """
        path = self.path / METRICS_FILE
        by_step: dict[float, dict[str, float]] = {}
        for text in path.read_text().splitlines() if path.exists() else []:
            values = json.loads(text)
            line = by_step.setdefault(values["step"], values)
            is_training = "reward_mean" in values or "reward_mean" not in line
            line.update(values, time=values["time"] if is_training else line["time"])
        return [by_step[step] for step in sorted(by_step)]


def _fixed_fields(experiment: Experiment) -> dict[str, Any]:
    """Return the fields that a run cannot change: sizes that its ledger depends on, and the model."""
    pool, model = experiment.spec.trajectory_pool, experiment.spec.model
    given = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    scratch = given.pop("scratch", {})
    return {
        "trajectoryPool.batchSize": pool.batch_size,
        "trajectoryPool.groupSize": pool.group_size,
        **{f"model.{key}": value for key, value in given.items()},
        **{f"model.scratch.{key}": value for key, value in scratch.items()},
    }


def _lock_path(run: Path) -> Path:
    """Return the lock file. It is beside the folder because a new run renames the folder of an earlier one."""
    return run.with_name(f".{run.name}.lock")
