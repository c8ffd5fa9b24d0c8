"""Names of the files and folders of a run. Services write them; `nexrl run`, `status` and `traj` read them.

<run>/experiment.yaml             the resolved experiment
<run>/code/                       the modules that the experiment carries
<run>/endpoints.json              addresses of services; removed when the launcher stops normally
<run>/logs/<process>.log          output of each process; .log.1 is what was before (nexrl.kept_log)
<run>/redis/                      data of the run's own Redis
<run>/checkpoints/global_step_<n>/
<run>/trajectories/batch_<n>.pb   the samples of batch n (nexrl.v1.BatchLease)
<run>/metrics.jsonl               metrics by step, one JSON object per line
<run>/summary.json, reward.png    written when the run ends
<run>/eval.json                   what `nexrl eval` has measured
<run>/run_id                      random, for object storage (nexrl.storage)
"""

import re
from pathlib import Path

EXPERIMENT_FILE = "experiment.yaml"
ENDPOINTS_FILE = "endpoints.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
REWARD_FILE = "reward.png"
EVAL_FILE = "eval.json"
RUN_ID_FILE = "run_id"
CODE_FOLDER = "code"
LOGS_FOLDER = "logs"
REDIS_FOLDER = "redis"
CHECKPOINTS_FOLDER = "checkpoints"
TRAJECTORIES_FOLDER = "trajectories"

CHECKPOINT_MARKER = "checkpoint.json"
"""Written last into a checkpoint's folder: metadata, and digests of the other files."""
CHECKPOINT_PREFIX = "global_step_"

_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}(\d+)")
_BATCH = re.compile(r"batch_(\d+)\.pb")


def checkpoints_path(run: Path, given: str | None) -> Path:
    """Return the folder of the run's checkpoints. `given` is `checkpoint.path` of the experiment."""
    return Path(given) if given else run / CHECKPOINTS_FOLDER


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint that contains `step` updates."""
    return checkpoints / f"{CHECKPOINT_PREFIX}{step}"


def checkpoints_by_step(checkpoints: Path) -> dict[int, Path]:
    """Return the checkpoints below `checkpoints` in ascending order of step.

    Folders that are being written, or that were put aside, have other names and are left out.
    """
    # By number: as text, global_step_10 sorts before global_step_9.
    found = {int(match[1]): path for path in checkpoints.glob("*") if (match := _CHECKPOINT.fullmatch(path.name))}
    return dict(sorted(found.items()))


def batch_path(trajectories: Path, batch_id: int) -> Path:
    """Return the file of a batch."""
    return trajectories / f"batch_{batch_id:06d}.pb"


def batches_by_number(trajectories: Path) -> dict[int, Path]:
    """Return the batches below `trajectories` in ascending order of their numbers."""
    found = {int(match[1]): path for path in trajectories.glob("*") if (match := _BATCH.fullmatch(path.name))}
    return dict(sorted(found.items()))
