"""LoRA adapters served by vLLM, merged into the base by the replica: qkv and gate-up are one matrix there."""

from pathlib import Path

import pytest

from nexrl.store import Redis
from tests.support.adapters import AdapterSystem
from tests.support.vllm import SCRATCH, vllm_experiment
from tests.support.weights import rules, running_weight_sync

pytestmark = [pytest.mark.vllm]


@pytest.mark.soak
async def test_served_logprobs_are_the_trainers_after_each_sync(
    redis: Redis, experiment_name: str, tmp_path: Path
) -> None:
    experiment = vllm_experiment({"scratch": SCRATCH, "lora": {"rank": 4, "alpha": 8}})
    async with running_weight_sync(redis, experiment_name, rules()) as world:
        system = AdapterSystem(world, tmp_path, experiment)
        try:
            system.start("a")
            system.publisher = await world.publisher()
            for _ in range(3):
                await system.train_and_publish()
                await system.require_equal_logprobs(*await system.ready("a"))
        finally:
            await system.close()
