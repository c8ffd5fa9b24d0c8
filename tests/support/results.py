"""A folder of a run with everything in it, and what its results are."""

from pathlib import Path


def filled_run(run: Path) -> None:
    """Fill the folder of a run: checkpoints of steps 9 and 10, one that is being written, logs, trajectories."""
    files = {
        "checkpoints/global_step_9/checkpoint.json": b"{}",
        "checkpoints/global_step_9/model.safetensors": b"older",
        "checkpoints/global_step_10/checkpoint.json": b"{}",
        "checkpoints/global_step_10/model.safetensors": bytes(range(256)) * 4096,
        "checkpoints/global_step_11.tmp/model.safetensors": b"half",
        "trajectories/batch_000009.pb": b"samples",
        "metrics.jsonl": b'{"step": 1}\n',
        "logs/trainer.log": b"trained\n",
        "logs/trainer.log.1": b"older\n",
        "redis/appendonly.aof": b"private",
    }
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    (run / "logs/link.log").symlink_to("/etc/passwd")


def names_in(folder: Path, *, newest_only: bool = False) -> set[str]:
    """Return the names of the files below `folder` that belong to its results."""
    older = ("checkpoints/global_step_9", "trajectories/") if newest_only else ()
    left_out = ("redis/", "logs/link", "checkpoints/global_step_11", *older)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith(left_out)}
