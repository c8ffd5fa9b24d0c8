"""The device of trainer and built-in engine. No test needs a GPU, so none shows that a model runs on one."""

from pathlib import Path

import pytest
import torch

from nexrl.device import choose_device, idle_gpu_warning
from nexrl.errors import FailedPreconditionError


@pytest.mark.parametrize(
    ("has_cuda", "name", "chosen"),
    [
        (True, "auto", "cuda"),
        (True, "cuda", "cuda"),
        (True, "cpu", "cpu"),
        (False, "auto", "cpu"),
        (False, "cpu", "cpu"),
    ],
)
def test_auto_is_cuda_where_pytorch_can_use_it(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, name: str, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device("trainer.device", name).type == chosen


def test_cuda_is_refused_where_pytorch_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FailedPreconditionError, match=r"trainer\.device: cuda, but PyTorch .* set auto or cpu"):
        choose_device("trainer.device", "cuda")


@pytest.mark.parametrize(
    ("device", "has_cuda", "files", "warning"),
    [
        ("cuda", True, ["nvidia0"], ""),
        ("cpu", False, ["nvidiactl", "null"], ""),
        ("cpu", True, [], "although a CUDA device is idle"),
        ("cpu", False, ["nvidia0"], "this machine has a GPU, because PyTorch"),
    ],
)
def test_an_idle_gpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, has_cuda: bool, files: list[str], warning: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    for name in files:
        (tmp_path / name).touch()
    found = idle_gpu_warning("trainer.device", torch.device(device), tmp_path)
    assert warning in found
    assert bool(found) == bool(warning)
