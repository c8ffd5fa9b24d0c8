"""Fixtures for all tests. One real redis-server per test process; each test has key names of its own."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from nexrl.store import Redis, connect_redis
from tests.support.redis import running_redis


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
