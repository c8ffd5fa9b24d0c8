"""Policy: which replica gets a request, and what happens when one fails. Over real gRPC."""

import asyncio
from itertools import product

import pytest

from nexrl.errors import DeadlineExceededError, InvalidArgumentError, NexrlError, UnavailableError
from nexrl.policy import Policy, Sampling, draw_seed
from nexrl.rpc.client import connect
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from tests.support.patience import eventually
from tests.support.rollout import (
    FakeEngine,
    FakeWeightSync,
    completion,
    following_policy,
    policy_over,
    replica,
    serving,
)

SAMPLING = Sampling(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=5)


@pytest.mark.guide("F1", "F2")
async def test_request_carries_the_prompt_and_the_sampling() -> None:
    engine = FakeEngine()
    async with policy_over(engine) as policy:
        completions = await policy.generate([5, 6, 7], 2, SAMPLING, seeds=[3, 4])
    assert [list(c.token_ids) for c in completions] == [[7, 6, 5], [7, 6, 5]]
    request = engine.requests[0]
    assert list(request.prompt_token_ids) == [5, 6, 7]
    assert (request.n, request.max_new_tokens, request.temperature, request.top_p, request.top_k) == (2, 8, 0.7, 0.9, 5)
    assert list(request.seeds) == [3, 4]


def test_each_turn_of_each_attempt_has_a_seed_of_its_own_that_does_not_change() -> None:
    attempts = list(product((0, 1), ("3.0", "3.1"), (1, 2), (0, 1)))
    seeds = [draw_seed(*attempt) for attempt in attempts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(0, "3.0", 1) == 598567521880539443


async def test_replica_with_the_fewest_completions_in_flight_is_chosen() -> None:
    engines = FakeEngine(), FakeEngine()
    async with policy_over(*engines) as policy:
        for engine in engines:
            engine.is_open.clear()
        waiting = [asyncio.create_task(policy.generate([1, 2], n, SAMPLING)) for n in (4, 1, 1, 1)]
        await engines[0].wait_for(lambda: sum(request.n for request in engines[0].requests) >= 3)
        await engines[1].wait_for(lambda: sum(request.n for request in engines[1].requests) >= 3)
        assert sorted(sum(request.n for request in engine.requests) for engine in engines) == [3, 4]
        for engine in engines:
            engine.is_open.set()
        await asyncio.gather(*waiting)


@pytest.mark.guide("F2", "S3")
async def test_failed_request_goes_to_another_replica_under_the_same_request_id() -> None:
    engines = FakeEngine(errors=[NexrlError("broken")]), FakeEngine(errors=[NexrlError("broken too")])
    async with policy_over(*engines) as policy:
        await policy.generate([1, 2], 1, SAMPLING)
    requests = [request for engine in engines for request in engine.requests]
    assert len(requests) == 3
    assert len({request.request_id for request in requests}) == 1
    assert all(engine.requests for engine in engines)


@pytest.mark.guide("F2", "Q36")
async def test_failures_beyond_the_limit_are_raised() -> None:
    engine = FakeEngine(errors=[NexrlError(f"broken {attempt}") for attempt in range(3)])
    async with policy_over(engine, max_retries=1) as policy:
        with pytest.raises(NexrlError, match="broken 1"):
            await policy.generate([1, 2], 1, SAMPLING)
    assert len(engine.requests) == 2


async def test_request_that_can_never_succeed_is_not_repeated() -> None:
    engine = FakeEngine(errors=[InvalidArgumentError("prompt too long")])
    async with policy_over(engine) as policy:
        with pytest.raises(InvalidArgumentError, match="too long"):
            await policy.generate([1, 2], 1, SAMPLING)
    assert len(engine.requests) == 1


async def test_replica_that_cannot_be_reached_costs_no_retry() -> None:
    engines = FakeEngine(errors=[UnavailableError("stopping")]), FakeEngine(errors=[UnavailableError("stopping")])
    async with policy_over(*engines, max_retries=0) as policy:
        assert len(await policy.generate([1, 2], 1, SAMPLING)) == 1
    assert sum(len(engine.requests) for engine in engines) == 3


async def test_the_newest_version_is_asked_of_weight_sync_and_not_of_the_watch() -> None:
    registry = FakeWeightSync()
    await registry.set(committed_version=3)
    async with serving(registry) as address, connect(address) as channel:
        policy = Policy(channel)  # which follows nothing
        assert await policy.newest_version() == 3


@pytest.mark.guide("F2", "F4")
async def test_only_ready_replicas_are_asked_and_readiness_is_waited_for() -> None:
    engine, registry = FakeEngine(), FakeWeightSync()
    async with serving(engine) as address, serving(registry) as registry_address:
        await registry.set(replica("late", address, ready=False))
        async with following_policy(registry_address) as policy:
            await eventually(lambda: policy._replicas, "the replica is known; it is not ready")
            waiting = asyncio.create_task(policy.generate([1, 2], 1, SAMPLING))
            with pytest.raises(UnavailableError, match="no replica"):
                await policy.generate([1, 2], 1, SAMPLING, timeout_seconds=0.05)
            assert not engine.requests
            await registry.set(replica("late", address))
            await waiting


async def test_replica_that_left_finishes_what_it_had_begun() -> None:
    engine, registry = FakeEngine(), FakeWeightSync()
    engine.is_open.clear()
    async with serving(engine) as address, serving(registry) as registry_address:
        await registry.set(replica("leaving", address))
        async with following_policy(registry_address) as policy:
            running = asyncio.create_task(policy.generate([1, 2], 1, SAMPLING))
            await engine.wait_for(lambda: bool(engine.requests))
            await registry.set()
            await eventually(lambda: not policy._ready())
            engine.is_open.set()
            assert len(await running) == 1


async def test_time_limit_is_raised_and_ends_the_request_on_the_engine() -> None:
    engine = FakeEngine()
    engine.is_open.clear()
    async with policy_over(engine) as policy:
        with pytest.raises(DeadlineExceededError):
            await policy.generate([1, 2], 1, SAMPLING, timeout_seconds=0.1)
        await engine.wait_for(lambda: engine.cancelled == 1)


@pytest.mark.parametrize(
    "wrong",
    [
        GeneratedCompletion(token_ids=[1], logprobs=[], policy_versions=[0], finish_reason="stop"),
        GeneratedCompletion(token_ids=[1], logprobs=[float("nan")], policy_versions=[0], finish_reason="stop"),
        GeneratedCompletion(token_ids=[1], logprobs=[float("-inf")], policy_versions=[0], finish_reason="stop"),
        GeneratedCompletion(token_ids=[1], logprobs=[-9999.0], policy_versions=[0], finish_reason="stop"),
        GeneratedCompletion(token_ids=[1], logprobs=[-1.0], policy_versions=[], finish_reason="stop"),
    ],
    ids=["short", "nan", "infinite", "sentinel", "versionless"],
)
async def test_malformed_answer_is_asked_for_again(wrong: GeneratedCompletion) -> None:
    answers = [wrong, completion([9])]

    def reply(request: GenerateRequest, index: int) -> GeneratedCompletion:
        return answers.pop(0)

    async with policy_over(FakeEngine(reply)) as policy:
        assert list((await policy.generate([1, 2], 1, SAMPLING))[0].token_ids) == [9]
