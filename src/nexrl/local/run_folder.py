"""The folder of one run: runs/<name>/ with the resolved experiment, logs, checkpoints, trajectories and results."""

import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexrl.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from nexrl.spec import Experiment, dump_resolved, load_resolved

EXPERIMENT_FILE = "experiment.yaml"
ENDPOINTS_FILE = "endpoints.json"


def is_on(run: Path) -> bool:
    """True while a launcher works in the folder `run`."""
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
    """The resolved experiment of the run in folder `run`. Raises NotFoundError for a folder that is none."""
    path = run / EXPERIMENT_FILE
    if not path.is_file():
        raise NotFoundError(f"{run}: not the folder of a run; it has no {EXPERIMENT_FILE}")
    return load_resolved(path)


def is_put_aside(run: Path) -> bool:
    """True when a later run of its name has taken its place."""
    return run.resolve().name != experiment_of(run).metadata.name


def endpoint(run: Path, service: str) -> str:
    """Address of a service of the run in folder `run`, as its launcher wrote it down. Raises NotFoundError before."""
    try:
        return str(json.loads((run / ENDPOINTS_FILE).read_text())[service])
    except FileNotFoundError:
        raise NotFoundError(f"{run}: no {ENDPOINTS_FILE} there; this is no run, or one that is just starting") from None


class RunFolder:
    """Holds a lock for as long as it lives, so that two launchers never share a folder."""

    def __init__(self, root: Path, experiment: Experiment) -> None:
        """Use the folder of an earlier run when the experiment resumes, else put that one aside.

        Raises AlreadyExistsError while another launcher runs this experiment here.
        """
        self.path = (root / experiment.metadata.name).resolve()
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_path(self.path).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise AlreadyExistsError(
                f"metadata.name: {experiment.metadata.name!r} is running in {self.path}; stop it or take another name"
            ) from None
        self.put_aside: Path | None = None
        """Where an earlier run of this name is kept now."""
        if self.path.exists() and experiment.spec.resume.mode == "auto":
            self._refuse_other_batches(experiment)
        elif self.path.exists():
            self.put_aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            self.path.rename(self.put_aside)
        for part in ("logs", "redis", "checkpoints", "trajectories"):
            (self.path / part).mkdir(parents=True, exist_ok=True)
        self.experiment_file.write_text(dump_resolved(experiment))

    def _refuse_other_batches(self, experiment: Experiment) -> None:
        """The ledger that is resumed counts in batches and groups of the size that it began with."""
        if not self.experiment_file.is_file():
            return
        before, now = load_resolved(self.experiment_file).spec.trajectory_pool, experiment.spec.trajectory_pool
        for key, old, new in (
            ("batchSize", before.batch_size, now.batch_size),
            ("groupSize", before.group_size, now.group_size),
        ):
            if old != new:
                self.close()
                raise InvalidArgumentError(
                    f"spec.trajectoryPool.{key}: {new}; the run to be resumed has {old}; keep it, or take another name"
                )

    def close(self) -> None:
        """Let another launcher use the folder."""
        self._lock.close()

    @property
    def experiment_file(self) -> Path:
        """The resolved experiment."""
        return self.path / EXPERIMENT_FILE

    @property
    def logs(self) -> Path:
        """One log for each process."""
        return self.path / "logs"

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` to a file of the run."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")

    def metrics(self) -> list[dict[str, float]]:
        """Lines of metrics.jsonl merged by step, in order; a step that was replayed counts as it went last.

        `time` is that of the training step: what was measured of the same version later does not move it.
        """
        path = self.path / "metrics.jsonl"
        by_step: dict[float, dict[str, float]] = {}
        for text in path.read_text().splitlines() if path.exists() else []:
            values = json.loads(text)
            line = by_step.setdefault(values["step"], values)
            is_training = "reward_mean" in values or "reward_mean" not in line
            line.update(values, time=values["time"] if is_training else line["time"])
        return [by_step[step] for step in sorted(by_step)]


def _lock_path(run: Path) -> Path:
    """Beside the folder, not in it: a new run puts the folder of an earlier one aside."""
    return run.with_name(f".{run.name}.lock")
