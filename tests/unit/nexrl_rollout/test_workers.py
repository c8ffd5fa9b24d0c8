"""The workers that come with the project, each over a fake engine behind gRPC."""

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any, cast

import openai
import pytest

from nexrl.activity import ActivityTracker
from nexrl.environment import ChatLoop, Endpoint, Outcome, Task, Turn
from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.policy import Policy, draw_seed
from nexrl.rewards import exact_match, math_answer
from nexrl.tensor_proto import decode_tensor
from nexrl.text import TextCodec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl.v1.trajectory_pb2 import (
    VERDICT_ENV_ERROR,
    VERDICT_OK,
    VERDICT_REWARD_ERROR,
    VERDICT_TIMEOUT,
    VERDICT_TRUNCATED,
    SampleResult,
    TaskLease,
    Verdict,
)
from nexrl_rollout.agent import AgentWorker
from nexrl_rollout.environments.number_guess import number_guess
from nexrl_rollout.gateway import Gateway
from nexrl_rollout.mock import MockWorker
from nexrl_rollout.single_turn import SingleTurnWorker
from nexrl_rollout.user_threads import ThreadLimits, UserThreads
from tests.support.rollout import FakeEngine, completion, experiment, policy_over, task_lease
from tests.support.tokenizers import chat_tokenizer

SCRATCH = TextCodec(build_tokenizer(experiment().spec.model))
CHAT = TextCodec(chat_tokenizer(), chat=True, system_prompt="be brief")
EOS = 2
MANY = 40
"""More calls than the threads of asyncio's own pool."""
THREADS = ThreadLimits(max_abandoned=8, max_blocked_seconds=30)


def activity() -> ActivityTracker:
    return ActivityTracker(Module(), None)


def says(*texts: str, codec: TextCodec = SCRATCH, end: int = EOS) -> FakeEngine:
    """An engine whose k-th completion is the k-th text, repeating."""
    count = 0

    def reply(request: GenerateRequest, index: int) -> GeneratedCompletion:
        nonlocal count
        tokens = [*codec.encode(texts[count % len(texts)]), end][: request.max_new_tokens]
        count += 1
        return completion(tokens, "stop" if tokens[-1] == end else "length")

    return FakeEngine(reply)


@pytest.mark.guide("B2", "G9", "G16", "Q8")
async def test_simple_samples_a_whole_group_in_one_call_and_scores_each() -> None:
    engine = says("21", "12")
    async with policy_over(engine) as policy:
        worker = SingleTurnWorker(
            policy, SCRATCH, exact_match, UserThreads(THREADS, activity()), experiment(type="simple", temperature=0.3)
        )
        results = await worker.rollout(task_lease(0, 4, prompt="12", answer="21"))
    (request,) = engine.requests
    assert (request.n, request.max_new_tokens, request.temperature) == (4, 16, 1.0)  # the lease's temperature
    assert list(request.prompt_token_ids) == SCRATCH.encode_prompt("12")
    assert list(request.seeds) == [draw_seed(0, f"0.{index}", 1) for index in range(4)]
    assert [result.trajectories[0].reward for result in results] == [1.0, 0.0, 1.0, 0.0]
    assert [result.sample_id for result in results] == ["0.0", "0.1", "0.2", "0.3"]
    trajectory = results[0].trajectories[0]
    assert list(trajectory.token_ids) == [*SCRATCH.encode_prompt("12"), *SCRATCH.encode("21"), EOS]
    assert (trajectory.prompt, trajectory.response, trajectory.finish_reason) == ("12", "21", "stop")
    assert trajectory.metadata["task_id"] == "train-0"


