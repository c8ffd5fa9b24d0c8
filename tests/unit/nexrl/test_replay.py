"""`nexrl traj replay`: what is asked again, and what counts as different."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from nexrl.errors import FailedPreconditionError
from nexrl.local.replay import Drawn, Part, compare, describe, parts_of, weights_at_hand
from nexrl.spec import dump_resolved
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import CompletionSpan, Draw, PolicySpan, Trajectory
from tests.support.services import small_experiment

DRAW = Draw(seed=9, temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=6, stop_token_ids=[4])


def trajectory(*completions: CompletionSpan, spans: Sequence[tuple[int, int, int]] = ((2, 5, 0),)) -> Trajectory:
    """Two tokens of context, three that were generated, one of context, two that were generated."""
    return Trajectory(
        token_ids=[10, 11, 12, 13, 14, 15, 16, 17],
        logprobs=[0, 0, -0.5, -1.0, -1.5, 0, -2.0, -2.5],
        spans=[PolicySpan(start=start, end=end, policy_version=version) for start, end, version in spans],
        completions=completions,
    )


def drawn_at(start: int, end: int) -> CompletionSpan:
    return CompletionSpan(start=start, end=end, draw=DRAW)


def part(*spans: tuple[int, int, int]) -> Part:
    return next(parts_of(trajectory(drawn_at(2, 5), spans=spans or ((2, 5, 0),))))


def answer(token_ids: Sequence[int], logprobs: Sequence[float], version: int = 0) -> GeneratedCompletion:
    return GeneratedCompletion(
        token_ids=token_ids, logprobs=logprobs, policy_versions=[version] * len(token_ids), finish_reason="stop"
    )


def shown(now: GeneratedCompletion) -> str:
    difference = compare(part(), now)
    return "\n".join(describe(part(), Drawn(now, "an engine"), difference, 1e-3, str))


def test_a_completion_is_asked_for_as_it_was_drawn() -> None:
    request = part().request()
    assert list(request.prompt_token_ids) == [10, 11]
    assert (request.n, list(request.seeds), request.drawn_tokens, request.max_new_tokens) == (1, [9], 0, 6)
    assert (request.temperature, request.top_p, request.top_k, list(request.stop_token_ids)) == (0.5, 0.9, 3, [4])


def test_each_turn_is_asked_for_with_the_context_that_it_had() -> None:
    turns = trajectory(drawn_at(2, 5), drawn_at(6, 8), spans=[(2, 5, 0), (6, 8, 1)])
    requests = [(part.policy_version, list(part.request().prompt_token_ids)) for part in parts_of(turns)]
    assert requests == [(0, [10, 11]), (1, [10, 11, 12, 13, 14, 15])]


def test_a_completion_of_two_versions_is_asked_for_in_parts_that_share_its_random_numbers() -> None:
    first, second = parts_of(trajectory(drawn_at(2, 5), spans=[(2, 4, 0), (4, 5, 1)]))
    assert (first.policy_version, list(first.token_ids), second.policy_version, list(second.token_ids)) == (
        *(0, [12, 13], 1, [14]),
    )
    # The first part ends where the next version began. The second may be as long as the completion was allowed to be.
    assert (first.request().drawn_tokens, first.request().max_new_tokens) == (0, 2)
    assert (second.request().drawn_tokens, second.request().max_new_tokens) == (2, 4)
    assert list(second.request().prompt_token_ids) == [10, 11, 12, 13]


def test_a_completion_without_a_seed_is_left_out() -> None:
    assert list(parts_of(trajectory(CompletionSpan(start=2, end=5)))) == []
    assert (
        list(parts_of(trajectory(CompletionSpan(start=2, end=5, draw=Draw(temperature=0.5, max_new_tokens=6))))) == []
    )
    assert list(parts_of(trajectory())) == []


@pytest.mark.parametrize("span", [(0, 3), (2, 9), (5, 5), (1, 8)])
def test_a_record_that_contradicts_itself_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(FailedPreconditionError, match="does not fit"):
        list(parts_of(trajectory(drawn_at(*span))))


@pytest.mark.parametrize(
    ("now", "first_token", "logprob"),
    [
        (answer([12, 13, 14], [-0.5, -1.0, -1.5]), None, 0.0),
        (answer([12, 13, 14], [-0.5, -1.25, -1.5]), None, 0.25),
        (answer([12, 99, 14], [-0.625, -3.0, -1.5]), 1, 0.125),  # what follows had another context
        (answer([12, 13], [-0.5, -1.0]), 2, 0.0),
        (answer([12, 13, 14, 15], [-0.5, -1.0, -1.5, -1.0]), 3, 0.0),
        (answer([], []), 0, 0.0),
    ],
)
def test_tokens_are_compared_up_to_the_first_that_is_another(
    now: GeneratedCompletion, first_token: int | None, logprob: float
) -> None:
    difference = compare(part(), now)
    assert (difference.first_token, difference.logprob) == (first_token, logprob)
    assert difference.is_within(1e-3) == (first_token is None and logprob == 0)


def test_a_difference_is_shown_token_by_token() -> None:
    lines = shown(answer([12, 99], [-0.5, -3.0])).splitlines()
    assert "different from token 3 on" in lines[-4]
    assert lines[-3].split() == ["position", "recorded", "text", "logprob", "now", "text", "logprob"]
    assert lines[-2].split() == ["3", "13", "'[13]'", "-1.0000", "99", "'[99]'", "-3.0000"]
    assert lines[-1].split() == ["4", "14", "'[14]'", "-1.5000", "-", "-", "-"]


def test_what_is_equal_is_said_in_one_line() -> None:
    printed = shown(answer([12, 13, 14], [-0.5, -1.0, -1.5]))
    assert printed.splitlines()[-1] == "equal; largest difference of a log-probability 0 (tolerance 0.001)"
    assert "another policy version" not in printed


def test_the_difference_between_two_policies_is_called_that() -> None:
    assert "another policy version: differences are those of the policies" in shown(answer([12], [-0.5], version=7))


def test_weights_are_those_of_complete_checkpoints_and_those_of_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(dump_resolved(small_experiment()))
    for name in ("global_step_4", "global_step_10", "global_step_12.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    folder = tmp_path / "checkpoints"
    assert weights_at_hand(tmp_path) == {0: "initial", 4: f"{folder}/global_step_4", 10: f"{folder}/global_step_10"}
