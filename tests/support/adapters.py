"""A tiny model whose adapter is trained, and a system of a trainer of one and replica processes that serve it."""

import asyncio
import random
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from nexrl.models import build_model
from nexrl.rpc.client import call, connect
from nexrl.spec import Experiment
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import LoraSpec, ModelSpec, PathModel, ScratchModel, ScratchModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.weights.packing import Snapshot
from nexrl.weights.publisher import WeightPublisher
from nexrl_trainer.step import Learner, LearnerSettings
from nexrl_trainer.trained_weights import AdapterSettings
from nexrl_weight_sync.records import Replica
from nexrl_weight_sync.weight_sync import View
from tests.support.patience import LIMIT_SECONDS, for_minutes
from tests.support.rank_process import RankCase
from tests.support.vllm import MAX_DIFFERENCE, replica_process
from tests.support.weights import World

if TYPE_CHECKING:
    from nexrl.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub


DataType = Literal["float32", "bfloat16"]
TINY = ScratchModelSpec(
    alphabet="0123456789=", hidden_size=16, intermediate_size=32, layers=2, heads=2, max_positions=32
)


def adapter_model(path: Path | None = None, *, dtype: DataType = "float32", seed: int = 0, **lora: Any) -> ModelSpec:
    """Return the section `model` with `lora`: of the tiny model, or of the Hugging Face folder `path`."""
    spec = LoraSpec(**{"rank": 2, "alpha": 4.0, **lora})
    if path is not None:
        return PathModel(path=str(path), dtype=dtype, lora=spec)
    return ScratchModel(scratch=TINY, dtype=dtype, seed=seed, lora=spec)


def save_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny model, with these changes of its shape, as a Hugging Face folder. Returns the folder."""
    source = ScratchModel(scratch=TINY.model_copy(update=changes))
    build_model(source, seed).save_pretrained(folder)
    build_tokenizer(source).save_pretrained(folder)
    return folder


class AdapterSystem:
    """Trains an adapter in this process, and publishes it to replicas, which are processes."""

    def __init__(self, world: World, folder: Path, experiment: Experiment) -> None:
        """`experiment` has `model.lora`; its tokens are at least those of the tiny model."""
        self.world, self.experiment = world, experiment
        model = experiment.spec.model
        algorithm = AlgorithmSpec.model_validate({"learning_rate": 0.05, "warmup_steps": 1})
        settings = LearnerSettings(algorithm, 100, adapter=AdapterSettings(model, 0))
        self.learner = Learner(build_model(model, model.seed), settings)
        self.published: list[Snapshot] = []
        self.publisher: WeightPublisher
        self._batches = iter(RankCase([8] * 100, {}).batches())
        self._folder = folder
        self._processes: dict[str, ExitStack] = {}
        self.pids: dict[str, int] = {}
        self._chance = random.Random(0)
        self._closing = AsyncExitStack()

    def start(self, name: str, experiment: Experiment | None = None) -> None:
        """Start a replica, of this experiment or another one."""
        stack = self._processes[name] = ExitStack()
        running = replica_process(experiment or self.experiment, self._folder / name, name, self.world.address)
        self.pids[name] = stack.enter_context(running).pid

    async def ready(self, *names: str) -> tuple[Replica, ...]:
        """Return the replicas once exactly those of these names are ready, with the published version."""

        def are_there(view: View) -> bool:
            ready = {replica.replica_id for replica, is_ready in view.replicas if is_ready}
            return ready == set(names) and view.committed_version == self.learner.step

        view = await self.world.until(are_there, for_minutes)
        return tuple(replica for replica, is_ready in view.replicas if is_ready)

    async def train_and_publish(self) -> None:
        """Train a step, and bring the adapter to the replicas."""
        await asyncio.to_thread(self.learner.train, next(self._batches))
        await self.publish()

    async def publish(self) -> None:
        """Bring the adapter to the replicas."""

        async def take(bucket_bytes: int, replaced: Snapshot | None, device: torch.device) -> Snapshot:
            self.published.append(await asyncio.to_thread(self.learner.snapshot, bucket_bytes))
            return self.published[-1]

        await self.publisher.publish(take)

    async def require_equal_logprobs(self, *replicas: Replica) -> None:
        """Assert that each replica's log-probabilities are those of the trainer's model, and not those of its base."""
        for replica in replicas:
            prompt = [self._chance.randrange(4, 15) for _ in range(6)]
            request = pb.GenerateRequest(
                request_id="r", prompt_token_ids=prompt, n=3, max_new_tokens=12, temperature=1.0
            )
            channel = await self._closing.enter_async_context(connect(replica.address))
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            answer = await call(stub.Generate, request, timeout_seconds=LIMIT_SECONDS)
            for completion in answer.completions:
                assert set(completion.policy_versions) == {self.learner.step}
                self._require_equal(prompt, list(completion.token_ids), list(completion.logprobs))

    def _require_equal(self, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
        found = torch.tensor(logprobs)
        difference = (found - self._logprobs(prompt, tokens)).abs().max().item()
        assert difference < MAX_DIFFERENCE, f"log-probabilities differ by {difference}"
        assert self.learner.adapter is not None
        if self.learner.step:
            with self.learner.adapter.off():
                assert (found - self._logprobs(prompt, tokens)).abs().max().item() > 20 * MAX_DIFFERENCE

    @torch.no_grad()
    def _logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        logits = self.learner.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        found: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return found

    async def close(self) -> None:
        """End all replicas."""
        for stack in self._processes.values():
            stack.close()
        await self._closing.aclose()