async def test_simple_draws_with_the_experiments_parameters_and_scores_the_text_before_a_stop_string() -> None:
    engine = says("21.3")
    lease = task_lease(0, 1, prompt="12", answer="21")
    lease.MergeFrom(TaskLease(top_p=0.9, top_k=5, stop=[".", "x"]))
    async with policy_over(engine) as policy:
        worker = SingleTurnWorker(
            policy, SCRATCH, exact_match, UserThreads(THREADS, activity()), experiment(type="simple")
        )
        (result,) = await worker.rollout(lease)
    (request,) = engine.requests
    assert (request.top_p, request.top_k, list(request.stop)) == (0.9, 5, [".", "x"])
    (trajectory,) = result.trajectories
    assert (trajectory.reward, trajectory.response) == (1.0, "21")
    assert list(trajectory.token_ids[-5:]) == [*SCRATCH.encode("21.3"), EOS]  # whatever the engine served is trained


async def test_completion_cut_by_the_limit_is_truncated_and_still_scored() -> None:
    async with policy_over(says("2121212121")) as policy:
        worker = SingleTurnWorker(
            policy, SCRATCH, exact_match, UserThreads(THREADS, activity()), experiment(type="simple", maxNewTokens=3)
        )
        (result,) = await worker.rollout(task_lease(0, 1))
    assert result.verdict == VERDICT_TRUNCATED
    assert result.trajectories[0].reward == 0.0


async def test_reward_that_fails_fails_its_own_sample_only() -> None:
    def fails_on_zero(task: Mapping[str, object], text: str, is_finished: bool) -> float:
        return 1 / int(text)

    async with policy_over(says("1", "0")) as policy:
        worker = SingleTurnWorker(
            policy, SCRATCH, fails_on_zero, UserThreads(THREADS, activity()), experiment(type="simple")
        )
        results = await worker.rollout(task_lease(0, 2))
    assert [result.verdict for result in results] == [VERDICT_OK, VERDICT_REWARD_ERROR]
    assert not results[1].trajectories
    assert "ZeroDivisionError" in results[1].error


async def test_rewards_that_do_not_return_keep_no_other_from_being_called() -> None:
    all_called = threading.Barrier(MANY)

    def waits(task: Mapping[str, object], text: str, is_finished: bool) -> float:
        return float(all_called.wait(20.0) >= 0)

    async with policy_over(says("1")) as policy:
        worker = SingleTurnWorker(policy, SCRATCH, waits, UserThreads(THREADS, activity()), experiment(type="simple"))
        results = await asyncio.gather(*(worker.rollout(task_lease(0, 1)) for _ in range(MANY)))
    assert [result.verdict for (result,) in results] == [VERDICT_OK] * MANY


async def test_a_rollout_waits_on_inference_while_it_generates_and_then_on_the_reward() -> None:
    seen, tracker = [], activity()

    def look() -> None:
        seen.append([(work.activity, work.waiting_on) for work in tracker.snapshot().work])

    def reply(request: GenerateRequest, index: int) -> GeneratedCompletion:
        look()
        return completion([EOS])

    def reward(task: Mapping[str, object], text: str, is_finished: bool) -> float:
        look()
        return 1.0

    async with policy_over(FakeEngine(reply), activity=tracker) as policy:
        worker = SingleTurnWorker(policy, SCRATCH, reward, UserThreads(THREADS, tracker), experiment(type="simple"))
        await worker.rollout(task_lease(0, 1))
    assert seen == [[("generate", "inference")], [("user code", "the reward")]]
    assert tracker.is_quiescent()


@pytest.mark.parametrize("item", ["{}", '{"prompt": ""}', '{"prompt": 3}', "[]", "{"])
@pytest.mark.guide("G16")
async def test_task_without_a_prompt_is_an_error_and_asks_no_engine(item: str) -> None:
    engine = says("1")
    lease = task_lease(0, 1)
    lease.task.item_json = item
    async with policy_over(engine) as policy:
        worker = SingleTurnWorker(
            policy, SCRATCH, exact_match, UserThreads(THREADS, activity()), experiment(type="simple")
        )
        with pytest.raises(InvalidArgumentError, match="train-0"):
            await worker.rollout(lease)
    assert not engine.requests


