"""The pool refuses every kind of invalid sample result, and names its field."""

from collections.abc import Callable, Sequence

import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.v1 import trajectory_pb2 as pb
from nexrl_trajectory_pool import results as checked
from nexrl_trajectory_pool.ledger import ProducedSample
from nexrl_trajectory_pool.pool import group_key
from nexrl_trajectory_pool.results import MAX_SAMPLE_BYTES
from nexrl_trajectory_pool.sampling import SamplingParameters
from tests.support.pool import drawn_span, failed, scored, trajectory

LEASE = pb.SampleLease(sample_id="3.1", attempt=2)
Change = Callable[[pb.SampleResult], object]
FIRST = "results[0].trajectories[0]"


def produced_samples(
    results: Sequence[pb.SampleResult],
    key_list: Sequence[str] | None,
    vocabulary_size: int | None = None,
    sampling: SamplingParameters | None = None,
) -> list[ProducedSample]:
    payloads = [result.SerializeToString() for result in results]
    return checked.produced_samples(payloads, key_list, vocabulary_size, sampling)


def changed(change: Change) -> pb.SampleResult:
    result = scored(LEASE, trajectory())
    change(result)
    return result


def spans(*bounds: tuple[int, int, int]) -> Change:
    def change(result: pb.SampleResult) -> None:
        del result.trajectories[0].spans[:]
        for start, end, version in bounds:
            result.trajectories[0].spans.add(start=start, end=end, policy_version=version)

    return change


BAD: dict[str, tuple[Change, str]] = {
    "no id": (lambda r: setattr(r, "sample_id", "abc"), "results[0].sample_id"),
    "no verdict": (lambda r: setattr(r, "verdict", pb.VERDICT_UNSPECIFIED), "results[0].verdict"),
    "a lost worker": (lambda r: setattr(r, "verdict", pb.VERDICT_WORKER_LOST), "results[0].verdict"),
    "no trajectory": (lambda r: r.ClearField("trajectories"), "results[0].trajectories"),
    "a failure with a trajectory": (lambda r: setattr(r, "verdict", pb.VERDICT_ENV_ERROR), "results[0].trajectories"),
    "too large": (lambda r: setattr(r.trajectories[0], "prompt", "x" * MAX_SAMPLE_BYTES), "results[0]"),
    "no tokens": (lambda r: r.trajectories[0].ClearField("token_ids"), f"{FIRST}.token_ids"),
    "a negative token": (lambda r: r.trajectories[0].token_ids.__setitem__(0, -1), f"{FIRST}.token_ids"),
    "a short mask": (lambda r: r.trajectories[0].loss_mask.pop(), f"{FIRST}.loss_mask"),
    "a mask without context": (lambda r: r.trajectories[0].loss_mask.__setitem__(0, True), f"{FIRST}.loss_mask"),
    "long logprobs": (lambda r: r.trajectories[0].logprobs.append(0.0), f"{FIRST}.logprobs"),
    "an infinite logprob": (lambda r: r.trajectories[0].logprobs.__setitem__(2, -float("inf")), f"{FIRST}.logprobs"),
    "a logprob that is no number": (
        lambda r: r.trajectories[0].logprobs.__setitem__(2, float("nan")),
        f"{FIRST}.logprobs",
    ),
    "a logprob above 0": (lambda r: r.trajectories[0].logprobs.__setitem__(2, 0.01), f"{FIRST}.logprobs"),
    "a logprob of a token that cannot be drawn": (
        lambda r: r.trajectories[0].logprobs.__setitem__(2, -105.0),
        f"{FIRST}.logprobs",
    ),
    "a reward that is no number": (lambda r: setattr(r.trajectories[0], "reward", float("nan")), f"{FIRST}.reward"),
    "an infinite component": (
        lambda r: r.trajectories[0].reward_components.__setitem__("exact", float("inf")),
        f"{FIRST}.reward_components[exact]",
    ),
    "no spans": (spans(), f"{FIRST}.spans"),
    "a token of no version": (spans((3, 4, 0)), f"{FIRST}.spans"),
    "spans that overlap": (spans((2, 4, 0), (3, 4, 1)), f"{FIRST}.spans[1]"),
    "a span beyond the tokens": (spans((2, 5, 0)), f"{FIRST}.spans[0]"),
    "an empty span": (spans((2, 2, 0)), f"{FIRST}.spans[0]"),
    "a negative version": (spans((2, 4, -1)), f"{FIRST}.spans[0].policy_version"),
}


