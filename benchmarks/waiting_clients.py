"""What clients that wait for tasks cost while nothing happens, and how long a wake-up takes.

    PYTHONPATH=. .venv/bin/python benchmarks/waiting_clients.py [--clients 1000] [--json FILE]

A pool process, a Redis, and clients in processes of their own, each with one LeaseTasks call that waits. CPU time is
that of the pool and Redis, in percent of one core. A wake-up is timed from before the ReturnSamples call that gives one
sample back until a waiting client has it; then the next.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import median, quantiles
from typing import TypeAlias

import grpc

from nexrl.local.child import Child, Command
from nexrl.local.components import LOOPBACK, free_ports
from nexrl.rpc.client import CLIENT_OPTIONS, call, connect, new_request_id
from nexrl.spec import dump_resolved
from nexrl.store import Redis, connect_redis
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import SampleLease
from tests.support.patience import LIMIT_SECONDS
from tests.support.pool import TAG, PoolClient
from tests.support.redis import running_redis
from tests.support.services import small_experiment

CLIENT_PROCESSES = 2
CHANNELS = 4
"""Connections of each client process."""
WAIT_SECONDS = 1800.0
SETTLE_SECONDS = 1.0
START_SECONDS = 60.0
STOP_SECONDS = 10.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_processes = multiprocessing.get_context("spawn")
Woken: TypeAlias = tuple[str, int, float]
"""Sample id and attempt that a client was granted, and when (seconds of the monotonic clock)."""


def measure(clients: int = 1000, wakeups: int = 100, idle_seconds: float = 20.0) -> dict[str, float]:
    """Figures of one run: `idle_seconds` without a client, as long with all of them waiting, then `wakeups` of one."""
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as folder, running_redis() as redis_url:
        return asyncio.run(_measure(Path(folder), redis_url, clients, wakeups, idle_seconds))


async def _measure(folder: Path, redis_url: str, clients: int, wakeups: int, idle_seconds: float) -> dict[str, float]:
    redis = await connect_redis(redis_url)
    async with _running_pool(folder, redis_url, clients) as (pool, pids):
        pids.append((await redis.info("server"))["process_id"])
        held = await _lease_all(pool)
        idle = await _cpu_percent(pids, idle_seconds)
        calls = await _ledger_calls(redis)
        with _waiting_clients(pool.address, clients) as woken:
            await _ledger_calls_reach(redis, calls + clients)  # each looks once before it waits
            waiting = await _cpu_percent(pids, idle_seconds)
            calls = await _ledger_calls(redis)
            latencies = [await _wake_one(pool, held, woken) for _ in range(wakeups)]
            calls = await _ledger_calls(redis) - calls
            all_woken = await _wake_all(pool, held[:clients], woken)
    await redis.aclose()
    return {
        "clients": clients,
        "cpu_percent_idle": idle,
        "cpu_percent_waiting": waiting,
        "cpu_percent_more": waiting - idle,
        "wakeup_p50_ms": 1e3 * median(latencies),
        "wakeup_p99_ms": 1e3 * quantiles(latencies, n=100, method="inclusive")[98],
        "ledger_calls_per_wakeup": calls / wakeups,
        "all_woken_ms": 1e3 * all_woken,
    }


@asynccontextmanager
async def _running_pool(folder: Path, redis_url: str, clients: int) -> AsyncIterator[tuple[PoolClient, list[int]]]:
    """A pool process whose first credit is as many samples as there are clients, or more; its process id."""
    pool_section = {"batchSize": clients, "groupSize": 1}
    experiment = small_experiment(
        "waiting", trajectoryPool=pool_section, rollout={"maxNewTokens": 8, "leaseSeconds": 2 * WAIT_SECONDS}
    )
    (folder / "experiment.yaml").write_text(dump_resolved(experiment))
    address = f"{LOOPBACK}:{free_ports(1)[0]}"
    environment = {
        "NEXRL_EXPERIMENT_FILE": str(folder / "experiment.yaml"),
        "NEXRL_RUN_DIR": str(folder),
        "NEXRL_INSTANCE": "trajectory-pool",
        "NEXRL_LISTEN": address,
        "NEXRL_REDIS_URL": redis_url,
        "NEXRL_DRAIN_SECONDS": "1",
    }
    arguments = [sys.executable, "-m", "nexrl.cli", "serve", "trajectory-pool"]
    child = Child(Command("trajectory-pool", arguments, environment), folder)
    running = asyncio.create_task(child.run())
    try:
        async with connect(address) as channel:
            pool = PoolClient(address, channel)
            await pool.state()
            assert child.pid
            yield pool, [child.pid]
    finally:
        await child.stop(STOP_SECONDS)
        await running


async def _lease_all(pool: PoolClient) -> list[SampleLease]:
    held: list[SampleLease] = []
    while leases := (await pool.lease(1000)).leases:
        held += [sample for lease in leases for sample in lease.samples]
    return held


@contextmanager
def _waiting_clients(address: str, clients: int) -> "Iterator[Queue[Woken]]":
    """Clients that wait, in processes of their own, and again when they were woken; what they are granted."""
    woken: Queue[Woken] = _processes.Queue()
    share = [clients // CLIENT_PROCESSES + (number < clients % CLIENT_PROCESSES) for number in range(CLIENT_PROCESSES)]
    processes = [_processes.Process(target=run_clients, args=(address, n, woken), daemon=True) for n in share]
    for process in processes:
        process.start()
    try:
        yield woken
    finally:
        for process in processes:
            process.terminate()
            process.join()


def run_clients(address: str, clients: int, woken: "Queue[Woken]") -> None:
    """One process of clients, until it is ended or the pool is."""
    asyncio.run(_run_clients(address, clients, woken))


async def _run_clients(address: str, clients: int, woken: "Queue[Woken]") -> None:
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # else the channels share a connection
    pools = [PoolClient(address, grpc.aio.insecure_channel(address, options=options)) for _ in range(CHANNELS)]
    await asyncio.gather(*(_wait_again_and_again(pools[number % CHANNELS], woken) for number in range(clients)))


async def _wait_again_and_again(pool: PoolClient, woken: "Queue[Woken]") -> None:
    while True:
        leases = (await pool.lease(1, wait_seconds=WAIT_SECONDS)).leases
        now = time.monotonic()
        for sample in leases[0].samples:
            woken.put((sample.sample_id, sample.attempt, now))


async def _wake_one(pool: PoolClient, held: list[SampleLease], woken: "Queue[Woken]") -> float:
    """Give back a sample that is held; seconds until a client has it, which is then held in its place."""
    began = time.monotonic()
    await _give_back(pool, [held.pop(0)])
    sample_id, attempt, ended = await asyncio.to_thread(woken.get, timeout=LIMIT_SECONDS)
    held.append(SampleLease(sample_id=sample_id, attempt=attempt))
    await asyncio.sleep(0.02)  # the client waits again by then
    return ended - began


async def _wake_all(pool: PoolClient, held: list[SampleLease], woken: "Queue[Woken]") -> float:
    """Give back as many samples as clients wait; seconds until the last was granted."""
    began = time.monotonic()
    await _give_back(pool, held)
    return max([(await asyncio.to_thread(woken.get, timeout=LIMIT_SECONDS))[2] for _ in held]) - began


async def _give_back(pool: PoolClient, samples: list[SampleLease]) -> None:
    request = pb.ReturnSamplesRequest(request_id=new_request_id(), model_tag=TAG, samples=samples)
    answer = await call(pool.loader.ReturnSamples, request, timeout_seconds=LIMIT_SECONDS)
    assert answer.returned == len(samples)


async def _cpu_percent(pids: list[int], seconds: float) -> float:
    """CPU time of the processes in the next `seconds`, in percent of one core."""
    await asyncio.sleep(SETTLE_SECONDS)
    cpu_began, began = sum(map(_cpu_seconds, pids)), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (sum(map(_cpu_seconds, pids)) - cpu_began) / (time.monotonic() - began)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


async def _ledger_calls_reach(redis: Redis, calls: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while await _ledger_calls(redis) < calls:
        assert time.monotonic() < deadline, "the clients do not call: see what they wrote above"
        await asyncio.sleep(0.1)


async def _ledger_calls(redis: Redis) -> int:
    return int((await redis.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0))


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--wakeups", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = measure(arguments.clients, arguments.wakeups, arguments.idle_seconds)
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
