"""Messages that no client of ours sends: each is refused with a status that names what is wrong."""

import grpc
import pytest

from tests.support.pool import TAG, Deploy

PUT_WITH_MALFORMED_RESULT = b"\x0a\x01r\x12" + bytes([len(TAG)]) + TAG.encode() + b"\x22\x02\x0a\xff"


@pytest.mark.parametrize(
    ("method", "content", "field"),
    [
        ("TrajectoryPoolService/PutSamples", b"\x0a\xff", "request"),
        ("TrajectoryPoolService/PutSamples", PUT_WITH_MALFORMED_RESULT, r"results\[0\]"),
        ("ValidatorService/PutValidationSamples", b"\x0a\xff", "request"),
        ("ValidatorService/PutValidationSamples", PUT_WITH_MALFORMED_RESULT, r"results\[0\]"),
        ("TrainBatchPoolService/PutTrainBatch", b"\x0a\xff", "request"),
    ],
)
async def test_malformed_bytes_of_a_put_are_an_invalid_argument(
    deploy: Deploy, method: str, content: bytes, field: str
) -> None:
    pool = await deploy()
    async with grpc.aio.insecure_channel(pool.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as refusal:
            await channel.unary_unary(f"/nexrl.v1.{method}")(content, timeout=20)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
