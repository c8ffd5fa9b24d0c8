"""Output of `nexrl traj list` and `nexrl traj get` for a run whose batches are on disk and whose ledger is gone."""

import json
from pathlib import Path

import pytest

from nexrl.errors import InvalidArgumentError, NotFoundError
from nexrl.local.trajectories import Filter, Sample, Samples, describe, print_list, print_sample, table
from nexrl.spec import dump_resolved
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from tests.support.services import small_experiment

TRAJECTORY = pb.Trajectory(
    token_ids=[1, 7, 8],
    loss_mask=[False, True, True],
    logprobs=[0, -0.5, -0.25],
    spans=[pb.PolicySpan(start=1, end=2, policy_version=3), pb.PolicySpan(start=2, end=3, policy_version=4)],
    completions=[pb.CompletionSpan(start=1, end=3, draw=pb.Draw(seed=2**62 + 1, temperature=0.5, max_new_tokens=4))],
    prompt="1=",
    response="34",
    reward=0.25,
    reward_components={"exact": 1.0},
    finish_reason="stop",
)
NO_BATCH = pool_pb.SampleRecord(sample_id="9.0", state=pool_pb.SAMPLE_STATE_DROPPED, drop_reason="stale", attempt=2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two batches of two samples, without a ledger."""
    (tmp_path / "experiment.yaml").write_text(dump_resolved(small_experiment()))
    (tmp_path / "trajectories").mkdir()
    for number in (0, 1):
        samples = [
            pb.SampleResult(sample_id=f"{number}.{k}", attempt=1, verdict=pb.VERDICT_OK, trajectories=[TRAJECTORY])
            for k in (0, 1)
        ]
        batch = pool_pb.BatchLease(batch_id=number, groups=[pb.Group(group_id=str(number), samples=samples)])
        (tmp_path / "trajectories" / f"batch_{number:06d}.pb").write_bytes(batch.SerializeToString())
    return tmp_path


def record(state: "pool_pb.SampleState.ValueType", batch: int = 0) -> pool_pb.SampleRecord:
    return pool_pb.SampleRecord(sample_id="0.1", state=state, batch_id=batch)


async def test_the_newest_samples_are_listed_unless_a_batch_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await print_list(run, Filter(limit=1), as_json=False)
    printed = capsys.readouterr()
    head, row = printed.out.splitlines()
    assert head.split() == [
        *("sample", "state", "attempt", "verdict", "batch", "step", "reward", "tokens", "oldest", "version", "breaks")
    ]
    assert row.split() == ["1.1", "-", "1", "OK", "1", "-", "0.250", "2", "3", "-"]
    assert "no ledger, so only samples in batches" in printed.err
    await print_list(run, Filter(batch=0), as_json=False)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["0.0", "0.1"]


async def test_a_trajectory_is_one_json_object(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await print_list(run, Filter(batch=0), as_json=True)
    printed = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (printed["batch"], printed["group"], printed["sample"], printed["verdict"]) == (0, "0", "0.0", "OK")
    assert (printed["token_ids"], printed["loss_mask"], printed["logprobs"]) == ([1, 7, 8], [0, 1, 1], [0, -0.5, -0.25])
    assert (printed["reward"], printed["reward_components"]) == (0.25, {"exact": 1.0})
    assert printed["policy_versions"] == [[1, 2, 3], [2, 3, 4]]
    # A string, because a double cannot represent all digits of this number.
    assert printed["completions"][0]["draw"]["seed"] == str(2**62 + 1)


async def test_a_sample_is_one_json_object_with_all_its_trajectories(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await print_sample(run, "1.0", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["sample"], printed["batch"]) == ("1.0", 1)
    assert [trajectory["response"] for trajectory in printed["trajectories"]] == ["34"]


async def test_a_shown_sample_lists_text_and_version_of_each_token(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await print_sample(run, "1.0", as_json=False)
    printed = capsys.readouterr().out
    assert "reward    0.25 (exact 1)" in printed
    assert "response  '34'" in printed
    assert f"seed {2**62 + 1}, temperature 0.5, at most 4 tokens" in printed
    rows = [line.split() for line in printed.splitlines()[-2:]]
    assert rows == [["1", "7", "-0.5000", "3", "'3'"], ["2", "8", "-0.2500", "4", "'4'"]]


async def test_an_error_names_the_missing_batch_sample_or_run(run: Path) -> None:
    with pytest.raises(NotFoundError, match="batch 4"):
        await print_list(run, Filter(batch=4), as_json=False)
    with pytest.raises(NotFoundError, match=r"'7\.0'"):
        await print_sample(run, "7.0", as_json=False)
    with pytest.raises(NotFoundError, match="not the folder of a run"):
        await print_sample(run / "trajectories", "7.0", as_json=False)
    with pytest.raises(InvalidArgumentError, match="allowed: open, leased, produced"):
        Filter(state="lost")


async def test_a_sample_has_no_trajectories_if_its_batch_holds_other_samples(run: Path) -> None:
    sample = await Samples(run, small_experiment().spec, None).complete(record(pool_pb.SAMPLE_STATE_DURABLE, batch=1))
    assert sample.trajectories == ()


def test_a_filter_passes_samples_of_its_batch_and_its_state() -> None:
    trained = record(pool_pb.SAMPLE_STATE_TRAINED)
    assert Filter().passes(trained)
    assert Filter(batch=0, state="trained").passes(trained)
    assert not Filter(batch=1).passes(trained)
    assert not Filter(batch=0).passes(NO_BATCH)
    assert not Filter(state="durable").passes(trained)


@pytest.mark.parametrize(
    ("state", "step"),
    [(pool_pb.SAMPLE_STATE_BATCHED, None), (pool_pb.SAMPLE_STATE_TRAINED, 1), (pool_pb.SAMPLE_STATE_DURABLE, 1)],
)
def test_a_sample_has_a_step_once_it_is_trained(state: "pool_pb.SampleState.ValueType", step: int | None) -> None:
    assert Sample(record(state)).step == step


def test_breaks_are_counted_in_the_table_and_explained_in_the_sample() -> None:
    broken = pb.Trajectory()
    broken.CopyFrom(TRAJECTORY)
    broken.metadata.update({"breaks": "2", "break_reason": "messages[1].content: not what was served"})
    sample = Sample(record(pool_pb.SAMPLE_STATE_TRAINED), result=pb.SampleResult(trajectories=[broken]))
    assert list(table([sample]))[1].split()[-1] == "2"
    assert "metadata  break_reason: messages[1].content: not what was served" in list(describe(sample, str))


def test_a_dropped_sample_shows_its_reason() -> None:
    assert list(table([Sample(NO_BATCH)]))[1].split()[:5] == ["9.0", "dropped", "2", "stale", "-"]
    assert next(describe(Sample(NO_BATCH), str)) == "sample 9.0: dropped, stale, attempt 2"
