"""Fakes for rollout tests: an engine, weight sync and the pool. Real gRPC servers serve them."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc

from nexrl.errors import NexrlError
from nexrl.policy import Policy
from nexrl.rpc.client import connect
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.rpc.limits import MAX_MESSAGE_BYTES
from nexrl.spec.experiment import Experiment
from nexrl.v1 import data_loader_service_pb2 as data_loader
from nexrl.v1 import inference_service_pb2 as inference
from nexrl.v1 import trajectory_pool_service_pb2 as pool
from nexrl.v1 import validator_service_pb2 as validator
from nexrl.v1 import weight_sync_service_pb2 as weight_sync
from nexrl.v1.data_loader_service_pb2_grpc import add_DataLoaderServiceServicer_to_server
from nexrl.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from nexrl.v1.policy_pb2 import Replica
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    PUT_OUTCOME_ACCEPTED,
    PUT_OUTCOME_FENCED,
    Purpose,
    SampleLease,
    SampleResult,
    Task,
    TaskLease,
)
from nexrl.v1.trajectory_pool_service_pb2_grpc import (
    add_TrajectoryPoolServiceServicer_to_server,
)
from nexrl.v1.validator_service_pb2_grpc import add_ValidatorServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import add_WeightSyncServiceServicer_to_server
from tests.support.patience import finished, name_of

Context = grpc.aio.ServicerContext[Any, Any]
Reply = Callable[[inference.GenerateRequest, int], inference.GeneratedCompletion]


def completion(
    token_ids: Sequence[int], finish_reason: str = "stop", versions: Sequence[int] = ()
) -> inference.GeneratedCompletion:
    """Return a completion. Token t has its own log-probability, -(t + 1) / 64, which is exact in float32."""
    return inference.GeneratedCompletion(
        token_ids=token_ids,
        logprobs=[-(token + 1) / 64 for token in token_ids],
        policy_versions=versions or [0] * len(token_ids),
        finish_reason=finish_reason,
    )


def echo(request: inference.GenerateRequest, index: int) -> inference.GeneratedCompletion:
    """Complete a prompt with its last tokens in reverse order."""
    tokens = list(reversed(request.prompt_token_ids))[: request.max_new_tokens]
    return completion(tokens, "length" if len(tokens) == request.max_new_tokens else "stop")


class Fake:
    """Base of the fakes. RPCs that a fake does not implement answer UNIMPLEMENTED. Tests can wait for calls."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)

        async def refuse(request: object, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, name)

        return refuse

    async def wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait until the condition holds. It is checked after each call."""
        await finished(self._until(is_met), f"{type(self).__name__}: {name_of(is_met)}")

    async def _until(self, is_met: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_met)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class FakeEngine(Fake):
    """Answers with the result of `reply`.

    The first requests raise `errors`, one each. While `is_open` is clear, requests wait.
    """

    def __init__(self, reply: Reply = echo, errors: Sequence[Exception] = ()) -> None:
        super().__init__()
        self.reply = reply
        self.errors = list(errors)
        self.requests: list[inference.GenerateRequest] = []
        self.served: list[inference.GeneratedCompletion] = []
        self.cancelled = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def Generate(self, request: inference.GenerateRequest, context: Context) -> inference.GenerateResponse:
        self.requests.append(request)
        await self._notify()
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self._notify()
            raise
        if self.errors:
            raise self.errors.pop(0)
        completions = [self.reply(request, index) for index in range(request.n)]
        self.served += completions
        return inference.GenerateResponse(completions=completions)


class FakeWeightSync(Fake):
    """Sends the replicas to each watcher, and sends them again after each call of `set`."""

    def __init__(self) -> None:
        super().__init__()
        self._state = weight_sync.WatchReplicasResponse(committed_version=-1)
        self.told = 0
        """The number of states that were sent."""

    async def set(self, *replicas: Replica, committed_version: int = 0, gate: str = "") -> None:
        self._state = weight_sync.WatchReplicasResponse(
            replicas=replicas, committed_version=committed_version, gate=gate
        )
        await self._notify()

    async def GetWeightSyncState(
        self, request: weight_sync.GetWeightSyncStateRequest, context: Context
    ) -> weight_sync.GetWeightSyncStateResponse:
        return weight_sync.GetWeightSyncStateResponse(committed_version=self._state.committed_version)

    async def WatchReplicas(
        self, request: weight_sync.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[weight_sync.WatchReplicasResponse]:
        while True:
            state = self._state
            yield state
            self.told += 1
            await self._notify()
            await self._until(partial(lambda before: self._state is not before, state))


class FakePool(Fake):
    """Grants the given leases in order, and what is returned again, first. Records all calls."""

    def __init__(self, leases: Sequence[TaskLease] = ()) -> None:
        super().__init__()
        self.waiting = list(leases)
        self.granted: list[str] = []
        self.results: dict[Purpose.ValueType, list[SampleResult]] = defaultdict(list)
        self.returned: list[str] = []
        self.lost: set[str] = set()
        self.lease_calls = 0
        self.renewals = 0
        self.puts = 0
        self.put_errors: list[NexrlError] = []
        self.is_over = False
        self._answers: dict[str, data_loader.LeaseTasksResponse] = {}
        self._leases: dict[str, TaskLease] = {}
        """The leases of samples that are neither put nor returned."""

    @property
    def in_flight(self) -> int:
        """The number of samples that were granted and neither put nor returned."""
        return len(self.granted) - sum(map(len, self.results.values())) - len(self.returned)

    async def add(self, *leases: TaskLease) -> None:
        self.waiting += leases
        await self._notify()

    async def LeaseTasks(
        self, request: data_loader.LeaseTasksRequest, context: Context
    ) -> data_loader.LeaseTasksResponse:
        self.lease_calls += 1
        await self._notify()
        if request.request_id in self._answers:
            return self._answers[request.request_id]
        try:
            async with asyncio.timeout(request.wait_seconds), self._changed:
                await self._changed.wait_for(lambda: bool(self.waiting) or self.is_over)
        except TimeoutError:
            return data_loader.LeaseTasksResponse(waiting_on="credit")
        response = data_loader.LeaseTasksResponse(exhausted=not self.waiting)
        room = request.max_samples
        while self.waiting and room > 0:
            lease = self.waiting.pop(0)
            if len(lease.samples) > room:
                rest = TaskLease()
                rest.CopyFrom(lease)
                del rest.samples[:room]
                del lease.samples[room:]
                self.waiting.insert(0, rest)
            room -= len(lease.samples)
            response.leases.append(lease)
            self.granted += [sample.sample_id for sample in lease.samples]
            self._leases |= dict.fromkeys((sample.sample_id for sample in lease.samples), lease)
        self._answers[request.request_id] = response
        await self._notify()
        return response

    async def RenewLeases(
        self, request: data_loader.RenewLeasesRequest, context: Context
    ) -> data_loader.RenewLeasesResponse:
        self.renewals += 1
        await self._notify()
        asked = [sample.sample_id for sample in request.samples]
        return data_loader.RenewLeasesResponse(lost_sample_ids=[sample for sample in asked if sample in self.lost])

    async def ReturnSamples(
        self, request: data_loader.ReturnSamplesRequest, context: Context
    ) -> data_loader.ReturnSamplesResponse:
        held = [sample for sample in request.samples if sample.sample_id in self._leases.keys() - self.lost]
        self.returned += [sample.sample_id for sample in held]
        again: dict[int, TaskLease] = {}
        for sample in held:  # the pool grants them again, as another attempt
            lease = self._leases.pop(sample.sample_id)
            granted = again.setdefault(id(lease), _without_samples(lease))
            granted.samples.add(sample_id=sample.sample_id, attempt=sample.attempt + 1)
        self.waiting[:0] = again.values()
        await self._notify()
        return data_loader.ReturnSamplesResponse(returned=len(held))

    async def PutSamples(self, request: pool.PutSamplesRequest, context: Context) -> pool.PutSamplesResponse:
        return pool.PutSamplesResponse(outcomes=await self._put(PURPOSE_TRAINING, request.results))

    async def PutValidationSamples(
        self, request: validator.PutValidationSamplesRequest, context: Context
    ) -> validator.PutValidationSamplesResponse:
        return validator.PutValidationSamplesResponse(
            outcomes=await self._put(Purpose.PURPOSE_VALIDATION, request.results)
        )

    async def _put(self, purpose: Purpose.ValueType, results: Sequence[SampleResult]) -> list[Any]:
        if self.put_errors:
            raise self.put_errors.pop(0)
        self.puts += 1
        kept = [result for result in results if result.sample_id not in self.lost]
        self.results[purpose] += kept
        for result in kept:
            self._leases.pop(result.sample_id, None)
        await self._notify()
        return [PUT_OUTCOME_FENCED if result.sample_id in self.lost else PUT_OUTCOME_ACCEPTED for result in results]


def _without_samples(lease: TaskLease) -> TaskLease:
    rest = TaskLease()
    rest.CopyFrom(lease)
    del rest.samples[:]
    return rest


def task_lease(
    group: int, size: int, *, prompt: str = "12", answer: str = "21", purpose: Purpose.ValueType = PURPOSE_TRAINING
) -> TaskLease:
    """Return a lease of one whole group."""
    item = {"id": f"train-{group}", "prompt": prompt, "answer": answer, "metadata": {}}
    return TaskLease(
        task=Task(task_id=f"train-{group}", item_json=json.dumps(item)),
        group_id=str(group),
        samples=[SampleLease(sample_id=f"{group}.{index}", attempt=1) for index in range(size)],
        purpose=purpose,
        deadline_unix_seconds=time.time() + 60,
        temperature=1.0,
    )


def replica(name: str, address: str, ready: bool = True) -> Replica:
    """Return a replica that serves version 0."""
    return Replica(replica_id=name, address=address, policy_version=0, ready=ready)


@asynccontextmanager
async def serving(*servicers: Fake) -> AsyncIterator[str]:
    """Serve all services that the servicers implement. Yields host:port."""
    limit = ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)
    server = grpc.aio.server(interceptors=[EdgeInterceptor()], options=[limit])
    for servicer in servicers:
        for register in _REGISTRATION[type(servicer)]:
            register(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def following_policy(weight_sync_address: str, **settings: Any) -> AsyncIterator[Policy]:
    """Open a policy that follows the replicas of a weight sync."""
    async with connect(weight_sync_address) as channel:
        policy = Policy(channel, **settings)
        following = asyncio.create_task(policy.follow_replicas())
        try:
            yield policy
        finally:
            following.cancel()
            await policy.close()


@asynccontextmanager
async def policy_over(*engines: FakeEngine, committed_version: int = 0, **settings: Any) -> AsyncIterator[Policy]:
    """Open a policy over engines that are ready. Its first request waits until the policy knows all of them."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(engine)) for engine in engines]
        registry = FakeWeightSync()
        replicas = [replica(f"replica-{index}", address) for index, address in enumerate(addresses)]
        await registry.set(*replicas, committed_version=committed_version)
        policy = await stack.enter_async_context(
            following_policy(await stack.enter_async_context(serving(registry)), **settings)
        )
        yield policy


def experiment(*, group_size: int = 4, loss: str = "ppo_clip", **rollout: Any) -> Experiment:
    """Return a small experiment with this rollout section."""
    return Experiment.model_validate(
        {
            "apiVersion": "nexrl.dev/v1alpha1",
            "kind": "Experiment",
            "metadata": {"name": "test"},
            "spec": {
                "model": {"scratch": {"alphabet": ALPHABET, "maxPositions": 256}},
                "data": {"type": "mock"},
                "rollout": {"maxNewTokens": 16, **rollout},
                "trajectoryPool": {"batchSize": 16, "groupSize": group_size},
                "algorithm": {"loss": loss},
                "inference": {"maxTokensPerRow": 256},
                "trainer": {"steps": 1},
            },
        }
    )


ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-=.?"

_REGISTRATION: dict[type[Fake], Sequence[Callable[[Any, Any], None]]] = {
    FakeEngine: [add_InferenceServiceServicer_to_server],
    FakeWeightSync: [add_WeightSyncServiceServicer_to_server],
    FakePool: [
        add_DataLoaderServiceServicer_to_server,
        add_TrajectoryPoolServiceServicer_to_server,
        add_ValidatorServiceServicer_to_server,
    ],
}