async def test_grouping_keys_of_the_pool_travel_as_metadata() -> None:
    lease = task_lease(0, 1)
    lease.task.item_json = json.dumps({"prompt": "12", "answer": "21", "metadata": {"level": 3, "other": 1}})
    document = experiment(type="simple").model_dump(by_alias=True, exclude_none=True, mode="json")
    document["spec"]["trajectoryPool"]["keyList"] = ["level", "task_id"]
    keyed = type(experiment()).model_validate_json(json.dumps(document))
    async with policy_over(says("21")) as policy:
        (result,) = await SingleTurnWorker(
            policy, SCRATCH, exact_match, UserThreads(THREADS, activity()), keyed
        ).rollout(lease)
    assert dict(result.trajectories[0].metadata) == {"task_id": "train-0", "level": "3"}


@pytest.mark.guide("Q8")
async def test_math_goes_through_the_chat_template_and_grades_the_last_number() -> None:
    end = CHAT.encode("<|im_end|>")[0]
    engine = says("it is 21", codec=CHAT, end=end)
    async with policy_over(engine) as policy:
        worker = SingleTurnWorker(
            policy, CHAT, math_answer, UserThreads(THREADS, activity()), experiment(type="single_turn_math", chat=True)
        )
        (result,) = await worker.rollout(task_lease(0, 1, prompt="12+9", answer="21"))
    assert list(engine.requests[0].prompt_token_ids) == CHAT.encode(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n12+9<|im_end|>\n<|im_start|>assistant\n"
    )
    assert result.trajectories[0].reward == 1.0


@pytest.mark.guide("Q8")
async def test_mock_needs_no_engine_and_is_decided_by_the_sample() -> None:
    async with policy_over(FakeEngine()) as policy:
        worker = MockWorker(policy, SCRATCH, experiment(type="mock"))
        first, second = await worker.rollout(task_lease(0, 3)), await worker.rollout(task_lease(0, 3))
    assert list(first) == list(second)
    for result in first:
        (trajectory,) = result.trajectories
        assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs)
        assert trajectory.spans[0].policy_version == 0


