"""The ledger of a run, for those who look into it: its own pool while it is on, else a pool over a copy."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from nexrl.errors import NotFoundError, UnavailableError
from nexrl.local.child import Command
from nexrl.local.components import LOOPBACK, free_ports, service_command
from nexrl.local.redis_server import redis_command
from nexrl.local.run_folder import endpoint, experiment_of, is_on, is_put_aside
from nexrl.local.temporary import running, serving
from nexrl.rpc.client import connect
from nexrl.store import connect_redis

LOOK_SECONDS = 0.05


@asynccontextmanager
async def pool_of(run: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a trajectory pool that has the ledger of the run in folder `run`.

    Of a run that has ended, a pool is started over a copy of the ledger, for the time of the block; with a shared
    Redis, over that. It changes nothing. Raises NotFoundError for a folder that is no run or has no ledger,
    UnavailableError, with the reason, when the pool cannot be started.
    """
    experiment = experiment_of(run)
    shared = experiment.spec.redis.url
    if shared and not is_put_aside(run):
        # A pool would wait for it, and callers for the pool.
        async with aclosing(await connect_redis(shared)):
            pass
    if is_on(run):
        async with connect(endpoint(run, "trajectory_pool")) as channel:
            yield channel
        return
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="nexrl-")))
        if shared and is_put_aside(run):
            raise NotFoundError(f"{run}: the ledger in {shared} is that of a later run of this name")
        url = shared if shared else await stack.enter_async_context(_copied_redis(run, folder))
        address = f"{LOOPBACK}:{free_ports(1)[0]}"
        settings = {"LISTEN": address, "REDIS_URL": url, "REDIS_IS_PRIVATE": str(not shared), "READ_ONLY": "true"}
        command = service_command("trajectory-pool", "trajectory-pool", run, settings)
        yield await stack.enter_async_context(serving(command, folder, address))


@asynccontextmanager
async def _copied_redis(run: Path, folder: Path) -> AsyncIterator[str]:
    """The URL of a server with what the run's private one had written down."""
    if not (run / "redis").is_dir():
        raise NotFoundError(f"{run}: no ledger there; it has no folder redis/")
    await asyncio.to_thread(shutil.copytree, run / "redis", folder / "redis")
    socket = folder / "redis.sock"
    url = f"unix://{socket}"
    command = Command("redis", redis_command(folder / "redis", socket), {})
    async with running(command, folder, _until_redis_answers(url)):
        yield url


async def _until_redis_answers(url: str) -> None:
    while True:
        try:
            async with aclosing(await connect_redis(url)):
                return
        except UnavailableError:
            await asyncio.sleep(LOOK_SECONDS)
