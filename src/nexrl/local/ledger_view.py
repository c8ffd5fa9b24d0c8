"""Opens the ledger of a run: through the pool of a running run, else through a pool over a copy of its data."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from nexrl.components import Wiring
from nexrl.errors import NotFoundError, UnavailableError
from nexrl.local.child import Command
from nexrl.local.components import LOOPBACK, free_ports, service_command
from nexrl.local.redis_server import redis_command
from nexrl.local.run_folder import endpoint, experiment_of, is_put_aside, is_running
from nexrl.local.temporary import running, serving
from nexrl.rpc.client import connect
from nexrl.run_layout import EXPERIMENT_FILE, REDIS_FOLDER
from nexrl.store import connect_redis

LOOK_SECONDS = 0.05


@asynccontextmanager
async def pool_of(run: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel to a trajectory pool that has the ledger of the run in folder `run`.

    If the run has ended, a read-only pool is started until the end of the block: over a copy of the run's own Redis, or
    over the shared Redis. Raises NotFoundError if the folder has no run or no ledger, and UnavailableError, with the
    reason, if the pool cannot be started.
    """
    experiment = experiment_of(run)
    shared = experiment.spec.redis.url
    if shared and not is_put_aside(run):
        # Fails at once if Redis is unreachable. Otherwise the pool would wait for Redis, and the caller for the pool.
        async with aclosing(await connect_redis(shared)):
            pass
    if is_running(run):
        async with connect(endpoint(run, "trajectory_pool")) as channel:
            yield channel
        return
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="nexrl-")))
        if shared and is_put_aside(run):
            raise NotFoundError(f"{run}: the ledger in {shared} belongs to a later run of this name")
        url = shared if shared else await stack.enter_async_context(_copied_redis(run, folder))
        reader, pool = (f"{LOOPBACK}:{port}" for port in free_ports(2))
        wiring = Wiring(run / EXPERIMENT_FILE, run, data_reader=reader, redis_url=url)
        for role, address in (("data-reader", reader), ("trajectory-pool", pool)):
            variables = {"NEXRL_LISTEN": address, "NEXRL_READ_ONLY": "true"}
            command = service_command(role, role, experiment, wiring, variables)
            channel = await stack.enter_async_context(serving(command, folder, address))
        yield channel


@asynccontextmanager
async def _copied_redis(run: Path, folder: Path) -> AsyncIterator[str]:
    """Start a Redis server on a copy of the run's data, and return its URL."""
    if not (run / REDIS_FOLDER).is_dir():
        raise NotFoundError(f"{run}: it has no ledger: no folder {REDIS_FOLDER}/")
    copy = folder / REDIS_FOLDER
    await asyncio.to_thread(shutil.copytree, run / REDIS_FOLDER, copy)
    socket = folder / "redis.sock"
    url = f"unix://{socket}"
    command = Command("redis", redis_command(copy, socket), {})
    async with running(command, folder, _until_redis_answers(url)):
        yield url


async def _until_redis_answers(url: str) -> None:
    while True:
        try:
            async with aclosing(await connect_redis(url)):
                return
        except UnavailableError:
            await asyncio.sleep(LOOK_SECONDS)
