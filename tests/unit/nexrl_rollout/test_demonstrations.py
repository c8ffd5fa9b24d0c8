"""rollout.type demonstrations: what is trained of an answer, and that only validation asks an engine."""

import json
from typing import Any

import pytest

from nexrl.activity import ActivityTracker
from nexrl.errors import InvalidArgumentError
from nexrl.policy import Policy
from nexrl.rewards import exact_match
from nexrl.rollout_worker import NotAttemptedError
from nexrl.rpc.client import connect
from nexrl.text import TextCodec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1.activity_service_pb2 import Module
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION, VERDICT_OK, VERDICT_TRUNCATED
from nexrl_rollout.demonstrations import DemonstrationWorker
from nexrl_rollout.mock import MockWorker
from nexrl_rollout.user_threads import ThreadLimits, UserThreads
from tests.support.rollout import FakeEngine, experiment, policy_over, task_lease
from tests.support.tokenizers import chat_tokenizer

SCRATCH = TextCodec(build_tokenizer(experiment().spec.model))
CHAT = TextCodec(chat_tokenizer(), chat=True, system_prompt="be brief")
EOS = 2


@pytest.mark.guide("Q8")
async def test_an_answer_is_trained_as_a_completion_that_the_policy_ended() -> None:
    engine = FakeEngine()
    async with policy_over(engine, committed_version=7) as policy:
        (result,) = await demonstrations(policy).rollout(task_lease(0, 1, prompt="12", answer="21"))
    assert (result.verdict, engine.requests) == (VERDICT_OK, [])
    (trajectory,) = result.trajectories
    prompt_ids, answer_ids = SCRATCH.encode_prompt("12"), [*SCRATCH.encode("21"), EOS]
    assert list(trajectory.token_ids) == prompt_ids + answer_ids
    assert list(trajectory.loss_mask) == [False] * len(prompt_ids) + [True] * len(answer_ids)
    assert [(span.start, span.end, span.policy_version) for span in trajectory.spans] == [(3, 6, 7)]
    assert not trajectory.completions[0].HasField("draw")
    assert (trajectory.reward, trajectory.response, trajectory.finish_reason) == (1.0, "21", "stop")


async def test_a_demonstration_follows_the_chat_template_and_ends_the_turn() -> None:
    async with policy_over(FakeEngine()) as policy:
        worker = demonstrations(policy, CHAT, chat=True)
        (result,) = await worker.rollout(task_lease(0, 1, prompt="12+9", answer="21"))
    (trajectory,) = result.trajectories
    conversation = "<|im_start|>user\n12+9<|im_end|>\n<|im_start|>assistant\n21<|im_end|>"
    assert list(trajectory.token_ids) == CHAT.encode("<|im_start|>system\nbe brief<|im_end|>\n" + conversation)


@pytest.mark.parametrize(
    ("limits", "trained"), [({"maxNewTokens": 2}, "21"), ({"maxNewTokens": 3}, "212"), ({}, "21212")]
)
async def test_a_demonstration_that_is_too_long_is_cut_as_a_completion_is(limits: dict[str, int], trained: str) -> None:
    async with policy_over(FakeEngine()) as policy:
        worker = demonstrations(policy, SCRATCH, **limits)
        lease = task_lease(0, 1, prompt="1" * 250, answer="21212121")  # of 256 positions, 251 are the prompt's
        (result,) = await worker.rollout(lease)
    assert result.verdict == VERDICT_TRUNCATED
    (trajectory,) = result.trajectories
    assert (trajectory.response, trajectory.finish_reason) == (trained, "length")
    assert list(trajectory.token_ids[251:]) == SCRATCH.encode(trained)


async def test_a_validation_samples_from_the_policy() -> None:
    engine = FakeEngine()
    lease = task_lease(0, 1, prompt="12", answer="21", purpose=PURPOSE_VALIDATION)
    async with policy_over(engine) as policy:
        (result,) = await demonstrations(policy).rollout(lease)
    assert len(engine.requests) == 1
    assert (result.trajectories[0].response, result.trajectories[0].logprobs[-1] < 0) == ("21", True)


async def test_the_text_of_a_demonstration_is_what_is_trained_of_it() -> None:
    lease = task_lease(0, 1, prompt="12", answer="2.1")
    lease.stop.append(".")  # which ends completions of the policy
    async with policy_over(FakeEngine()) as policy:
        (result,) = await demonstrations(policy).rollout(lease)
    assert result.trajectories[0].response == "2.1"


@pytest.mark.parametrize("spelled", ["7", "7<eos>"])
async def test_a_demonstration_has_one_end_token(spelled: str) -> None:
    assert SCRATCH.encode_answer(spelled) == [*SCRATCH.encode("7"), EOS]


@pytest.mark.parametrize(
    ("answer", "trained"), [(7, "7"), (0.5, "0.5"), (None, None), (True, None), ([7], None), ({"x": 1}, None)]
)
async def test_a_demonstration_is_text_or_a_number(answer: object, trained: str | None) -> None:
    lease = task_lease(0, 1)
    lease.task.item_json = json.dumps({"prompt": "12", "answer": answer})
    async with policy_over(FakeEngine()) as policy:
        if trained is not None:
            (result,) = await demonstrations(policy).rollout(lease)
            assert result.trajectories[0].response == trained
            return
        with pytest.raises(
            InvalidArgumentError, match=r"task train-0: answer: .*; a demonstration is text or a number"
        ):
            await demonstrations(policy).rollout(lease)


async def test_a_prompt_without_room_for_an_answer_is_refused_by_its_name() -> None:
    async with policy_over(FakeEngine()) as policy:
        with pytest.raises(InvalidArgumentError, match="task train-1: prompt: 257 tokens; at most 255"):
            await demonstrations(policy).rollout(task_lease(1, 1, prompt="1" * 256))


@pytest.mark.guide("Q8")
async def test_no_attempt_is_counted_while_weight_sync_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexrl.policy.STATE_SECONDS", 0.1)
    async with connect("127.0.0.1:1") as channel:
        for worker in (demonstrations(Policy(channel)), MockWorker(Policy(channel), SCRATCH, experiment(type="mock"))):
            with pytest.raises(NotAttemptedError, match="weight sync: "):
                await worker.rollout(task_lease(0, 1))


async def test_nothing_is_attempted_while_no_version_is_committed() -> None:
    async with policy_over(FakeEngine(), committed_version=-1) as policy:
        with pytest.raises(NotAttemptedError):
            await demonstrations(policy).rollout(task_lease(0, 1))


def demonstrations(policy: Policy, codec: TextCodec = SCRATCH, **rollout: Any) -> DemonstrationWorker:
    threads = UserThreads(ThreadLimits(max_abandoned=8, max_blocked_seconds=30), ActivityTracker(Module(), None))
    supervised = experiment(group_size=1, loss="cross_entropy", type="demonstrations", **rollout)
    return DemonstrationWorker(policy, codec, exact_match, threads, supervised)
