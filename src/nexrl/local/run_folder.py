"""The folder of one run: runs/<name>/ with the resolved experiment, logs, checkpoints, trajectories and results."""

import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexrl.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from nexrl.spec import Experiment, dump_resolved, load_resolved, write_code

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


def checkpoints_of(run: Path, experiment: Experiment) -> Mapping[int, Path]:
    """The complete checkpoints of the run in folder `run`, by step."""
    given = experiment.spec.checkpoint.path
    found = (Path(given) if given else run / "checkpoints").glob("global_step_*")
    steps = {path.name.removeprefix("global_step_"): path for path in found}
    return {int(step): path for step, path in steps.items() if step.isdecimal()}


def endpoint(run: Path, service: str) -> str:
    """Address of a service of the run in folder `run`, as its launcher wrote it down. Raises NotFoundError before."""
    try:
        return str(json.loads((run / ENDPOINTS_FILE).read_text())[service])
    except FileNotFoundError:
        raise NotFoundError(f"{run}: no {ENDPOINTS_FILE} there; no run is on, or it is just starting") from None


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
            self._refuse_another_run(experiment)
        elif self.path.exists():
            self.put_aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            self.path.rename(self.put_aside)
        for part in ("logs", "redis", "checkpoints", "trajectories"):
            (self.path / part).mkdir(parents=True, exist_ok=True)
        (self.path / ENDPOINTS_FILE).unlink(missing_ok=True)  # of a launcher that was killed
        self.experiment_file.write_text(dump_resolved(write_code(experiment, self.path / "code")))

    def _refuse_another_run(self, experiment: Experiment) -> None:
        """What makes a run that one run cannot change when it is resumed."""
        if not self.experiment_file.is_file():
            return
        before, now = _identity(load_resolved(self.experiment_file)), _identity(experiment)
        for field in now | before:
            old, new = before.get(field, "nothing"), now.get(field, "nothing")
            if old != new:
                self.close()
                raise InvalidArgumentError(
                    f"spec.{field}: {new}; the run to be resumed has {old}; leave it so, or take another metadata.name"
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


def _identity(experiment: Experiment) -> dict[str, Any]:
    """What a run keeps for its life, by field: its ledger counts in batches and groups of one size, and its
    checkpoints are of one model."""
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
    """Beside the folder, not in it: a new run puts the folder of an earlier one aside."""
    return run.with_name(f".{run.name}.lock")
