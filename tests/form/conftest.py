"""Marks every test of this folder as `form`."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test. pytest calls this only for the tests below this folder."""
    item.add_marker("form")
