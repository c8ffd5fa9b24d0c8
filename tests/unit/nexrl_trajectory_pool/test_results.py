"""Every kind of bad result is refused at the edge, by the name of its field; the trainer never meets one."""

from collections.abc import Callable, Sequence

import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.v1 import trajectory_pb2 as pb
from nexrl_trajectory_pool import results as checked
from nexrl_trajectory_pool.ledger import ProducedSample
from nexrl_trajectory_pool.pool import group_key
from nexrl_trajectory_pool.results import MAX_SAMPLE_BYTES
from tests.support.pool import failed, scored, trajectory

LEASE = pb.SampleLease(sample_id="3.1", attempt=2)
Change = Callable[[pb.SampleResult], object]
FIRST = "results[0].trajectories[0]"


def produced_samples(
    results: Sequence[pb.SampleResult], key_list: Sequence[str] | None, vocabulary_size: int | None = None
) -> list[ProducedSample]:
    payloads = [result.SerializeToString() for result in results]
    return checked.produced_samples(payloads, key_list, vocabulary_size)


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


def test_a_token_that_the_model_has_not_is_refused() -> None:
    results = [changed(lambda r: r.trajectories[0].token_ids.__setitem__(0, 11))]
    assert produced_samples(results, ["task_id"], vocabulary_size=12)
    with pytest.raises(InvalidArgumentError, match=r"token_ids: 11; the model has 11 tokens"):
        produced_samples(results, ["task_id"], vocabulary_size=11)


@pytest.mark.parametrize(
    "payload", [b"\x0a\x05abc", b"\x22\x04\x0a\x02\x80\x80"], ids=["cut short", "tokens cut short"]
)
def test_bytes_that_are_no_result_are_refused_by_their_place(payload: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"results\[1\]: no SampleResult"):
        checked.produced_samples([scored(LEASE).SerializeToString(), payload], [])


def test_all_that_is_wrong_is_told_at_once_and_nothing_is_produced() -> None:
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
    assert (sample.sample_id, sample.attempt, sample.failure, sample.leaf) == ("3.1", 2, None, "3")
    assert sample.oldest_version == 7
    assert pb.SampleResult.FromString(sample.payload) == result


@pytest.mark.parametrize("verdict", [pb.VERDICT_ENV_ERROR, pb.VERDICT_REWARD_ERROR, pb.VERDICT_TIMEOUT])
def test_a_failure_is_a_verdict_without_a_payload(verdict: "pb.Verdict.ValueType") -> None:
    (sample,) = produced_samples([failed(LEASE, verdict)], ["task_id", "domain"])
    assert sample.failure == pb.Verdict.Name(verdict).removeprefix("VERDICT_").lower()
    assert (sample.payload, sample.leaf) == (b"", None)


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
def test_a_leaf_is_named_by_the_key_list(keys: list[str], name: str) -> None:
    assert group_key(keys, "3.1", {"domain": "sums", "turn": "1", "task_id": "of the data"}) == name


def test_values_with_a_slash_do_not_make_two_leaves_one() -> None:
    first, second = {"a": "1/b=2", "b": "3"}, {"a": "1", "b": "2/b=3"}
    assert group_key(["a", "b"], "0.0", first) != group_key(["a", "b"], "0.0", second)
