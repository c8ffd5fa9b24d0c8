"""Packages that the default installation does not contain."""

from importlib.util import find_spec

import pytest

needs_reasoning_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: run `make setup-examples`"
)
