"""Replicas that run vLLM, as processes of their own, with weight sync and a trainer's publisher: tied embeddings."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import psutil
import pytest
import pytest_asyncio

from nexrl.errors import NexrlError
from nexrl.rpc.client import call, connect
from nexrl.store import connect_redis
from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.weights.publisher import WeightPublisher
from nexrl_weight_sync.records import Replica
from tests.support.patience import LIMIT_SECONDS, for_minutes
from tests.support.vllm import (
    Reference,
    random_prompt,
    replica_process,
    vllm_experiment,
    weights_of,
)
from tests.support.weights import World, rules, running_weight_sync, taken

if TYPE_CHECKING:
    from nexrl.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

NAMES = ("inference-0", "inference-1")
CONTROL_ROUTES = (
    "/collective_rpc",
    "/pause",
    "/resume",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/init_weight_transfer_engine",
    "/reset_prefix_cache",
    "/sleep",
    "/abort_requests",
    "/server_info",
    "/v1/load_lora_adapter",
    "/inference/v1/generate",
)


class System:
    """Two replicas, and what they must answer."""

    def __init__(self, world: World, folder: Path) -> None:
        self.experiment = vllm_experiment()
        self.model = self.experiment.spec.model
        self.reference = Reference(self.model)
        self.world = world
        self.publisher: WeightPublisher
        self.chance = random.Random(0)
        self.versions: dict[int, Any] = {}
        self._folder = folder
        self._processes = ExitStack()
        self.pids: dict[str, int] = {}
        self._channels: dict[str, Any] = {}

    def start(self, name: str) -> None:
        """Start a replica."""
        replica = replica_process(self.experiment, self._folder, name, self.world.address)
        self.pids[name] = self._processes.enter_context(replica).pid

    async def ready(self, *names: str) -> tuple[Replica, ...]:
        """The replicas, once exactly those of these names are ready."""
        view = await self.world.until(
            lambda view: {replica.replica_id for replica, is_ready in view.replicas if is_ready} == {*names},
            for_minutes,
        )
        return tuple(replica for replica, is_ready in view.replicas if is_ready)

    async def publish(self, version: int) -> None:
        """Bring a version to the replicas."""
        self.versions[version] = weights_of(self.model, version)
        await self.publisher.publish(taken(self.versions[version].items(), version))

    async def generate(self, replica: Replica, **fields: Any) -> pb.GenerateResponse:
        """Ask a replica, and check every answer against its version's forward pass."""
        prompt = random_prompt(self.chance)
        values = {"request_id": str(self.chance.random()), "prompt_token_ids": prompt, "n": 2, "max_new_tokens": 16}
        request = pb.GenerateRequest(**{"temperature": 1.0, **values, **fields})
        stub: InferenceServiceAsyncStub = InferenceServiceStub(self._channel(replica.address))
        answer = await call(stub.Generate, request, timeout_seconds=LIMIT_SECONDS)
        for completion in answer.completions:
            self.reference.require_equal(
                self.versions, prompt, completion.token_ids, completion.logprobs, completion.policy_versions
            )
        return answer

    def _channel(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return self._channels[address]

    async def close(self) -> None:
        """End everything."""
        self._processes.close()
        for channel in self._channels.values():
            await channel.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        redis = await connect_redis(redis_url)
        stack.push_async_callback(redis.aclose)
        world = await stack.enter_async_context(running_weight_sync(redis, "vllm", rules()))
        system = System(world, tmp_path_factory.mktemp("replicas"))
        stack.push_async_callback(system.close)
        for name in NAMES:
            system.start(name)
        system.publisher = await world.publisher()
        publishing = asyncio.create_task(system.publish(0))
        await system.ready(*NAMES)
        await publishing
        yield system


@pytest.mark.guide("L9", "L10")
async def test_log_probs_after_every_sync_are_those_of_a_forward_pass(system: System) -> None:
    for version in range(1, 4):
        await system.publish(version)
        for replica in await system.ready(*NAMES):
            answer = await system.generate(replica, n=4)
            assert {v for completion in answer.completions for v in completion.policy_versions} == {version}


async def test_a_request_in_flight_goes_on_with_the_new_weights(system: System) -> None:
    has_spanned, version = False, 10
    while not has_spanned:  # a request that ends before the sync, or starts after it, does not count
        version += 1
        replica, _ = await system.ready(*NAMES)
        answers = asyncio.gather(*(system.generate(replica, max_new_tokens=240) for _ in range(3)))
        await asyncio.sleep(0.2)
        await system.publish(version)
        spans = [set(completion.policy_versions) for answer in await answers for completion in answer.completions]
        has_spanned = {version - 1, version} in spans


async def test_a_model_that_lacks_a_tensor_is_refused_and_the_old_version_goes_on(system: System) -> None:
    old = max(system.versions) + 1  # publishing a lower version than the committed one is no error
    await system.publish(old)
    whole = weights_of(system.model, old + 1)
    whole.pop("model.layers.1.self_attn.k_proj.weight")
    publishing = asyncio.create_task(system.publisher.publish(taken(whole.items(), old + 1)))
    done, _ = await asyncio.wait([publishing], timeout=60)
    assert done
    with pytest.raises(NexrlError):
        publishing.result()
    await system.publish(old + 2)
    for replica in await system.ready(*NAMES):
        answer = await system.generate(replica)
        assert {v for completion in answer.completions for v in completion.policy_versions} == {old + 2}


async def test_the_openai_api_answers_and_no_control_route_does(system: System) -> None:
    replica, _ = await system.ready(*NAMES)
    async with openai.AsyncOpenAI(base_url=f"{replica.http_url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="default", prompt=[5, 6, 7], max_tokens=4)
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 4
        streamed = await client.completions.create(model="default", prompt=[5, 6, 7], max_tokens=4, stream=True)
        assert [chunk async for chunk in streamed]
    async with aiohttp.ClientSession(replica.http_url) as session:
        for route, method in product(CONTROL_ROUTES, ("GET", "POST")):
            async with session.request(method, route, json={}) as refused:
                assert refused.status in (404, 405), route
        async with session.get("/health") as health:
            assert (await health.json())["policy_version"] >= 0


async def test_vllm_listens_on_a_socket_that_only_its_replica_can_open(system: System) -> None:
    for name in NAMES:
        (server,) = psutil.Process(system.pids[name]).children()
        sockets = [c.laddr for c in server.net_connections("unix") if str(c.laddr).endswith("vllm.sock")]
        assert sockets
        assert Path(str(sockets[0])).parent.stat().st_mode & 0o077 == 0
        listening = [c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert all(address.ip in ("127.0.0.1", "::1") for address in listening)


async def test_a_killed_replica_takes_its_vllm_along(system: System) -> None:
    name = NAMES[1]
    await system.ready(*NAMES)
    descendants = psutil.Process(system.pids[name]).children(recursive=True)
    assert descendants
    os.kill(system.pids[name], signal.SIGKILL)
    gone, alive = await asyncio.to_thread(psutil.wait_procs, descendants, LIMIT_SECONDS)
    assert (len(gone), alive) == (len(descendants), [])
