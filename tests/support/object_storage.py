"""Runs a real S3 server for tests: rclone, which serves a folder. Each folder in it is a bucket."""

import hashlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nexrl.activity import ActivityTracker
from nexrl.local.components import free_ports
from nexrl.run_layout import CHECKPOINT_MARKER
from nexrl.spec import Experiment
from nexrl.storage import RunStorage
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl_trainer.uploads import Uploads
from tests.support.patience import LIMIT_SECONDS, eventually_blocking
from tests.support.services import settings, small_experiment

BUCKET = "results"
KEY, SECRET = "the-key-of-the-test", "the-secret-of-the-test"
CREDENTIALS: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}


class S3Server:
    """A server that can be stopped and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.bucket = folder / BUCKET
        """The folder with the content of the bucket."""
        self.bucket.mkdir(parents=True)
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        rclone = Path(sys.executable).with_name("rclone")
        keys, address = f"{KEY},{SECRET}", self.endpoint.removeprefix("http://")
        command = [str(rclone), "serve", "s3", "--auth-key", keys, "--addr", address, str(self.bucket.parent)]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually_blocking(self._answers, f"rclone answers at {self.endpoint}")

    def stop(self) -> None:
        """Stop the server; its files stay."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def names(self, prefix: str = "") -> set[str]:
        """Return the names of all files below `prefix`, without `prefix`."""
        root = self.bucket / prefix
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, "rclone ended"
        try:
            urllib.request.urlopen(self.endpoint, timeout=LIMIT_SECONDS)
        except urllib.error.HTTPError:
            return True  # it refuses a request without a signature
        except OSError:
            return False
        return True


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    """Run a server until the block ends."""
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def storage_section(s3: S3Server) -> dict[str, Any]:
    """Return `spec.storage` for the server."""
    return {"uri": f"s3://{BUCKET}/lab", "endpoint": s3.endpoint}


def stored(s3: S3Server, experiment: Experiment | None = None) -> RunStorage:
    """Return the storage of an experiment, by default of `small_experiment`."""
    found = RunStorage.of(experiment or small_experiment(storage=storage_section(s3)))
    assert found is not None
    return found


def checkpoint(folder: Path, step: int, content: str = "") -> Path:
    """Write a checkpoint of three small files."""
    path = folder / f"global_step_{step}"
    path.mkdir(parents=True)
    digests = {}
    for name in ("config.json", "model.safetensors", "training_state-00001-of-00002.safetensors"):
        (path / name).write_text(content or f"{name} {step}")
        digests[name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    marker = {"format": 1, "metadata": {"step": step, "batch_ids": []}, "sha256": digests}
    (path / CHECKPOINT_MARKER).write_text(json.dumps(marker))
    return path


def new_uploads(s3: S3Server, folder: Path, experiment: Experiment | None = None) -> Uploads:
    """Return the uploads of a trainer with the run's folder `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Uploads.of(
        experiment or small_experiment(storage=storage_section(s3)),
        settings(folder),
        folder / "checkpoints",
        ActivityTracker(activity_pb.Module(name="trainer"), None),
    )
    assert found is not None
    return found
