"""`make test-gpu` and `make bench-gpu` on a machine without a GPU."""

import pytest
import torch

from tests.support.gpu import require_gpu


def test_without_a_gpu_nothing_counts_as_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="cannot use a CUDA device here, so nothing was run"):
        require_gpu()
