"""The shared folder: whole versions or none, and only the bytes that were asked for."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NexrlError, NotFoundError, UnavailableError
from nexrl.weights.packing import Snapshot, allocate, tensor_specs, unpack
from nexrl.weights.published import ABANDONED_SECONDS, PublishedVersions
from nexrl.weights.receiver import WeightReceiver
from nexrl_inference.vllm.shared import SharedBuffers
from tests.support.publishing import MODEL_TAG, TENSORS, packed, writer_of_many, writer_that_dies
from tests.support.services import small_experiment


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared" / MODEL_TAG


@pytest.fixture
def shared(folder: Path) -> PublishedVersions:
    return PublishedVersions(folder.parent, folder.name)


async def read(shared: PublishedVersions, weights: Snapshot) -> dict[str, torch.Tensor]:
    """Read as a replica does that has the version and digest of `weights` from weight sync."""
    receiver = WeightReceiver(tensor_specs(TENSORS))
    staged = await receiver.read(shared, weights.manifest.policy_version, weights.manifest.digest)
    return dict(staged.tensors())


@pytest.mark.guide("L19", "Q22")
def test_an_experiment_with_a_path_publishes_its_versions_there(tmp_path: Path) -> None:
    shared = PublishedVersions.of(small_experiment("sums", weightSync={"path": str(tmp_path)}))
    assert shared is not None
    shared.write(packed(4))
    assert (tmp_path / "sums" / "default" / "version_4" / "manifest.json").is_file()
    assert PublishedVersions.of(small_experiment("sums")) is None


async def test_what_was_written_is_read(shared: PublishedVersions, folder: Path) -> None:
    weights = packed(4)
    shared.write(weights)
    found = await read(shared, weights)
    opened = load_file(folder / "version_4" / "model.safetensors")
    assert found.keys() == opened.keys() == dict(TENSORS).keys()
    for name, tensor in TENSORS:
        assert torch.equal(found[name], tensor)
        assert torch.equal(opened[name], tensor)
        assert opened[name].dtype == tensor.dtype
    receiver = WeightReceiver(tensor_specs(TENSORS), SharedBuffers)  # the memory that vLLM maps
    for_vllm = await receiver.read(shared, 4, weights.manifest.digest)
    assert torch.equal(for_vllm.tensors()["a"], TENSORS[1][1])
    assert json.loads((folder / "version_4" / "manifest.json").read_text())["digest"] == weights.manifest.digest


async def test_the_two_versions_written_last_are_kept(shared: PublishedVersions, folder: Path) -> None:
    for version in (8, 9, 10, 11):
        shared.write(packed(version))
    assert versions(folder) == ["version_10", "version_11"]
    os.utime(folder / "version_10", (1, 1))
    shared.write(packed(3))  # of a trainer whose ledger has lost the later steps
    assert versions(folder) == ["version_11", "version_3"]


async def test_a_version_made_again_takes_the_place_of_the_former(shared: PublishedVersions, folder: Path) -> None:
    former, again = packed(4), packed(4, shift=1)
    shared.write(former)
    shared.write(again)
    assert versions(folder) == ["version_4"]
    with pytest.raises(FailedPreconditionError, match="other bytes"):
        await read(shared, former)
    assert torch.equal((await read(shared, again))["a"], TENSORS[1][1] + 1)


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def append(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def of_another_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"policy_version": 5}))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": cut_off,
    "a flipped bit": flip_a_bit,
    "something after the end": append,
    "another version": of_another_version,
    "empty folder": empty,
    "no tensors": lambda folder: (folder / "model.safetensors").unlink(),
    "empty tensors": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text('{"policy_version": 4, "tensors'),
    "JSON, and no manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "no text": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_torn_or_foreign_folder_is_refused(shared: PublishedVersions, folder: Path, damage: str) -> None:
    weights = packed(4)
    shared.write(weights)
    DAMAGES[damage](folder / "version_4")
    with pytest.raises(NexrlError, match=r"version_4|version 5") as caught:
        await read(shared, weights)
    assert isinstance(caught.value, FailedPreconditionError | UnavailableError)
    shared.write(weights)  # and does not stand in the way of a whole one
    await read(shared, weights)


async def test_another_digest_than_the_committed_one_is_refused(shared: PublishedVersions) -> None:
    shared.write(packed(4))
    with pytest.raises(FailedPreconditionError, match="version 4 is published with other bytes"):
        await read(shared, packed(4, shift=1))
    with pytest.raises(NotFoundError, match="version_5"):
        await read(shared, packed(5))


async def test_the_version_of_another_model_is_refused(shared: PublishedVersions) -> None:
    weights = packed(4)
    shared.write(weights)
    receiver = WeightReceiver(tensor_specs(TENSORS[1:]))
    with pytest.raises(InvalidArgumentError, match="half"):
        await receiver.read(shared, 4, weights.manifest.digest)


def test_a_folder_that_cannot_be_written_is_told(shared: PublishedVersions, folder: Path) -> None:
    folder.parent.write_text("a file")
    with pytest.raises(UnavailableError, match="version_4"):
        shared.write(packed(4))


@pytest.mark.parametrize("at", range(1, 11))
async def test_a_writer_killed_at_any_instant_leaves_the_older_version_and_a_whole_one_or_none(
    shared: PublishedVersions, folder: Path, at: int
) -> None:
    older, newer = packed(4), packed(5)
    shared.write(older)
    writer = writer_that_dies(folder.parent, 5, at)
    writer.join()
    assert writer.exitcode in (-signal.SIGKILL, 0)
    await read(shared, older)
    if (folder / "version_5").exists():
        await read(shared, newer)
    else:
        assert writer.exitcode != 0
        with pytest.raises(NotFoundError):
            await read(shared, newer)
    shared.write(newer)
    await read(shared, newer)


def test_what_a_killed_writer_left_is_removed_when_nobody_can_be_writing_it(
    shared: PublishedVersions, folder: Path
) -> None:
    left, being_written = folder / ".version_1.x.tmp", folder / ".version_2.y.tmp"
    for partial in (left, being_written):
        partial.mkdir(parents=True)
        (partial / "model.safetensors").write_bytes(b"torn")
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    os.utime(left, (long_ago, long_ago))
    shared.write(packed(4))
    assert versions(folder) == [being_written.name, "version_4"]


async def test_two_trainers_at_a_time_leave_whole_versions(shared: PublishedVersions, folder: Path) -> None:
    trainers = [writer_of_many(folder.parent, shift) for shift in (0, 1)]
    for trainer in trainers:
        trainer.join()
        assert trainer.exitcode == 0
    assert 1 <= len(versions(folder)) <= 3
    for name in versions(folder):
        manifest = shared.manifest(int(name.removeprefix("version_")))
        buffers = allocate(manifest)
        shared.read(manifest, buffers)
        assert unpack(manifest, buffers)["a"][0] in (0, 1)
