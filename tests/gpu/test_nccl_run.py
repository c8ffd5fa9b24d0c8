"""A run whose trainer and replica share one GPU, with the real NCCL between them."""

from pathlib import Path

import pytest
import torch

from nexrl.weights import nccl_communicator
from tests.support.gpu import SHARED_GPU_NCCL
from tests.support.runs import metrics_of, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
]

STEPS = 5
ON_THE_GPU = ("trainer.device=cuda", "inference.device=cuda")


async def run(root: Path, *overrides: str) -> str:
    """Run the experiment, and return the log of weight sync."""
    async with running(root, f"trainer.steps={STEPS}", *ON_THE_GPU, *overrides) as started:
        await started.ends()
    assert len(metrics_of(started.folder)) >= STEPS
    return (started.folder / "logs" / "weight-sync.log").read_text()


async def test_every_version_of_a_run_travels_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if nccl_communicator.version() < SHARED_GPU_NCCL:
        pytest.skip(f"needs NCCL 2.30 or later for two processes on a GPU, not {nccl_communicator.version()}")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    log = await run(tmp_path, "weightSync.transport=nccl")
    assert "weights travel by nccl: weightSync.transport is nccl, although replica inference-0 shares GPU-" in log
    assert "weights travel by gloo" not in log
    assert "ended without a commit" not in log


async def test_auto_takes_the_host_path_on_a_shared_gpu_and_says_why(tmp_path: Path) -> None:
    log = await run(tmp_path, "inference.replicas=2")
    assert "weights travel by gloo: replica inference-0 shares GPU-" in log
    assert "with the trainer, which NCCL refuses without NCCL_MULTI_RANK_GPU_ENABLE=1" in log
