"""Weight sync of LoRA adapters to real replicas of the built-in engine: what they serve is what the trainer has."""

import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nexrl.errors import InvalidArgumentError
from nexrl.models import build_model
from nexrl.rpc.server import ServiceProcess
from nexrl.spec import Experiment
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.store import Redis
from nexrl.tokenizers import build_tokenizer
from nexrl.weights.packing import layout_of
from nexrl_inference import server
from nexrl_trainer.checkpoint import CheckpointMetadata
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.trained_weights import AdapterSettings, WholeModel
from tests.support.adapters import AdapterSystem, adapter_model
from tests.support.checkpoints import save_checkpoint
from tests.support.patience import finished
from tests.support.services import settings, small_experiment
from tests.support.weights import rules, running_weight_sync


def experiment(**model: object) -> Experiment:
    document = adapter_model(rank=4, alpha=8.0).model_dump(mode="json", by_alias=True)
    return small_experiment(model={**document, **model})


@pytest_asyncio.fixture
async def system(redis: Redis, experiment_name: str, tmp_path: Path) -> AsyncIterator[AdapterSystem]:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(running_weight_sync(redis, experiment_name, rules()))
        system = AdapterSystem(world, tmp_path, experiment())
        stack.push_async_callback(system.close)
        system.publisher = await world.publisher()
        yield system


@pytest.mark.guide("L9", "L10")
@pytest.mark.gate
async def test_served_logprobs_are_the_trainers_after_each_sync_a_kill_and_a_late_start(system: AdapterSystem) -> None:
    system.start("a")
    system.start("b")
    await system.publish()
    await system.require_equal_logprobs(*await system.ready("a", "b"))
    for _ in range(5):
        await system.train_and_publish()
        await system.require_equal_logprobs(*await system.ready("a", "b"))
    os.kill(system.pids["b"], signal.SIGKILL)
    await system.train_and_publish()
    await system.require_equal_logprobs(*await system.ready("a"))
    system.start("late")
    await system.require_equal_logprobs(*await system.ready("a", "late"))
    await system.train_and_publish()
    await system.require_equal_logprobs(*await system.ready("a", "late"))


async def test_only_the_adapter_is_sent(system: AdapterSystem) -> None:
    system.start("a")
    await system.train_and_publish()
    await system.ready("a")
    manifest = system.published[0].manifest
    assert {tensor.name.rpartition(".lora_")[2] for tensor in manifest.tensors} == {"A.weight", "B.weight"}
    model = WholeModel(system.learner.model).published()
    assert manifest.nbytes < layout_of(model, policy_version=0, bucket_bytes=1).nbytes / 2


@pytest.mark.gate
async def test_a_replica_of_another_base_never_serves(
    system: AdapterSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    system.start("a")
    system.start("other", experiment(seed=1))
    await system.world.until(lambda view: len(view.replicas) == 2)
    for _ in range(2):
        await finished(system.train_and_publish(), "a step whose adapter one replica refuses is published")
        await system.require_equal_logprobs(*await system.ready("a"))
    assert "the adapter belongs to a base with digest" in caplog.text


@pytest.mark.parametrize(("seed", "lora"), [(1, {}), (0, {"alpha": 8.0}), (0, {"target_modules": ("q_proj",)})])
async def test_an_adapter_of_a_checkpoint_is_not_served_on_another_base(
    tmp_path: Path, seed: int, lora: dict[str, Any]
) -> None:
    source = adapter_model()
    learner_settings = LearnerSettings(AlgorithmSpec(), 1, adapter=AdapterSettings(source, 0))
    learner = Learner(build_model(source, 0), learner_settings)
    path = save_checkpoint(tmp_path / "checkpoints", learner, build_tokenizer(source), CheckpointMetadata(step=0))
    served = small_experiment(model=adapter_model(seed=seed, **lora).model_dump(mode="json", by_alias=True))
    process = ServiceProcess("test", settings(tmp_path, weights=str(path)), served)
    with pytest.raises(InvalidArgumentError):
        await finished(process.run(server.start), "the process ends")
