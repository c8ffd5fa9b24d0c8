"""Sessions: what was served is extended by token ids, never made from text again."""

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl.policy import Sampling
from nexrl.tensor_proto import decode_tensor
from nexrl.text import TextCodec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1.trajectory_pb2 import Trajectory
from nexrl_rollout.session import Session, SessionPrompt
from tests.support.rollout import completion, experiment
from tests.support.tokenizers import chat_tokenizer

CODEC = TextCodec(chat_tokenizer())
END = CODEC.encode("<|im_end|>")[0]
A, B, AB = (CODEC.encode(text)[0] for text in ("a", "b", "ab"))

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def serve(session: Session, messages: Messages, token_ids: list[int], finish: str = "stop") -> SessionPrompt:
    """One turn, as the gateway serves it; the reply is appended to `messages`."""
    prompt = session.prompt(CODEC, messages)
    text = CODEC.decode([token_ids])[0]
    messages.append({"role": "assistant", "content": text})
    session.record(prompt, completion(token_ids, finish), messages, text=text)
    return prompt


def trajectories(session: Session) -> list[Trajectory]:
    return session.trajectories(1.0, {}, {"task_id": "t"})


def test_first_prompt_is_the_chat_template() -> None:
    prompt = Session(Sampling(4), count()).prompt(CODEC, [user("ab")])
    assert prompt.token_ids == CODEC.encode("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")


def test_next_prompt_keeps_the_served_tokens_though_their_text_would_be_tokenized_otherwise() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    first = serve(session, messages, [A, B, END])
    messages.append(user("y"))
    second = session.prompt(CODEC, messages)
    added = CODEC.encode("\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n")
    assert list(second.token_ids) == [*first.token_ids, A, B, END, *added]
    assert AB in CODEC.encode(CODEC.render(messages))


def test_cut_reply_is_closed_by_context_that_is_not_trained() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    serve(session, messages, [A, A], "length")
    messages.append(user("y"))
    serve(session, messages, [B, END])
    (trajectory,) = trajectories(session)
    generated = [i for i, is_generated in enumerate(trajectory.loss_mask) if is_generated]
    assert [trajectory.token_ids[i] for i in generated] == [A, A, B, END]
    assert trajectory.token_ids[generated[1] + 1] == END


def test_history_with_tokens_and_extra_keys_echoed_by_the_client_is_the_same_history() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    serve(session, messages, [A, END])
    messages[-1] |= {"prompt_token_ids": [7], "generation_token_ids": [7], "refusal": None, "tool_calls": None}
    messages.append(user("y"))
    assert session.prompt(CODEC, messages).continues is not None


def test_edited_history_begins_a_new_chain_and_is_marked() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    serve(session, messages, [A, END])
    edited: Messages = [user("x"), {"role": "assistant", "content": "something else"}, user("y")]
    prompt = serve(session, edited, [B, END])
    assert prompt.is_break
    assert prompt.continues is None
    first, second = trajectories(session)
    assert (first.metadata["chain"], second.metadata["chain"]) == ("0", "1")
    assert "break_reason" not in first.metadata
    assert second.metadata["break_reason"] == "messages[1].content: not what was served"
    assert first.metadata["breaks"] == second.metadata["breaks"] == "1"
    assert list(second.loss_mask).count(True) == 2


def test_examples_in_the_first_request_are_no_edit() -> None:
    session = Session(Sampling(4), count())
    prompt = serve(session, [user("x"), {"role": "assistant", "content": "example"}, user("y")], [A, END])
    assert not prompt.is_break


def test_second_continuation_of_one_turn_does_not_train_its_tokens_twice() -> None:
    session, opening = Session(Sampling(4), count()), [user("x")]
    serve(session, opening, [A, B, END])
    serve(session, [*opening, user("y")], [B, END])
    serve(session, [*opening, user("z")], [B, B, END])
    first, second = trajectories(session)
    assert sum(first.loss_mask) == 5
    assert sum(second.loss_mask) == 3
    assert list(second.token_ids[: len(opening)]) == list(first.token_ids[: len(opening)])


def test_tools_are_part_of_what_names_a_history() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    serve(session, messages, [A, END])
    assert session.prompt(CODEC, [*messages, user("y")], [{"type": "function"}]).continues is None


def test_model_without_roles_goes_on_after_its_own_end_of_sequence() -> None:
    codec = TextCodec(build_tokenizer(experiment().spec.model))
    session = Session(Sampling(4), count())
    first = session.prompt(codec, [user("12")])
    eos = 2
    messages = [user("12"), {"role": "assistant", "content": "3"}]
    session.record(first, completion([*codec.encode("3"), eos]), messages)
    second = session.prompt(codec, [*messages, user("4")])
    assert list(second.token_ids) == [*first.token_ids, *codec.encode("3"), eos, *codec.encode("4")]


REPLIES = st.tuples(st.lists(st.sampled_from([A, B, AB]), min_size=1, max_size=6), st.booleans())


