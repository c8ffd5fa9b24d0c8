"""Processes that write published versions to a folder."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from nexrl.weights import published
from nexrl.weights.packing import Snapshot, snapshot
from nexrl.weights.published import PublishedVersions

MODEL_TAG = "default"
TENSORS = [
    ("half", torch.arange(3, dtype=torch.bfloat16)),
    ("a", torch.arange(1000.0)),
    ("empty", torch.empty(0, 2)),
    ("scalar", torch.tensor(True)),
    ("steps", torch.tensor([7], dtype=torch.int64)),
]

# Only one process imports torch. The writers are forks of it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.publishing"])


def packed(policy_version: int, shift: int = 0) -> Snapshot:
    """Return a version. Different values of `shift` make different weights with the same version number."""
    tensors = [(name, tensor + shift if name == "a" else tensor) for name, tensor in TENSORS]
    return snapshot(tensors, policy_version=policy_version, bucket_bytes=64)


def writer_of_many(path: Path, shift: int) -> BaseProcess:
    """Start a process that writes one version after the other."""
    return _started(_write_many, path, shift)


def writer_that_dies(path: Path, policy_version: int, at: int) -> BaseProcess:
    """Start a process that writes a version, and kills itself before call number `at` that changes the folder."""
    return _started(_write_and_die, path, policy_version, at)


def _started(target: Callable[..., None], *arguments: object) -> BaseProcess:
    process = _processes.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _write_many(path: Path, shift: int) -> None:
    shared = PublishedVersions(path, MODEL_TAG)
    for version in range(20):
        shared.write(packed(version, shift))


def _write_and_die(path: Path, policy_version: int, at: int) -> None:
    calls = 0

    def counted(method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **keywords: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments, **keywords)

        return call

    for owner, name in (
        (Path, "mkdir"),
        (Path, "open"),
        (Path, "write_bytes"),
        (Path, "rename"),
        (published, "fsync_path"),
    ):
        setattr(owner, name, counted(getattr(owner, name)))
    PublishedVersions(path, MODEL_TAG).write(packed(policy_version))
