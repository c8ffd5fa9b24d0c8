"""Copies in host memory: of the moment of the copy, and in the same memory each time."""

import torch

from nexrl_trainer.host_copy import HostCopies


def test_a_copy_keeps_the_values_of_its_moment_and_the_next_one_uses_its_memory() -> None:
    weight, copies = torch.tensor([1.0, 2.0]), HostCopies()
    first = copies.copy([("weight", weight)])["weight"]
    weight.zero_()
    assert first.tolist() == [1.0, 2.0]
    second = copies.copy([("weight", weight)])["weight"]
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [0.0, 0.0]
    assert copies.copy([("weight", torch.ones(3))])["weight"].tolist() == [1.0, 1.0, 1.0]
