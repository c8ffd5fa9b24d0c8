"""`nexrl run` on one GPU, which trainer and built-in engine share."""

import json
from pathlib import Path

import pytest

from tests.support.gpu import needs_gpu
from tests.support.runs import running

pytestmark = [*needs_gpu, pytest.mark.e2e]


async def test_trainer_and_engine_share_a_gpu_and_the_reward_rises(tmp_path: Path) -> None:
    devices = ("trainer.device=cuda", "inference.device=cuda")
    async with running(tmp_path, "trainer.steps=100", *devices) as run:
        await run.ends()
        summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.2