@given(st.lists(REPLIES, min_size=1, max_size=5))
def test_any_conversation_is_one_contiguous_trajectory(replies: list[tuple[list[int], bool]]) -> None:
    session, messages = Session(Sampling(8), count()), [user("go")]
    served: list[int] = []
    for token_ids, is_finished in replies:
        completed = [*token_ids, END] if is_finished else token_ids
        prompt = serve(session, messages, completed, "stop" if is_finished else "length")
        assert list(prompt.token_ids[: len(served)]) == served
        served = [*prompt.token_ids, *completed]
        messages.append(user("more"))
    (trajectory,) = trajectories(session)
    assert list(trajectory.token_ids) == served
    expected = [token for token_ids, is_finished in replies for token in [*token_ids, *([END] if is_finished else [])]]
    assert [t for t, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask] == expected


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda of: st.dictionaries(st.text(), of))
TEXT = st.text(max_size=20)


def call_of(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@given(st.dictionaries(TEXT, JSON, max_size=3), TEXT, st.booleans(), st.booleans(), st.booleans())
def test_a_reply_that_a_library_rewrote_is_continued_with_the_tokens_that_were_generated(
    arguments: dict[str, Any], thought: str, is_stripped: bool, is_compact: bool, is_moved: bool
) -> None:
    session, opening = Session(Sampling(4), count()), [user("x")]
    content = f"<think>{thought}</think> ab \n"
    reply = {"role": "assistant", "content": content, "tool_calls": [call_of(json.dumps(arguments))]}
    first = session.prompt(CODEC, opening)
    session.record(first, completion([A, B, END]), [*opening, reply])

    separators = (",", ":") if is_compact else None
    echoed = reply | {"tool_calls": [call_of(json.dumps(arguments, ensure_ascii=False, separators=separators))]}
    if is_moved and thought:
        echoed |= {"content": " ab \n", "reasoning_content": thought}
    if is_stripped:
        echoed |= {"content": str(echoed["content"]).strip()}
    second = session.prompt(CODEC, [*opening, echoed, {"role": "tool", "content": "1", "tool_call_id": "call_1"}])
    assert list(second.token_ids[: len(first.token_ids) + 3]) == [*first.token_ids, A, B, END]
    assert not second.is_break


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"content": "<think>t</think>ba"}, "content"),
        ({"content": "ab"}, "reasoning_content"),
        ({"tool_calls": [call_of('{"a": 2}')]}, "tool_calls"),
        ({"tool_calls": []}, "tool_calls"),
        ({"tool_calls": [call_of('{"a": 1')]}, "tool_calls"),
    ],
)
def test_a_reply_that_says_something_else_is_a_break_that_names_the_field(edit: dict[str, Any], reason: str) -> None:
    session, opening = Session(Sampling(4), count()), [user("x")]
    reply = {"role": "assistant", "content": "<think>t</think>ab", "tool_calls": [call_of('{"a": 1}')]}
    session.record(session.prompt(CODEC, opening), completion([A, END]), [*opening, reply])
    prompt = session.prompt(CODEC, [*opening, reply | edit, user("y")])
    assert prompt.break_reason == f"messages[1].{reason}: not what was served"


def test_of_two_replies_that_differ_only_in_spaces_the_echoed_one_is_continued() -> None:
    session = Session(Sampling(4), count())
    for content, token in (("ab", A), (" ab", B)):
        served = [user("x"), {"role": "assistant", "content": content}]
        session.record(session.prompt(CODEC, [user("x")]), completion([token, END]), served)
    prompt = session.prompt(CODEC, [user("x"), {"role": "assistant", "content": "ab"}, user("y")])
    assert prompt.continues is not None
    assert list(prompt.continues.token_ids[-2:]) == [A, END]


def test_session_ids_cannot_be_guessed() -> None:
    ids = {Session(Sampling(4), count()).id for _ in range(100)}
    assert len(ids) == 100
    assert min(map(len, ids)) >= 43


def test_rewards_of_turns_go_to_the_chains_that_served_them() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    serve(session, messages, [A, END])
    serve(session, [user("other")], [B, END])
    serve(session, [*messages, user("y")], [B, END])
    rewards = [
        decode_tensor("", each.columns["token_rewards"])
        for each in session.trajectories(1.0, {}, {}, turn_rewards=[0.25, 0.5, 0.25])
    ]
    assert [each[each != 0].tolist() for each in rewards] == [[0.25, 0.25], [0.5]]
    with pytest.raises(InvalidArgumentError, match=r"turn_rewards: 2; must be one for each .*, 3"):
        session.trajectories(1.0, {}, {}, turn_rewards=[0.5, 0.5])


def test_a_reward_of_the_last_turn_alone_needs_no_column() -> None:
    session, messages = Session(Sampling(4), count()), [user("x")]
    serve(session, messages, [A, END])
    serve(session, [*messages, user("y")], [B, END])
    (trajectory,) = session.trajectories(1.0, {}, {}, turn_rewards=[0.0, 1.0])
    assert not trajectory.columns