class Scripted:
    """An environment that ends as it is told."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        return self._outcome


async def run_agent(policy: Policy, environment: Any, lease: TaskLease, codec: TextCodec = SCRATCH) -> SampleResult:
    gateway = Gateway(policy, codec, model="default", max_context_tokens=256, timeout_seconds=30)
    await gateway.listen("127.0.0.1", 0)
    try:
        threads = UserThreads(THREADS, activity())
        worker = AgentWorker(gateway, environment, threads, experiment(type="agent", environment="a:b"))
        (result,) = await worker.rollout(lease)
    finally:
        await gateway.close()
    return result


@pytest.mark.guide("G17", "G18")
async def test_agent_plays_a_game_of_several_turns_in_one_trajectory() -> None:
    engine = says("4", "9", "7")
    async with policy_over(engine) as policy:
        result = await run_agent(policy, number_guess(), task_lease(0, 1, prompt="guess", answer="7"))
    assert result.verdict == VERDICT_OK
    (trajectory,) = result.trajectories
    assert trajectory.reward == pytest.approx(1 / 3)
    assert trajectory.reward_components["guesses"] == 3
    assert SCRATCH.decode([trajectory.token_ids]) == ["guess4higher9lower7"]
    masks = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    assert [token for token, mask in masks if mask] == [
        *SCRATCH.encode("4"),
        EOS,
        *SCRATCH.encode("9"),
        EOS,
        *SCRATCH.encode("7"),
        EOS,
    ]


class Climb:
    """A game of three messages, after which the reward so far is 0.5, 0.25 and 1."""

    async def reset(self, task: Task) -> Turn:
        self._rewards = iter([0.5, 0.25, 1.0])
        return Turn([{"role": "user", "content": "go"}])

    async def step(self, reply: str) -> Turn:
        reward = next(self._rewards)
        return Turn([{"role": "user", "content": "on"}], reward, is_over=reward == 1)

    async def close(self) -> None:
        """Nothing to free."""


async def test_each_message_of_a_game_has_the_part_of_the_reward_that_it_added() -> None:
    async with policy_over(says("1")) as policy:
        result = await run_agent(policy, ChatLoop(Climb, max_turns=5), task_lease(0, 1, prompt="x", answer="7"))
    (trajectory,) = result.trajectories
    rewards = decode_tensor("", trajectory.columns["token_rewards"])
    assert trajectory.reward == 1.0
    assert rewards[rewards != 0].tolist() == [0.5, -0.25, 0.75]
    assert [span.end - 1 for span in trajectory.completions] == rewards.nonzero()[0].tolist()


async def test_rewards_of_turns_that_were_not_served_are_refused() -> None:
    async with policy_over(FakeEngine()) as policy:
        with pytest.raises(InvalidArgumentError, match=r"turn_rewards: 2; must be one for each .*, 0"):
            await run_agent(policy, Scripted(Outcome("ok", 1.0, turn_rewards=[0.5, 0.5])), task_lease(0, 1))


async def test_game_beyond_its_turns_is_truncated() -> None:
    async with policy_over(says("1")) as policy:
        result = await run_agent(policy, number_guess(), task_lease(0, 1, prompt="guess", answer="7"))
    assert result.verdict == VERDICT_TRUNCATED
    assert result.trajectories[0].reward == 0.0


async def test_game_that_fills_the_context_is_truncated() -> None:
    async with policy_over(says("1")) as policy:
        result = await run_agent(policy, number_guess(), task_lease(0, 1, prompt="g" * 250, answer="7"))
    assert result.verdict == VERDICT_TRUNCATED
    assert sum(result.trajectories[0].loss_mask) == 2


async def test_prompt_that_never_fitted_is_no_measurement() -> None:
    async with policy_over(says("1")) as policy:
        result = await run_agent(policy, number_guess(), task_lease(0, 1, prompt="g" * 300, answer="7"))
    assert result.verdict == VERDICT_ENV_ERROR


async def test_an_environment_that_returns_no_outcome_is_told_what_to_return() -> None:
    async with policy_over(FakeEngine()) as policy:
        with pytest.raises(NexrlError, match="the environment returned NoneType; it must return an Outcome"):
            await run_agent(policy, Scripted(cast(Outcome, None)), task_lease(0, 1))


class Blocking:
    """Asks the policy twice with OpenAI's synchronous client."""

    def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            for _ in range(2):
                answer = client.chat.completions.create(model=endpoint.model, messages=messages)
                reply = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [reply, {"role": "user", "content": "and"}]
        return Outcome("ok", 1.0)


class BlockingCoroutine(Blocking):
    """The same in a coroutine, which must not block."""

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:  # type: ignore[override]
        return super().run(task, endpoint)


@pytest.mark.parametrize("environment", [Blocking(), BlockingCoroutine()])
@pytest.mark.guide("G18")
async def test_an_environment_may_use_a_synchronous_client(environment: Any) -> None:
    async with policy_over(says("4", "7")) as policy:
        result = await run_agent(policy, environment, task_lease(0, 1))
    assert result.verdict == VERDICT_OK
    (trajectory,) = result.trajectories
    assert sum(trajectory.loss_mask) == 4  # two replies with their ends


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome("env_error", error="tool down"), VERDICT_ENV_ERROR),
        (Outcome("reward_error", error="no grade"), VERDICT_REWARD_ERROR),
        (Outcome("timeout", error="slow"), VERDICT_TIMEOUT),
        (Outcome("ok", 1.0), VERDICT_ENV_ERROR),  # without a single completion there is nothing to train
    ],
    ids=lambda value: value.status if isinstance(value, Outcome) else "",
)
async def test_outcome_without_a_measurement_has_no_trajectory(outcome: Outcome, verdict: Verdict.ValueType) -> None:
    async with policy_over(FakeEngine()) as policy:
        result = await run_agent(policy, Scripted(outcome), task_lease(0, 1))
    assert result.verdict == verdict
    assert not result.trajectories
    assert result.error
