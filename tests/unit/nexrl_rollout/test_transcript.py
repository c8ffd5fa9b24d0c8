"""Transcript: arrays of one length, spans that cover exactly what was generated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvalidArgumentError
from nexrl.tensor_proto import decode_tensor
from nexrl.transcript import Transcript
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import Draw
from tests.support.rollout import completion

TOKENS = st.lists(st.integers(0, 50), max_size=6)
COMPLETIONS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=8)


@given(st.lists(st.tuples(TOKENS, COMPLETIONS), max_size=5))
def test_spans_cover_exactly_the_generated_tokens_with_their_versions(
    turns: list[tuple[list[int], list[tuple[int, int]]]],
) -> None:
    transcript = Transcript()
    expected: list[tuple[int, float, int | None]] = []
    for context, generated in turns:
        transcript.add_context(context)
        transcript.add_completion(completion([t for t, _ in generated], versions=[v for _, v in generated]))
        expected += [(token, 0.0, None) for token in context]
        expected += [(token, -(token + 1) / 64, version) for token, version in generated]
    trajectory = transcript.trajectory(0.5)
    versions: list[int | None] = [None] * len(expected)
    for span in trajectory.spans:
        assert span.start < span.end
        versions[span.start : span.end] = [span.policy_version] * (span.end - span.start)
    assert list(zip(trajectory.token_ids, trajectory.logprobs, versions, strict=True)) == expected
    assert list(trajectory.loss_mask) == [version is not None for version in versions]


def test_completion_whose_arrays_differ_in_length_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="1 tokens, 2 log-probabilities"):
        Transcript([1]).add_completion(GeneratedCompletion(token_ids=[1], logprobs=[-1, -1], policy_versions=[0]))


def test_each_completion_is_recorded_with_how_it_was_drawn() -> None:
    transcript = Transcript([1, 2])
    first = completion([5, 6, 7], versions=[0, 0, 1])
    first.draw.CopyFrom(Draw(seed=9, temperature=0.5, max_new_tokens=4))
    transcript.add_completion(first)
    transcript.add_context([3])
    transcript.add_completion(completion([8]))  # of an engine that does not tell
    first_span, second_span = transcript.trajectory(0.5).completions
    assert (first_span.start, first_span.end, first_span.draw) == (2, 5, first.draw)
    assert (second_span.start, second_span.end, second_span.HasField("draw")) == (6, 7, False)


def test_trajectory_is_a_copy() -> None:
    transcript = Transcript([1])
    before = transcript.trajectory(1.0, metadata={"task_id": "a"})
    transcript.add_context([2])
    assert list(before.token_ids) == [1]
    assert dict(before.metadata) == {"task_id": "a"}


def test_rewards_of_turns_lie_on_the_last_token_of_each_completion() -> None:
    transcript = Transcript([1, 2])
    transcript.add_completion(completion([5, 6]))
    transcript.add_context([3])
    transcript.add_completion(completion([8]))
    rewarded = transcript.trajectory(1.0, turn_rewards=[0.25, 0.75])
    assert decode_tensor("", rewarded.columns["token_rewards"]).tolist() == [0, 0, 0, 0.25, 0, 0.75]
    assert not transcript.trajectory(1.0).columns
    with pytest.raises(InvalidArgumentError, match="turn_rewards: 1; must be one for each completion, 2"):
        transcript.trajectory(1.0, turn_rewards=[1.0])