def test_one_bad_trajectory_of_a_sample_refuses_all_of_them() -> None:
    def add_another(result: pb.SampleResult) -> None:
        result.trajectories.add().CopyFrom(result.trajectories[0])
        result.trajectories[1].ClearField("token_ids")

    with pytest.raises(InvalidArgumentError, match=r"results\[0\].trajectories\[1\].token_ids"):
        produced_samples([changed(add_another)], ["task_id"])


@pytest.mark.guide("S3")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_result_is_refused_by_the_name_of_its_field(name: str) -> None:
    change, field = BAD[name]
    with pytest.raises(InvalidArgumentError) as refusal:
        produced_samples([changed(change)], ["task_id"])
    assert field in [violation.field for violation in refusal.value.violations]


def drawn(**parameters: float) -> Change:
    def change(result: pb.SampleResult) -> None:
        for name, value in parameters.items():
            setattr(result.trajectories[0].completions[0].draw, name, value)

    return change


def completions(*spans: pb.CompletionSpan) -> Change:
    def change(result: pb.SampleResult) -> None:
        del result.trajectories[0].completions[:]
        result.trajectories[0].completions.extend(spans)

    return change


def no_loss(result: pb.SampleResult) -> None:
    result.trajectories[0].loss_mask[:] = [False] * 4


UNTRAINABLE: dict[str, tuple[Change, str]] = {
    "another temperature": (drawn(temperature=0.7), f"{FIRST}.completions[0].draw.temperature"),
    "a nucleus": (drawn(top_p=0.9), f"{FIRST}.completions[0].draw.top_p"),
    "the most likely tokens": (drawn(top_k=20), f"{FIRST}.completions[0].draw.top_k"),
    "another temperature for one token": (
        completions(drawn_span(2, 3), pb.CompletionSpan(start=3, end=4, draw=pb.Draw(temperature=0.7))),
        f"{FIRST}.completions[1].draw.temperature",
    ),
    "a mask that trains nothing": (no_loss, f"{FIRST}.loss_mask"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_other_sampling_parameters_or_an_empty_loss_mask_are_refused_in_training_only(name: str) -> None:
    change, field = UNTRAINABLE[name]
    with pytest.raises(InvalidArgumentError) as refusal:
        produced_samples([changed(change)], ["task_id"], sampling=SamplingParameters())
    assert [violation.field for violation in refusal.value.violations] == [field]
    assert produced_samples([changed(change)], None)


def test_the_refusal_of_a_temperature_says_what_the_experiment_asks_for() -> None:
    with pytest.raises(InvalidArgumentError, match=r"temperature: 0\.7; the experiment samples with 1"):
        produced_samples([changed(drawn(temperature=0.7))], ["task_id"], sampling=SamplingParameters())


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        ({"top_p": 0.0}, SamplingParameters()),  # 0 is unset, which means all tokens
        ({"temperature": 0.6}, SamplingParameters(temperature=0.6)),
        ({"temperature": 0.6000000238418579}, SamplingParameters(temperature=0.6)),  # as float32
        ({"top_p": 0.9, "top_k": 20}, SamplingParameters(top_p=0.9, top_k=20)),
    ],
)
def test_the_sampling_parameters_of_the_experiment_are_accepted(
    parameters: dict[str, float], sampling: SamplingParameters
) -> None:
    assert produced_samples([changed(drawn(**parameters))], ["task_id"], sampling=sampling)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (drawn_span(2, 3),),
        (pb.CompletionSpan(start=2, end=4),),
        (pb.CompletionSpan(start=0, end=2, draw=pb.Draw(temperature=0.7)), drawn_span(2, 4)),
    ],
    ids=["no completion", "one token without", "no draw", "another draw of untrained tokens"],
)
def test_tokens_without_a_record_of_their_draw_are_accepted(spans: Sequence[pb.CompletionSpan]) -> None:
    assert produced_samples([changed(completions(*spans))], ["task_id"], sampling=SamplingParameters())


