"""A client for the policy: token ids in, token ids with log-probabilities and policy versions out."""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import grpc

from nexrl.activity import ActivityTracker
from nexrl.errors import DeadlineExceededError, InvalidArgumentError, NexrlError, UnavailableError
from nexrl.rpc.client import call, connect, new_request_id, shows_token, watch
from nexrl.rpc.status import error_from_call
from nexrl.transcript import check_completion
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.v1.policy_pb2 import Replica
from nexrl.v1.trajectory_pb2 import TaskLease
from nexrl.v1.weight_sync_service_pb2 import GetWeightSyncStateRequest, WatchReplicasRequest
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub

log = logging.getLogger(__name__)

STATE_SECONDS = 30.0
MAX_CALL_SECONDS = 3000.0  # gRPC rounds long deadlines up; servers refuse more than 3600
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 keep every token.

    `stop` are texts, and `stop_token_ids` tokens, that end a completion and are part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, lease: TaskLease, *, max_new_tokens: int) -> Self:
        """Return the parameters that a lease asks for: the pool refuses samples that were drawn with others."""
        return cls(max_new_tokens, lease.temperature, lease.top_p or 1.0, lease.top_k, stop=tuple(lease.stop))


class Policy:
    """Balances requests over the ready replicas of one model. `follow_replicas` must run in the background."""

    def __init__(
        self,
        weight_sync: grpc.aio.Channel,
        *,
        model_tag: str = "default",
        max_retries: int = 3,
        open_channel: Callable[[str], grpc.aio.Channel] = connect,
        activity: ActivityTracker | None = None,
    ) -> None:
        """`activity` counts the requests in flight; without it, nobody sees them."""
        self._weight_sync = WeightSyncServiceStub(weight_sync)
        self._model_tag = model_tag
        self._max_retries = max_retries
        self._open_channel = open_channel
        self._activity = activity or ActivityTracker(Module(), None)
        self._replicas: dict[str, _Route] = {}
        self._changed = asyncio.Condition()
        self._turns = itertools.count()
        self._gate = "weight sync has not answered yet"

    async def follow_replicas(self) -> None:
        """Keep the list of replicas up to date with weight sync, until the task is cancelled."""
        request = WatchReplicasRequest(model_tag=self._model_tag)
        async for state in watch(self._weight_sync.WatchReplicas, request):
            self._gate = state.gate
            await self._set_replicas(state.replicas)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        *,
        seeds: Sequence[int] = (),
        timeout_seconds: float = MAX_CALL_SECONDS,
    ) -> Sequence[GeneratedCompletion]:
        """Sample `n` completions of one prompt, on the ready replica with the fewest completions in flight.

        `seeds` has one seed per completion (`draw_seed`); without them the replica chooses. Either way, each completion
        says how it was drawn.

        Waits while no replica is ready. A failed request is sent to another replica with the same request id, at most
        `max_retries` times. A replica that cannot be reached does not count as a retry. Raises InvalidArgumentError for
        a request that no replica accepts (for example a prompt that is too long), UnavailableError if no replica is
        ready in time, DeadlineExceededError if the completions are not generated in time, else the last error.
        """
        request = GenerateRequest(
            request_id=new_request_id(),
            prompt_token_ids=prompt_token_ids,
            n=n,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seeds=seeds,
            stop_token_ids=sampling.stop_token_ids,
            stop=sampling.stop,
        )
        with self._activity.in_flight("generate", waiting_on="inference"):
            return await self._generate(request, time.monotonic() + min(timeout_seconds, MAX_CALL_SECONDS))

    async def newest_version(self) -> int:
        """Ask weight sync for the committed version; -1 if there is none.

        A call after a lease returns no older version than the one that granted the lease. `follow_replicas` may not
        have seen it yet. Raises UnavailableError or DeadlineExceededError after STATE_SECONDS.
        """
        request = GetWeightSyncStateRequest(model_tag=self._model_tag)
        state = await call(self._weight_sync.GetWeightSyncState, request, timeout_seconds=STATE_SECONDS)
        return state.committed_version

    async def wait_gate(self) -> None:
        """Wait until weight sync lets rollouts take work: see WeightSyncService.CheckRolloutStatus."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._gate)

    async def close(self) -> None:
        """Close the channels to all replicas."""
        await self._set_replicas([])

    async def _generate(self, request: GenerateRequest, deadline: float) -> Sequence[GeneratedCompletion]:
        failed: set[str] = set()
        failures = 0
        for pause_seconds in _pauses():
            route = await self._route(failed, deadline)
            try:
                return await route.generate(request, deadline, next(self._turns))
            except (InvalidArgumentError, DeadlineExceededError):
                raise
            except UnavailableError as error:
                last_error: NexrlError = error
            except NexrlError as error:
                last_error, failures = error, failures + 1
            log.warning("replica %s: %s", route.replica_id, last_error)
            failed.add(route.replica_id)
            if failures > self._max_retries:
                raise last_error
            await self._pause_unless_another(failed, min(pause_seconds, deadline - time.monotonic()))
        raise AssertionError("pauses never end")

    async def _set_replicas(self, replicas: Iterable[Replica]) -> None:
        listed = {replica.replica_id: replica for replica in replicas}
        for replica_id, route in list(self._replicas.items()):
            if replica_id not in listed or _address(listed[replica_id]) != route.address:
                del self._replicas[replica_id]
                await route.retire()
        for replica_id, replica in listed.items():
            if replica_id not in self._replicas:
                address = _address(replica)
                self._replicas[replica_id] = _Route(replica_id, address, self._open_channel(address))
            self._replicas[replica_id].is_ready = replica.ready
        async with self._changed:
            self._changed.notify_all()

    async def _route(self, failed: set[str], deadline: float) -> "_Route":
        """Return the ready replica with the fewest samples in flight. Prefers one that has not failed this request."""
        if not self._ready():
            await self._wait_until(lambda: bool(self._ready()), deadline)
        ready = self._ready()
        untried = [route for route in ready if route.replica_id not in failed]
        return min(untried or ready, key=lambda route: (route.in_flight, route.last_turn))

    def _ready(self) -> "list[_Route]":
        return [route for route in self._replicas.values() if route.is_ready]

    async def _wait_until(self, is_met: Callable[[], bool], deadline: float) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, deadline - began)), self._changed:
                await self._changed.wait_for(is_met)
        except TimeoutError:
            raise UnavailableError(
                f"no replica of model {self._model_tag} was ready within {deadline - began:.1f} s; "
                f"{len(self._replicas)} are registered with weight sync"
            ) from None

    async def _pause_unless_another(self, failed: set[str], seconds: float) -> None:
        """Return at once if another replica is ready. Otherwise wait `seconds`, or until the list changes."""
        if any(route.replica_id not in failed for route in self._ready()):
            return
        failed.clear()
        if seconds <= 0:
            raise DeadlineExceededError(f"generate: no replica of model {self._model_tag} answered in time")
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait()
        except TimeoutError:
            pass


def draw_seed(experiment_seed: int, sample_id: str, attempt: int, turn: int = 0) -> int:
    """Return the seed of one completion, in [0, 2**63): a function of the sample, its attempt and the turn."""
    name = f"{experiment_seed}/{sample_id}/{attempt}/{turn}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


class _Route:
    """One replica and its channel, which stays open until the last request on it has ended."""

    def __init__(self, replica_id: str, address: str, channel: grpc.aio.Channel) -> None:
        self.replica_id = replica_id
        self.address = address
        self.is_ready = False
        self.in_flight = 0
        self.last_turn = -1
        self._channel = channel
        self._stub = InferenceServiceStub(channel)
        self._is_retired = False

    async def generate(self, request: GenerateRequest, deadline: float, turn: int) -> Sequence[GeneratedCompletion]:
        self.in_flight += request.n
        self.last_turn = turn
        try:
            response = await self._stub.Generate(request, timeout=max(0.001, deadline - time.monotonic()))
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from None
        finally:
            self.in_flight -= request.n
            await self._close_when_idle()
        return _checked(response.completions, request.n)

    async def retire(self) -> None:
        self._is_retired = True
        await self._close_when_idle()

    async def _close_when_idle(self) -> None:
        if self._is_retired and self.in_flight == 0:
            await self._channel.close()


def _address(replica: Replica) -> str:
    return (replica.token_address if shows_token() else "") or replica.address


def _checked(completions: Sequence[GeneratedCompletion], n: int) -> Sequence[GeneratedCompletion]:
    if len(completions) != n:
        raise NexrlError(f"generate: requested {n} completions, got {len(completions)}")
    for completion in completions:
        if completion.finish_reason == "abort":
            raise UnavailableError("generate: the replica aborted the request")
        try:
            check_completion(completion)
        except InvalidArgumentError as error:
            raise NexrlError(f"generate: {error.message}") from None  # the response is wrong, not the request
    return completions


def _pauses() -> Iterable[float]:
    """Yield the seconds to wait after the first, second, ... failure on all replicas."""
    for doublings in itertools.count():
        yield min(FIRST_PAUSE_SECONDS * 2 ** min(doublings, 10), MAX_PAUSE_SECONDS)
