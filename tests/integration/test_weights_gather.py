"""Two trainer ranks, real processes over Gloo, gather what FSDP2 has sharded over them."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexrl.weights.packing import snapshot
from tests.support.gather_process import RANKS, Gathered, LlamaCase, TensorsCase, main
from tests.support.spawned_processes import SpawnedProcesses

GLOO_THREADS = 2
ONE_PAIR = settings(max_examples=25)

llamas = st.builds(
    LlamaCase,
    heads=st.integers(1, 4),
    layers=st.integers(1, 3),
    vocabulary=st.integers(1, 70),
    is_tied=st.booleans(),
    data_type=st.sampled_from(["float32", "bfloat16"]),
)
shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8).map(tuple)
bucket_sizes = st.integers(1, 20_000)


class Pair(SpawnedProcesses):
    """The two ranks."""

    def __init__(self, rendezvous_file: Path) -> None:
        super().__init__(RANKS, main, str(rendezvous_file))

    def gather(self, case: LlamaCase | TensorsCase, bucket_bytes: int) -> list[Gathered]:
        """What each rank has had of the case."""
        return self.ask((case, bucket_bytes))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        environment.setenv("OMP_NUM_THREADS", "1")
        pair = Pair(tmp_path_factory.mktemp("gather") / "rendezvous")
    yield pair
    pair.end()


def assert_gathered(pair: Pair, case: LlamaCase | TensorsCase, bucket_bytes: int) -> None:
    """The sender has the buckets of the unsharded tensors, the other rank none; neither holds more than it must."""
    whole = snapshot(case.whole().items(), policy_version=0, bucket_bytes=bucket_bytes)
    sender, other = pair.gather(case, bucket_bytes)
    assert sender.buffers == [buffer.numpy().tobytes() for buffer in whole.buffers]
    assert other.buffers == [None] * len(whole.buffers)
    largest = max(padded_bytes(tensor.shape, tensor.nbytes) for tensor in whole.manifest.tensors)
    # A gather has the tensor and this rank's shard, padded. Gloo's two threads may let go of the ones before it late.
    gathers_bytes = (1 + GLOO_THREADS) * (1 + 1 / RANKS) * largest
    assert other.peak_bytes <= gathers_bytes
    assert sender.peak_bytes <= gathers_bytes + max(buffer.nbytes for buffer in whole.buffers)


def padded_bytes(shape: tuple[int, ...], nbytes: int) -> int:
    """Size of a tensor whose first dimension every rank has as much of."""
    return nbytes // shape[0] * math.ceil(shape[0] / RANKS) * RANKS


@ONE_PAIR
@given(llamas, bucket_sizes)
@pytest.mark.gate
def test_the_buckets_of_a_sharded_llama_are_those_of_the_whole_one(
    pair: Pair, case: LlamaCase, bucket_bytes: int
) -> None:
    assert_gathered(pair, case, bucket_bytes)


@ONE_PAIR
@given(shapes, st.frozensets(st.integers(0, 7)), bucket_sizes)
def test_tensors_of_any_shape_are_gathered_beside_tensors_that_are_not_sharded(
    pair: Pair, shapes: tuple[tuple[int, ...], ...], plain: frozenset[int], bucket_bytes: int
) -> None:
    assert_gathered(pair, TensorsCase(shapes, plain), bucket_bytes)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_no_rank_ever_holds_a_whole_model(pair: Pair, is_tied: bool) -> None:
    case = LlamaCase(heads=8, layers=6, vocabulary=100, is_tied=is_tied)
    whole = snapshot(case.whole().items(), policy_version=0, bucket_bytes=16 * 1024)
    assert len(whole.buffers) > 10
    assert [tensor.name for tensor in whole.manifest.tensors].count("lm_head.weight") == (not is_tied)
    for rank in pair.gather(case, 16 * 1024):
        assert sum(rank.shard_bytes.values()) + rank.peak_bytes < 0.8 * whole.manifest.nbytes