@pytest.mark.parametrize("logprob", [1e-4, -103.0])
def test_rounding_and_unlikely_tokens_are_accepted(logprob: float) -> None:
    assert produced_samples([changed(lambda r: r.trajectories[0].logprobs.__setitem__(2, logprob))], ["task_id"])


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    results = [changed(lambda r: r.trajectories[0].token_ids.__setitem__(0, 11))]
    assert produced_samples(results, ["task_id"], vocabulary_size=12)
    with pytest.raises(InvalidArgumentError, match=r"token_ids: 11; the model has 11 tokens"):
        produced_samples(results, ["task_id"], vocabulary_size=11)


def test_a_trajectory_for_which_the_model_has_too_few_positions_is_refused() -> None:
    payload = scored(LEASE, trajectory()).SerializeToString()
    assert checked.produced_samples([payload], ["task_id"], max_tokens=4)
    with pytest.raises(InvalidArgumentError, match=r"trajectories\[0\]\.token_ids: 4 tokens; at most 3 \(inference\."):
        checked.produced_samples([payload], ["task_id"], max_tokens=3)


@pytest.mark.parametrize(
    "payload", [b"\x0a\x05abc", b"\x22\x04\x0a\x02\x80\x80"], ids=["cut short", "tokens cut short"]
)
def test_the_refusal_of_invalid_bytes_names_their_index(payload: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"results\[1\]: not a SampleResult"):
        checked.produced_samples([scored(LEASE).SerializeToString(), payload], [])


def test_one_refusal_names_all_wrong_results() -> None:
    results = [changed(BAD["no id"][0]), scored(LEASE), changed(BAD["no spans"][0])]
    with pytest.raises(InvalidArgumentError) as refusal:
        produced_samples(results, [])
    assert [violation.field for violation in refusal.value.violations] == [
        "results[0].sample_id",
        "results[2].trajectories[0].spans",
    ]


def test_a_good_result_is_kept_whole_with_the_version_of_its_oldest_token() -> None:
    result = changed(spans((2, 3, 7), (3, 4, 9)))
    (sample,) = produced_samples([result], ["task_id"])
    assert (sample.sample_id, sample.attempt, sample.failure, sample.group) == ("3.1", 2, None, "3")
    assert (sample.oldest_version, sample.newest_version) == (7, 9)
    assert pb.SampleResult.FromString(sample.payload) == result


@pytest.mark.parametrize("verdict", [pb.VERDICT_ENV_ERROR, pb.VERDICT_REWARD_ERROR, pb.VERDICT_TIMEOUT])
def test_a_failure_is_a_verdict_without_a_payload(verdict: "pb.Verdict.ValueType") -> None:
    (sample,) = produced_samples([failed(LEASE, verdict)], ["task_id", "domain"])
    assert sample.failure == pb.Verdict.Name(verdict).removeprefix("VERDICT_").lower()
    assert (sample.payload, sample.group) == (b"", None)


@pytest.mark.guide("H2", "H15", "H16", "H17")
@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ([], "3.1"),
        (["task_id"], "3"),
        (["domain"], "domain=sums"),
        (["task_id", "turn"], "3/turn=1"),
        (["turn", "domain"], "turn=1/domain=sums"),
    ],
)
def test_a_group_is_named_by_the_key_list(keys: list[str], name: str) -> None:
    assert group_key(keys, "3.1", {"domain": "sums", "turn": "1", "task_id": "of the data"}) == name


def test_values_with_a_slash_do_not_make_two_groups_one() -> None:
    first, second = {"a": "1/b=2", "b": "3"}, {"a": "1", "b": "2/b=3"}
    assert group_key(["a", "b"], "0.0", first) != group_key(["a", "b"], "0.0", second)


@pytest.mark.parametrize(
    ("rewards", "stored"), [([1.0], "1.0"), ([0.1 + 0.2], "0.30000000000000004"), ([-0.0], "0.0"), ([0.0, 2.0], "2.0")]
)
def test_the_reward_of_a_sample_is_that_of_its_last_trajectory_and_equal_rewards_have_equal_texts(
    rewards: list[float], stored: str
) -> None:
    (sample,) = produced_samples([scored(LEASE, *map(trajectory, rewards))], ["task_id"])
    assert sample.reward == stored
