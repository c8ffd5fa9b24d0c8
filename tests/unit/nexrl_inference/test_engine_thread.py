import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nexrl.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.engine_thread import EngineThread
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import GenerationRequest, GenerationResult

Reference = Callable[..., Tensor]

# No token ends it, and its row is seconds long: it is in flight for as long as a test needs it.
ENDLESS = GenerationRequest("endless", (5, 6, 7), max_new_tokens=5000, n=2, seeds=(0, 1))
SHORT = GenerationRequest("short", (5, 6, 7), max_new_tokens=3, n=2, seeds=(0, 1))


class StepCountingEngine(Engine):
    steps = 0

    def step(self) -> list[GenerationResult]:
        self.steps += 1
        return super().step()


@pytest.fixture
def engine(other_model: PreTrainedModel) -> StepCountingEngine:
    return StepCountingEngine(other_model, eos_token_ids=(), limits=Limits(max_rows=8, max_tokens_per_row=4096))


async def test_concurrent_requests_get_their_own_results(engine: Engine, model: PreTrainedModel) -> None:
    requests = [
        GenerationRequest(str(i), (i,), max_new_tokens=1 + i % 3, n=1 + i % 4, seeds=tuple(range(i, i + 1 + i % 4)))
        for i in range(20)
    ]
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        results = await asyncio.gather(*map(thread.generate, requests))
        assert (thread.active_rows, thread.waiting_requests, thread.policy_version) == (0, 0, 0)
    for request, result in zip(requests, results, strict=True):
        assert (result.request_id, result.prompt_ids) == (request.request_id, request.prompt_ids)
        assert [len(c.token_ids) for c in result.completions] == [request.max_new_tokens] * request.n


async def test_an_idle_engine_takes_no_step(engine: StepCountingEngine, model: PreTrainedModel) -> None:
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        await thread.generate(SHORT)
        # One empty step after the load; then two tokens from the prefill and its decode, and one more.
        assert engine.steps == 3


async def test_refusals_reach_the_caller_and_the_engine_goes_on(engine: Engine, model: PreTrainedModel) -> None:
    async with EngineThread(engine) as thread:
        with pytest.raises(FailedPreconditionError):
            await thread.generate(SHORT)
        with pytest.raises(InvalidArgumentError, match="missing"):
            await thread.load_weights({}, version=0)
        with pytest.raises(NotFoundError):
            await thread.cancel("unknown")
        await thread.load_weights(model.state_dict(), version=0)
        assert len((await thread.generate(SHORT)).completions) == 2


async def test_cancelling_the_awaiting_task_frees_its_rows(engine: Engine, model: PreTrainedModel) -> None:
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        task = asyncio.create_task(thread.generate(ENDLESS))
        await asyncio.sleep(0)  # lets it ask first
        await thread.generate(SHORT)
        assert thread.active_rows == ENDLESS.n
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await thread.generate(SHORT)
        assert thread.active_rows == 0


async def test_a_cancelled_duplicate_leaves_the_first_request_alone(engine: Engine, model: PreTrainedModel) -> None:
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        first = asyncio.create_task(thread.generate(ENDLESS))
        await asyncio.sleep(0)  # lets it ask first
        await thread.generate(SHORT)
        with pytest.raises(AlreadyExistsError):
            await thread.generate(ENDLESS)
        second = asyncio.create_task(thread.generate(ENDLESS))
        await asyncio.sleep(0)  # lets it ask
        second.cancel()
        await thread.generate(SHORT)
        assert thread.active_rows == ENDLESS.n
        assert not first.done()
        await thread.cancel(ENDLESS.request_id)
        await first


async def test_cancel_returns_what_there_is_to_the_waiter(engine: Engine, model: PreTrainedModel) -> None:
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        task = asyncio.create_task(thread.generate(ENDLESS))
        await asyncio.sleep(0)  # lets it ask first
        await thread.generate(SHORT)
        await thread.cancel("endless")
        result = await task
    assert [c.finish_reason for c in result.completions] == ["abort"] * 2
    assert all(c.token_ids for c in result.completions)


@pytest.mark.guide("Q37")
async def test_weights_loaded_under_way_take_over_between_two_tokens(
    engine: Engine, model: PreTrainedModel, reference_logprobs: Reference
) -> None:
    newer = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=3)
        task = asyncio.create_task(thread.generate(ENDLESS))
        await asyncio.sleep(0)  # lets it ask first
        await thread.generate(SHORT)
        await thread.load_weights(newer, version=4)
        await thread.generate(SHORT)
        await thread.cancel("endless")
        completion = (await task).completions[0]
    versions = torch.tensor(completion.policy_versions)
    assert sorted(completion.policy_versions) == list(completion.policy_versions)
    assert set(completion.policy_versions) == {3, 4}
    old = reference_logprobs(model, ENDLESS.prompt_ids, completion.token_ids)
    model.load_state_dict(newer)
    new = reference_logprobs(model, ENDLESS.prompt_ids, completion.token_ids)
    expected = torch.where(versions == 3, old, new)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


async def test_a_failure_inside_the_loop_reaches_every_waiter_and_every_later_call(
    engine: Engine, model: PreTrainedModel
) -> None:
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        waiters = [asyncio.create_task(thread.generate(request)) for request in (ENDLESS, SHORT)]
        await thread.load_weights(broken, version=1)
        with pytest.raises(UnavailableError, match="logits are not finite"):
            await waiters[0]
        with pytest.raises(UnavailableError, match="logits are not finite"):
            await thread.generate(SHORT)
        with pytest.raises(UnavailableError, match="logits are not finite"):
            await thread.wait_ended()
        await asyncio.gather(*waiters, return_exceptions=True)


async def test_close_fails_what_is_in_flight_and_refuses_what_comes_later(
    engine: Engine, model: PreTrainedModel
) -> None:
    async with EngineThread(engine) as thread:
        await thread.load_weights(model.state_dict(), version=0)
        task = asyncio.create_task(thread.generate(ENDLESS))
        await asyncio.sleep(0)  # lets it ask first
        await thread.generate(SHORT)
        await thread.close()
        with pytest.raises(UnavailableError, match="closed"):
            await task
        with pytest.raises(UnavailableError, match="closed"):
            await thread.generate(SHORT)
        await thread.wait_ended()
