"""The trajectory pool and the train batch pool: every RPC, over gRPC and a real Redis."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from unittest.mock import Mock

import pytest

from nexrl.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NotFoundError,
)
from nexrl.rpc.client import call, new_request_id
from nexrl.store import Redis, connect_redis, key_prefix
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.train_batch_proto import decode_train_batch, encode_train_batch
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl_trajectory_pool.messages import emptied_train_batch
from tests.support.patience import LIMIT_SECONDS, finished
from tests.support.pool import (
    TAG,
    UNTIL_WOKEN_SECONDS,
    Deploy,
    failed,
    grouped,
    running_pool,
    scored,
    trajectory,
)
from tests.support.redis import running_redis
from tests.support.services import small_experiment

ONE_EPOCH = {"type": "mock", "size": 3, "shuffle": False, "epochs": 1}


@pytest.mark.guide("G11", "H12", "H6")
async def test_a_put_says_what_became_of_each_result(deploy: Deploy) -> None:
    pool = await deploy(rollout={"maxNewTokens": 8, "maxAttempts": 2})
    first, second = (await pool.lease(2)).leases[0].samples
    assert await pool.put([scored(first), failed(second)]) == ["ACCEPTED", "RETRIED"]
    assert await pool.put([scored(first), scored(second)]) == ["DUPLICATE", "FENCED"]
    assert await pool.put([scored(pb.SampleLease(sample_id="99.0", attempt=1))]) == ["FENCED"]


@pytest.mark.guide("H3", "H16", "H18", "B2", "Q12")
async def test_one_key_groups_the_samples_of_a_task(deploy: Deploy) -> None:
    pool = await deploy()
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    assert grouped(batch) == {"0": ["0.0", "0.1"], "1": ["1.0", "1.1"]}
    assert (batch.batch_id, batch.attempt, batch.model_tag, batch.data_cursor) == (0, 1, TAG, 2)
    assert batch.groups[0].samples[0].trajectories[0] == trajectory()


@pytest.mark.guide("H15", "H18")
async def test_an_empty_key_list_makes_each_sample_ready_at_once(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": []}, algorithm={"type": "mock"})
    leases = (await pool.lease()).leases
    await pool.put([scored(leases[0].samples[0])])
    assert (await pool.state()).ready == 1
    await pool.put([scored(sample) for lease in leases for sample in lease.samples][1:])
    assert list(grouped((await pool.lease_batch()).lease)) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.guide("H2", "H17", "H18", "Q13")
async def test_two_keys_release_the_leaves_of_a_task_together(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["task_id", "turn"]})
    first, second = (await pool.lease()).leases
    await pool.put([scored(s, trajectory(turn="a/b")) for s in first.samples])
    assert (await pool.state()).ready == 2
    await pool.put([scored(s, trajectory(turn=str(k))) for k, s in enumerate(second.samples)])
    batch = (await pool.lease_batch()).lease
    assert grouped(batch) == {
        "0/turn=a%2Fb": ["0.0", "0.1"],
        "1/turn=0": ["1.0"],
        "1/turn=1": ["1.1"],
    }


@pytest.mark.guide("H17")
async def test_a_key_of_the_data_groups_samples_across_tasks(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["domain"]})
    leases = (await pool.lease()).leases
    await pool.put([scored(lease.samples[k], trajectory(domain="ab"[k])) for lease in leases for k in (0, 1)])
    assert grouped((await pool.lease_batch()).lease) == {"domain=a": ["0.0", "1.0"], "domain=b": ["0.1", "1.1"]}


@pytest.mark.guide("H17")
async def test_groups_across_tasks_that_nothing_can_fill_are_released_smaller(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["domain"]})
    waiting = asyncio.create_task(pool.lease_batch(wait_seconds=UNTIL_WOKEN_SECONDS))
    samples = [sample for lease in (await pool.lease()).leases for sample in lease.samples]
    await pool.put([scored(s, trajectory(domain=d)) for s, d in zip(samples, "aabc", strict=True)])
    batch = (await finished(waiting, "the waiting call is woken")).lease
    assert grouped(batch) == {"domain=a": ["0.0", "0.1"], "domain=b": ["1.0"], "domain=c": ["1.1"]}


async def test_a_trajectory_without_a_grouping_key_is_refused(deploy: Deploy) -> None:
    pool = await deploy(trajectoryPool={"batchSize": 4, "groupSize": 2, "keyList": ["domain"]})
    sample = (await pool.lease()).leases[0].samples[0]
    with pytest.raises(InvalidArgumentError, match="lacks 'domain'") as refusal:
        await pool.put([scored(sample)])
    assert refusal.value.violations[0].field == "results[0].trajectories[0].metadata"
    assert (await pool.state()).leased == 4


READINESS = {
    "batch_size": (True, 4),
    "batch_size_reached": (True, 4),
    "loaded_batch_finished": (False, 8),
    "batch_size_and_loaded_batch_finished": (False, 4),
    "batch_size_reached_and_loaded_batch_finished": (False, 4),
}


@pytest.mark.guide("H4", "H5", "Q11", "Q14", "Q17")
@pytest.mark.parametrize("rule", READINESS)
async def test_a_batch_is_ready_by_the_rule_in_each_of_its_spellings(deploy: Deploy, rule: str) -> None:
    is_ready_early, size = READINESS[rule]
    pool = await deploy(
        trajectoryPool={"batchSize": 4, "groupSize": 2, "readiness": rule},
        weightSync={"mode": "batch-async", "stalenessThreshold": 1},
    )
    leases = (await pool.lease()).leases  # two batches' worth
    for lease in leases[:2]:
        await pool.put([scored(sample) for sample in lease.samples])
    early = await pool.lease_batch()
    assert early.HasField("lease") == is_ready_early
    for lease in leases[2:]:
        await pool.put([scored(sample) for sample in lease.samples])
    batch = (await pool.lease_batch()).lease
    assert sum(len(group.samples) for group in batch.groups) == size


@pytest.mark.guide("H7")
async def test_a_batch_is_leased_by_size_and_model_or_not_at_all(deploy: Deploy) -> None:
    pool = await deploy()
    assert not (await pool.lease_batch()).HasField("lease")
    waiting = asyncio.create_task(pool.lease_batch(batch_size=2, wait_seconds=UNTIL_WOKEN_SECONDS))
    lease = (await pool.lease(2)).leases[0]
    await pool.put([scored(sample) for sample in lease.samples])
    batch = (await finished(waiting, "the waiting call is woken")).lease
    assert sum(len(group.samples) for group in batch.groups) == 2
    with pytest.raises(NotFoundError, match="model_tag"):
        await pool.lease_batch(tag="other")
    with pytest.raises(InvalidArgumentError, match="batch_size: -1"):
        await pool.lease_batch(batch_size=-1)
    await pool.set_version(1)
    await pool.fill(1)
    assert (await pool.lease_batch(tag="")).lease.batch_id == 1


async def test_a_returned_batch_is_leased_next(deploy: Deploy) -> None:
    pool = await deploy()
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    request = pool_pb.ReturnBatchRequest(request_id="r", model_tag=TAG, batch_id=0, attempt=1)
    await call(pool.pool.ReturnBatch, request, timeout_seconds=LIMIT_SECONDS)
    again = (await pool.lease_batch()).lease
    assert (again.batch_id, again.attempt, again.groups) == (0, 2, batch.groups)
    with pytest.raises(LeaseLostError):
        await pool.put_train_batch(batch)


@pytest.mark.guide("H9", "H10", "S5")
async def test_the_pools_state_counts_samples_by_state_and_knows_when_it_is_empty(deploy: Deploy) -> None:
    pool = await deploy()
    assert (await pool.state()).empty
    lease = (await pool.lease(2)).leases[0]
    await pool.put([scored(lease.samples[0])])
    state = await pool.state()
    assert (state.model_tag, state.granted, state.leased, state.grouping) == (TAG, 2, 1, 1)
    assert not state.empty, "a partial group counts"
    await pool.put([scored(lease.samples[1])])
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    state = await pool.state()
    assert (state.batched, state.ready, state.credit, state.next_batch_id, state.empty) == (4, 0, 0, 1, False)
    await pool.put_train_batch(batch)
    assert (await pool.state()).empty
    everyone = pool_pb.GetTrajectoryPoolStateRequest()
    answer = await call(pool.pool.GetTrajectoryPoolState, everyone, timeout_seconds=LIMIT_SECONDS)
    assert [found.model_tag for found in answer.pools] == [TAG]


async def test_a_failed_sample_is_no_zero_reward_but_a_smaller_group(deploy: Deploy) -> None:
    pool = await deploy(rollout={"maxNewTokens": 8, "maxAttempts": 1})
    leases = (await pool.lease()).leases
    results = [scored(sample) for lease in leases for sample in lease.samples]
    results[0] = failed(leases[0].samples[0], pb.VERDICT_REWARD_ERROR)
    await pool.put(results)
    batch = (await pool.lease_batch()).lease
    assert sorted(len(group.samples) for group in batch.groups) == [1, 2]
    state = await pool.state()
    assert (dict(state.dropped), state.imbalance) == ({"reward_error": 1}, 0)


@pytest.mark.guide("I8", "J2", "J3", "J4")
async def test_a_train_batch_is_kept_until_a_checkpoint_contains_it(deploy: Deploy) -> None:
    pool = await deploy()
    incarnation = (await pool.resume()).incarnation
    await pool.fill()
    stored = await pool.put_train_batch((await pool.lease_batch()).lease)
    depth = train_pb.GetTrainBatchPoolStateRequest(model_tag=TAG)
    state = await call(pool.train.GetTrainBatchPoolState, depth, timeout_seconds=LIMIT_SECONDS)
    assert (state.queued, state.trained, state.durable_steps) == (1, 0, 0)
    assert (await pool.lease_train_batch(0, incarnation)).train_batch == stored
    await pool.ack(0, incarnation)
    state = await call(pool.train.GetTrainBatchPoolState, depth, timeout_seconds=LIMIT_SECONDS)
    assert (state.queued, state.trained, state.durable_steps) == (0, 1, 0)

    replacing = await pool.resume()
    assert (replacing.incarnation, replacing.replayed_steps) == (incarnation + 1, 1)
    with pytest.raises(LeaseLostError, match="a newer trainer"):
        await pool.lease_train_batch(0, incarnation)
    assert (await pool.lease_train_batch(0, replacing.incarnation)).train_batch == stored
    await pool.ack(0, replacing.incarnation)

    commit = train_pb.CommitCheckpointRequest(request_id="c", model_tag=TAG, steps=1, incarnation=replacing.incarnation)
    for _ in range(2):
        await call(pool.train.CommitCheckpoint, commit, timeout_seconds=LIMIT_SECONDS)
    with pytest.raises(FailedPreconditionError, match="a committed checkpoint contains it"):
        await pool.lease_train_batch(0, replacing.incarnation)
    state = await call(pool.train.GetTrainBatchPoolState, depth, timeout_seconds=LIMIT_SECONDS)
    assert (state.queued, state.trained, state.durable_steps) == (0, 0, 1)
    assert (await pool.state()).durable == 4


@pytest.mark.guide("D4")
async def test_the_end_of_the_data_reaches_those_who_wait_for_batches(deploy: Deploy) -> None:
    pool = await deploy(data=ONE_EPOCH)
    sizes = []
    for step in range(2):
        await pool.set_version(step)
        await pool.fill(step)
        batch = (await pool.lease_batch()).lease
        sizes.append(sum(len(group.samples) for group in batch.groups))
        waiting = asyncio.create_task(pool.lease_batch(wait_seconds=UNTIL_WOKEN_SECONDS)) if step else None
        await pool.put_train_batch(batch)
        await pool.ack(step)
    assert waiting is not None
    assert sizes == [4, 2]
    assert (await finished(waiting, "the waiting call is woken")).exhausted
    assert (await pool.lease_train_batch(2, wait_seconds=UNTIL_WOKEN_SECONDS)).exhausted


async def test_a_trainer_that_comes_after_the_workers_still_says_where_to_begin(deploy: Deploy) -> None:
    pool = await deploy(trainer={"steps": 20})
    early = await pool.lease()
    answer = await pool.resume(steps=7, data_cursor=5)
    assert answer.replayed_steps == 0
    results = [scored(s, trajectory(version=7)) for x in early.leases for s in x.samples]
    assert await pool.put(results) == ["FENCED"] * 4  # of tasks that the checkpoint has behind it
    assert [lease.task.task_id for lease in (await pool.lease()).leases] == ["train-5", "train-6"]
    assert (await pool.audit()).findings_total == 0


async def test_the_ledger_is_audited_over_the_wire(deploy: Deploy, redis: Redis, experiment_name: str) -> None:
    pool = await deploy()
    await pool.fill()
    balanced = await pool.audit()
    assert (balanced.samples["granted"], balanced.samples["ready"], balanced.findings_total) == (4, 4, 0)
    await redis.hincrby(key_prefix(experiment_name, TAG) + "meta", "ready", 1)
    wrong = await pool.audit()
    assert [finding.subject for finding in wrong.findings] == ["ready"]
    assert (await pool.state()).imbalance == -1


async def test_one_sample_is_found_and_all_are_listed_page_by_page(deploy: Deploy) -> None:
    pool = await deploy()
    (sample, *_) = await pool.fill()
    request = pool_pb.GetSampleRequest(model_tag=TAG, sample_id=sample)
    found = await call(pool.pool.GetSample, request, timeout_seconds=LIMIT_SECONDS)
    assert found.record.state == pool_pb.SAMPLE_STATE_PRODUCED
    assert not found.record.HasField("batch_id")
    assert found.result.sample_id == sample
    await pool.put_train_batch((await pool.lease_batch()).lease)
    found = await call(pool.pool.GetSample, request, timeout_seconds=LIMIT_SECONDS)
    assert (found.record.state, found.record.batch_id) == (pool_pb.SAMPLE_STATE_BATCHED, 0)
    assert not found.HasField("result")

    listed, token = [], ""
    while True:
        page = pool_pb.ListSamplesRequest(model_tag=TAG, page_size=2, page_token=token)
        answer = await call(pool.pool.ListSamples, page, timeout_seconds=LIMIT_SECONDS)
        listed += [record.sample_id for record in answer.records]
        if not (token := answer.next_page_token):
            break
    assert listed == ["0.0", "0.1", "1.0", "1.1"]
    for wrong, field in [
        (pool_pb.ListSamplesRequest(model_tag=TAG, page_token="x"), "page_token"),
        (pool_pb.ListSamplesRequest(model_tag=TAG, page_size=-1), "page_size"),
    ]:
        with pytest.raises(InvalidArgumentError, match=field):
            await call(pool.pool.ListSamples, wrong, timeout_seconds=LIMIT_SECONDS)


async def test_a_put_that_finds_the_pool_full_is_repeated_until_there_is_room(deploy: Deploy) -> None:
    pool = await deploy(
        trajectoryPool={"batchSize": 2, "groupSize": 2, "maxPayloadBytes": 2**20},
        weightSync={"mode": "batch-async", "stalenessThreshold": 1},
    )
    leases = (await pool.lease()).leases
    first, second = ([scored(sample, trajectory(text="x" * 500_000)) for sample in lease.samples] for lease in leases)
    assert await pool.put(first) == ["ACCEPTED"] * 2
    refusal = await pool.refused_for_now(second)
    assert refusal.startswith("results: ")
    assert " at most 1048576 may be" in refusal
    assert (await pool.state()).leased == 2
    waiting = asyncio.create_task(pool.put(second))
    await pool.put_train_batch((await pool.lease_batch()).lease)
    assert await waiting == ["ACCEPTED"] * 2


async def test_a_redis_smaller_than_the_experiment_allows_is_never_filled(tmp_path: Path, experiment_name: str) -> None:
    experiment = small_experiment(
        experiment_name,
        trajectoryPool={"batchSize": 8, "groupSize": 8},
        weightSync={"mode": "batch-async", "stalenessThreshold": 3},
    )
    with running_redis() as url:
        async with aclosing(await connect_redis(url)) as redis:
            await redis.config_set("maxmemory", "24mb")
        async with running_pool(tmp_path, url, experiment) as pool:
            samples = [sample for lease in (await pool.lease()).leases for sample in lease.samples]
            big = [scored(sample, trajectory(text="x" * 2**20)) for sample in samples]
            for result in big[:15]:
                assert await pool.put([result]) == ["ACCEPTED"]
            assert "two thirds of Redis' maxmemory" in await pool.refused_for_now([big[15]])
            await pool.put_train_batch((await pool.lease_batch()).lease)
            assert await pool.put([big[15]]) == ["ACCEPTED"]


async def test_samples_that_were_drawn_otherwise_than_the_experiment_asks_are_refused_whole(deploy: Deploy) -> None:
    pool = await deploy(rollout={"maxNewTokens": 8, "topP": 0.9})
    (lease,) = (await pool.lease(2)).leases
    good, bad = (scored(sample) for sample in lease.samples)
    good.trajectories[0].completions[0].draw.top_p = 0.9
    field = r"results\[1\]\.trajectories\[0\]\.completions\[0\]\.draw\.top_p: 1; the experiment samples with 0\.9"
    with pytest.raises(InvalidArgumentError, match=field):
        await pool.put([good, bad])
    assert (await pool.state()).leased == 2
    bad.trajectories[0].completions[0].draw.top_p = 0.9
    assert await pool.put([good, bad]) == ["ACCEPTED", "ACCEPTED"]


async def test_a_version_that_was_never_committed_is_refused(deploy: Deploy) -> None:
    pool = await deploy()
    await pool.set_version(0)
    with pytest.raises(InvalidArgumentError, match=r"results\[0\]\..*policy_version: 7 was never committed"):
        await pool.put([scored(sample, trajectory(1.0, 7)) for sample in (await pool.lease(2)).leases[0].samples])


async def test_a_train_batch_that_fails_twice_comes_back_without_its_sequences(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Mock(wraps=emptied_train_batch)
    monkeypatch.setattr("nexrl_trajectory_pool.service.emptied_train_batch", empty)
    pool = await deploy()
    incarnation = (await pool.resume()).incarnation
    await pool.fill()
    lease = (await pool.lease_batch()).lease
    samples = [sample.sample_id for group in lease.groups for sample in group.samples]
    tensors = encode_train_batch(TrainBatch.pack([TrainSequence([5, 6], [False, True], [0.0, -1.0], 1.0)]))
    sent = train_pb.TrainBatch(batch_id=0, model_tag=TAG, sample_ids=samples, tensors=tensors)
    put = train_pb.PutTrainBatchRequest(request_id=new_request_id(), train_batch=sent, batch_attempt=lease.attempt)
    await call(pool.train.PutTrainBatch, put, timeout_seconds=LIMIT_SECONDS)
    dropped = []
    for _ in range(2):
        held = (await pool.lease_train_batch(0, incarnation)).train_batch
        assert decode_train_batch(held.tensors).token_count == 1
        failure = train_pb.FailTrainBatchRequest(
            request_id=new_request_id(),
            model_tag=TAG,
            step=0,
            incarnation=incarnation,
            sample_ids=samples,
            put_id=held.put_id,
        )
        for _ in range(2):  # a repeated call counts once
            answer = await call(pool.train.FailTrainBatch, failure, timeout_seconds=LIMIT_SECONDS)
        dropped.append(answer.dropped)
    assert (dropped, empty.call_count) == ([False, True], 1)
    emptied = (await pool.lease_train_batch(0, incarnation)).train_batch
    assert len(decode_train_batch(emptied.tensors).lengths_B) == 0
    assert (emptied.put_id, list(emptied.sample_ids), emptied.dropped) == (failure.request_id, samples, True)
    await pool.ack(0, incarnation)
    state = await pool.state()
    assert (dict(state.dropped), state.trained, state.imbalance) == ({"training_failed": 4}, 0, 0)
    record = await call(
        pool.pool.GetSample, pool_pb.GetSampleRequest(model_tag=TAG, sample_id="0.0"), timeout_seconds=LIMIT_SECONDS
    )
    assert record.record.drop_reason == "training_failed"
