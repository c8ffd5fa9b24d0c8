"""Samples of any size up to 8 MiB, and batches of them, reach the trainer whole; what is larger is refused by name."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from nexrl.errors import InvalidArgumentError
from nexrl.rpc.client import call, call_in_pieces, connect, new_request_id
from nexrl.store import Redis, key_prefix
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl.train_batch_proto import encode_train_batch
from nexrl.v1 import train_batch_pool_service_pb2 as train_pb
from nexrl.v1 import trajectory_pb2 as pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl_trajectory_pool.ledger import names, train_batches
from nexrl_trajectory_pool.results import MAX_SAMPLE_BYTES
from tests.support.patience import LIMIT_SECONDS
from tests.support.pool import TAG, PoolClient, running_pool, scored, trajectory
from tests.support.services import small_experiment

LARGE_BATCH_SAMPLES = 34
LARGE_TRAIN_BATCH_BYTES = 80 * 2**20


def sized(sample: pb.SampleLease, nbytes: int) -> pb.SampleResult:
    """A result that takes `nbytes` on the wire."""
    result = scored(sample, trajectory())
    filled = result.trajectories[0]
    filled.response = "x" * (nbytes - result.ByteSize() - 16)  # room for the lengths, which grow with it
    filled.response += "x" * (nbytes - result.ByteSize())
    assert result.ByteSize() == nbytes
    return result


@pytest.fixture
async def pool(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[PoolClient]:
    """Batches of two groups of two."""
    async with running_pool(tmp_path, redis_url, small_experiment(experiment_name)) as client:
        yield client


@pytest.mark.parametrize("nbytes", [2**10, 2**20, MAX_SAMPLE_BYTES])
async def test_samples_of_any_size_reach_the_trainer_whole(pool: PoolClient, nbytes: int) -> None:
    await pool.resume()
    sent: dict[str, pb.SampleResult] = {}
    for lease in (await pool.lease(4)).leases:
        results = [sized(sample, nbytes) for sample in lease.samples]
        assert await pool.put(results) == ["ACCEPTED"] * 2
        sent |= {result.sample_id: result for result in results}
    batch = (await pool.lease_batch()).lease
    assert {sample.sample_id: sample for group in batch.groups for sample in group.samples} == sent
    put = await put_train_batch(pool, batch, 4 * nbytes)
    assert (await pool.lease_train_batch(0, 1)).train_batch == put


async def test_a_sample_of_one_byte_too_many_is_refused_with_both_sizes(pool: PoolClient) -> None:
    lease = (await pool.lease(2)).leases[0]
    results = [scored(lease.samples[0]), sized(lease.samples[1], MAX_SAMPLE_BYTES + 1)]
    with pytest.raises(InvalidArgumentError, match=r"^results\[1\]: 8388609 bytes; at most 8388608$"):
        await pool.put(results)
    assert (await pool.state()).leased == 2  # the other one was not stored either


@pytest.mark.gate
async def test_a_batch_that_no_message_of_the_usual_size_could_hold_reaches_the_trainer(
    tmp_path: Path, redis: Redis, redis_url: str, experiment_name: str
) -> None:
    sections = {"trajectoryPool": {"batchSize": LARGE_BATCH_SAMPLES, "groupSize": 2}}
    async with running_pool(tmp_path, redis_url, small_experiment(experiment_name, **sections)) as pool:
        await pool.resume()
        for lease in (await pool.lease(LARGE_BATCH_SAMPLES)).leases:
            await pool.put([sized(sample, MAX_SAMPLE_BYTES) for sample in lease.samples])
        batch = (await pool.lease_batch()).lease
        assert batch.ByteSize() > LARGE_BATCH_SAMPLES * MAX_SAMPLE_BYTES
        assert LARGE_TRAIN_BATCH_BYTES > train_batches.PIECE_BYTES
        put = await put_train_batch(pool, batch, LARGE_TRAIN_BATCH_BYTES)
        assert (await pool.lease_train_batch(0, 1)).train_batch == put
        await pool.ack(0, 1)
        await commit(pool, 1)
    assert await redis.hget(key_prefix(experiment_name, "default") + "meta", "payload_bytes") == b"0"


async def test_a_group_that_is_too_large_for_any_batch_is_refused_with_what_to_change(
    pool: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.fill()
    monkeypatch.setattr(names, "MAX_BATCH_BYTES", 10)
    with pytest.raises(InvalidArgumentError, match=r"^trajectoryPool.batchSize: batch 0 has \d+ bytes .* at most 10:"):
        await pool.lease_batch()


async def test_a_train_batch_of_which_redis_lost_a_piece_is_sent_again(
    pool: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_batches, "PIECE_BYTES", 100)
    await pool.resume()
    await pool.fill()
    batch = (await pool.lease_batch()).lease
    stage = train_batches.TrainBatches._stage

    lost: list[str] = []

    async def stage_all_but_one(self: train_batches.TrainBatches, name: str, number: int, piece: bytes) -> None:
        if number != 1 or lost:
            await stage(self, name, number, piece)
        else:
            lost.append(name)

    monkeypatch.setattr(train_batches.TrainBatches, "_stage", stage_all_but_one)
    put = await put_train_batch(pool, batch, 512)
    assert lost
    assert (await pool.lease_train_batch(0, 1)).train_batch == put


async def put_train_batch(pool: PoolClient, lease: pool_pb.BatchLease, nbytes: int) -> train_pb.TrainBatch:
    samples = [sample.sample_id for group in lease.groups for sample in group.samples]
    tokens = nbytes // 17  # 8 + 1 + 4 + 4 bytes each
    lengths_B = np.array([32] * (tokens // 32) + [tokens % 32] * (tokens % 32 > 0), np.int64)  # the longest allowed
    zeros_N = np.zeros(tokens, np.float32)
    arrays = TrainBatch(np.arange(tokens) % 14, np.zeros(tokens, bool), zeros_N, zeros_N, lengths_B)
    batch = train_pb.TrainBatch(
        batch_id=lease.batch_id,
        model_tag=TAG,
        sample_ids=samples,
        tensors=encode_train_batch(arrays),
    )
    request = train_pb.PutTrainBatchRequest(request_id=new_request_id(), train_batch=batch, batch_attempt=lease.attempt)
    method, answer = "/nexrl.v1.TrainBatchPoolService/PutTrainBatch", train_pb.PutTrainBatchResponse.FromString
    async with connect(pool.address) as channel:
        await call_in_pieces(channel, method, request, answer, timeout_seconds=LIMIT_SECONDS)
    batch.put_id = request.request_id
    return batch


async def commit(pool: PoolClient, steps: int) -> None:
    request = train_pb.CommitCheckpointRequest(request_id=new_request_id(), model_tag=TAG, steps=steps, incarnation=1)
    await call(pool.train.CommitCheckpoint, request, timeout_seconds=LIMIT_SECONDS)


async def test_a_train_batch_with_tokens_that_the_model_does_not_have_is_refused(pool: PoolClient) -> None:
    tensors = encode_train_batch(TrainBatch.pack([TrainSequence([5, 10**6], [False, True], [0.0, -1.0], 1.0)]))
    sent = train_pb.TrainBatch(model_tag=TAG, tensors=tensors)
    put = train_pb.PutTrainBatchRequest(request_id=new_request_id(), train_batch=sent, batch_attempt=1)
    with pytest.raises(InvalidArgumentError, match=r"tensors\[token_ids\]: 1000000"):
        await call(pool.train.PutTrainBatch, put, timeout_seconds=LIMIT_SECONDS)
