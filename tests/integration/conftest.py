"""Fixtures that several integration tests share."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from nexrl.spec import with_folder
from nexrl.store import Redis
from tests.support import controller
from tests.support.clock import Clock
from tests.support.ledger import Make
from tests.support.object_storage import CREDENTIALS, S3Server, running_s3
from tests.support.pool import Deploy, PoolClient, running_pool
from tests.support.redis_servers import folder
from tests.support.services import small_experiment


@pytest.fixture
def redis_folder() -> Iterator[Path]:
    """A folder for Redis servers."""
    with folder() as made:
        yield made


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket, whose credentials are in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with running_s3(tmp_path / "s3") as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    """A clock that the test moves."""
    return Clock()


@pytest.fixture
def make(redis: Redis, experiment_name: str, clock: Clock) -> Make:
    """Builds ledgers over the same keys."""
    return Make(redis, experiment_name, clock)


@pytest.fixture
async def deploy(tmp_path: Path, redis_url: str, experiment_name: str) -> AsyncIterator[Deploy]:
    """Starts one more process of the same pool; sections of the experiment as keywords."""
    async with AsyncExitStack() as stack:

        async def start(**sections: Any) -> PoolClient:
            experiment = with_folder(small_experiment(experiment_name, **sections), tmp_path)
            return await stack.enter_async_context(running_pool(tmp_path, redis_url, experiment))

        yield start


@pytest.fixture
async def controllers(
    redis: Redis, experiment_name: str, tmp_path: Path, clock: Clock
) -> AsyncIterator[controller.Deploy]:
    """Starts controllers of one experiment over the same keys."""
    async with AsyncExitStack() as stack:
        yield controller.Deploy(redis, experiment_name, tmp_path, clock, stack)
