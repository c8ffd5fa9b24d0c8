"""The rollout process as it is started, between fakes of pool, weight sync and engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nexrl.local.components import free_ports
from nexrl.rpc.server import ServiceProcess
from nexrl.settings import Settings
from nexrl.spec import Experiment
from nexrl_rollout.server import start
from tests.support.rollout import FakeEngine, FakePool, FakeWeightSync, experiment, replica, serving


@asynccontextmanager
async def contract(pool: FakePool, engine: FakeEngine) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a pool and of a weight sync whose one replica is `engine`."""
    registry = FakeWeightSync()
    async with serving(pool) as pool_address, serving(engine) as engine_address, serving(registry) as registry_address:
        await registry.set(replica("replica-0", engine_address))
        yield pool_address, registry_address


@asynccontextmanager
async def rollout_process(
    pool: FakePool, engine: FakeEngine, run_dir: Path, given: Experiment | None = None, **rollout: Any
) -> AsyncIterator[ServiceProcess]:
    """The process, until SIGTERM at the end of the block."""
    async with contract(pool, engine) as (pool_address, registry_address):
        settings = Settings(
            experiment_file=run_dir / "experiment.yaml",
            run_dir=run_dir,
            instance="rollout-0",
            trajectory_pool=pool_address,
            weight_sync=registry_address,
            http_port=free_ports(1)[0],
        )
        process = ServiceProcess("rollout", settings, given or experiment(**rollout))
        running = asyncio.create_task(process.run(start))
        try:
            yield process
        finally:
            process.stopping.set()
            await running
