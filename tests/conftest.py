"""Fixtures for all tests. One real redis-server per test process; each test has key names of its own."""

import inspect
import sys
import uuid
from collections.abc import AsyncIterator, Generator, Iterator

import pytest

from nexrl.store import Redis, connect_redis
from tests.support.patience import ends_within
from tests.support.redis import running_redis

ASYNC_SHARE = 0.9
"""Share of its time limit after which an async test is cancelled. The rest is for its clean-up."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Cancel an async test before the signal of pytest-timeout interrupts the loop."""
    if not isinstance(item, pytest.Function):
        return (yield)
    # pytest-asyncio runs the coroutine of a Hypothesis test once for each example.
    owner, name = (item.obj.hypothesis, "inner_test") if hasattr(item.obj, "hypothesis") else (item, "obj")
    test = getattr(owner, name)
    seconds = _limit_seconds(item)
    if seconds and inspect.iscoroutinefunction(test):
        setattr(owner, name, ends_within(test, ASYNC_SHARE * seconds))
    try:
        return (yield)
    finally:
        setattr(owner, name, test)


def _limit_seconds(item: pytest.Item) -> float:
    """Return the limit that pytest-timeout has for this test; 0 means none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    given = item.config.getoption("timeout")
    return float(given if given is not None else item.config.getini("timeout") or 0)


@pytest.fixture(autouse=True)
def forget_user_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test wrote and imported as user code is not what the next test imports under that name."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in sys.modules.copy().items():  # a finalizer may import
        if str(getattr(module, "__file__", None)).startswith(written):
            del sys.modules[name]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a real redis-server that lives as long as this test process."""
    with running_redis() as url:
        yield url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """An open connection to it."""
    connection = await connect_redis(redis_url)
    yield connection
    await connection.aclose()


@pytest.fixture
def experiment_name() -> str:
    """A name no other test uses, so that tests can share a server."""
    return f"test-{uuid.uuid4().hex[:12]}"
