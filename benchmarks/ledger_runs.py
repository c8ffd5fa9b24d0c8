"""Runs of `ledger.py`: each starts the servers and client processes of one side, and ends them."""

import asyncio
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeAlias

import redis

from benchmarks.ledger_clients import (
    AHEAD_BATCHES,
    BATCH_GROUPS,
    BATCH_SIZE,
    GROUP_SIZE,
    TAG,
    Handover,
    Work,
    pool_consumer,
    pool_producer,
    raw_consumer,
    raw_producer,
    raw_setter,
)
from nexrl.local.components import LOOPBACK, free_ports
from nexrl.rpc.client import call, connect
from nexrl.spec import Experiment, dump_resolved
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from tests.support.redis import running_redis
from tests.support.services import small_experiment

ROOT = Path(__file__).resolve().parents[1]
RAY_PYTHON = ROOT / ".venv-ray/bin/python"
PRODUCERS = 7
SKIPPED_BATCHES = 24
"""Left out at the beginning of a run, until producers are as far ahead as they may be."""
START_SECONDS = 60.0
END_SECONDS = 2.0
"""In which producers end whose work is done; the others have more than they will come to."""
RAY_SECONDS = 600.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

Started: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""What a process runs, and with which arguments."""

_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Run:
    """Result of a run of clients: trajectories per second, CPU time by kind of process, and how long puts took."""

    rate: float
    cpu_us: dict[str, float]
    """Microseconds per trajectory."""
    put_seconds: tuple[float, ...]


def run_raw(work: Work, batches: int) -> Run:
    """The raw side, until `batches` are used up."""
    handover = Handover(_processes.SimpleQueue(), _processes.Semaphore(AHEAD_BATCHES * BATCH_GROUPS))
    with running_redis() as url:
        return run_clients(
            lambda number, out: (raw_producer, (url, number, work, out, handover)),
            lambda out: (raw_consumer, (url, batches, out, handover)),
            batches,
            {"redis": [redis_pid(url)]},
        )


def run_pool(count: int, work: Work, batches: int) -> Run:
    """Our side, with `count` pool processes, until `batches` are used up."""
    with running_redis() as url, running_pools(count, url, batches + 2 * AHEAD_BATCHES) as (target, pids):
        return run_clients(
            lambda number, out: (pool_producer, (target, number, work, out)),
            lambda out: (pool_consumer, (target, batches, out)),
            batches,
            {"redis": [redis_pid(url)], "pool": pids},
        )


def run_ray(batches: int) -> dict[str, float]:
    """Ray's side, in its own virtual environment."""
    command = [RAY_PYTHON, ROOT / "benchmarks/ledger_ray.py", "--producers", str(PRODUCERS), "--batches", str(batches)]
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=RAY_SECONDS, check=False
    )
    if ended.returncode != 0:
        sys.exit(f"ledger_ray.py ended with code {ended.returncode}:\n{ended.stderr[-3000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return {"rate": found["call_per_trajectory"], "rate_call_per_group": found["call_per_group"]}


def run_raw_sets(work: Work) -> tuple[float, ...]:
    """How long each SET took (seconds) when producers do nothing else."""
    durations: SimpleQueue[list[float]] = _processes.SimpleQueue()
    with running_redis() as url:
        setters = start([(raw_setter, (url, number, work, durations)) for number in range(PRODUCERS)])
        found = tuple(seconds for _ in setters for seconds in durations.get())
        for process in setters:
            process.join()
    return found


def run_clients(
    producer: Callable[[int, Any], Started],
    consumer: Callable[[Any], Started],
    batches: int,
    servers: dict[str, list[int]],
) -> Run:
    """Producers and a consumer, until it has had its batches; `servers` are process ids by kind."""
    durations: SimpleQueue[list[float]] = _processes.SimpleQueue()
    times, sender = _processes.Pipe(duplex=False)
    producers = start([producer(number, durations) for number in range(PRODUCERS)])
    consumers = start([consumer(sender)])
    kinds = {**servers, "producers": pids_of(producers), "consumer": pids_of(consumers)}
    ends, cpu = [], []
    for batch in range(batches):
        ends.append(next_end(times, [*producers, *consumers]))
        if batch in (SKIPPED_BATCHES, batches - 1):
            cpu.append({kind: sum(map(cpu_seconds, pids)) for kind, pids in kinds.items()})
    trajectories = BATCH_SIZE * (batches - 1 - SKIPPED_BATCHES)
    return Run(
        trajectories / (ends[-1] - ends[SKIPPED_BATCHES]),
        {kind: 1e6 * (cpu[1][kind] - cpu[0][kind]) / trajectories for kind in kinds},
        end(producers, consumers, durations),
    )


def end(
    producers: Sequence[BaseProcess], consumers: Sequence[BaseProcess], durations: "SimpleQueue[list[float]]"
) -> tuple[float, ...]:
    """Wait until the clients have ended. Returns the seconds of each put of finished producers."""
    for process in consumers:
        process.join()
    deadline = time.monotonic() + END_SECONDS
    found: list[float] = []
    for process in producers:
        process.join(max(0.0, deadline - time.monotonic()))
        process.terminate()
        process.join()
    while not durations.empty():
        found += durations.get()
    return tuple(found)


def experiment(steps: int) -> Experiment:
    """Credit for AHEAD_BATCHES batches, and token ids of two bytes."""
    alphabet = "".join(chr(0x100 + number) for number in range(512))
    return small_experiment(
        "bench",
        model={"tag": TAG, "scratch": {"alphabet": alphabet, "hiddenSize": 16, "heads": 2, "maxPositions": 2048}},
        trajectoryPool={"batchSize": BATCH_SIZE, "groupSize": GROUP_SIZE},
        trainBatchPool={"maxQueued": AHEAD_BATCHES},
        weightSync={"mode": "fully-async", "stalenessThreshold": AHEAD_BATCHES},
        inference={"maxTokensPerRow": 2048},
        trainer={"steps": steps},
    )


@contextmanager
def running_pools(count: int, redis_url: str, steps: int) -> Iterator[tuple[str, list[int]]]:
    """Pool processes that serve; a gRPC target that takes them in turn, and their process ids."""
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as folder:
        file = Path(folder) / "experiment.yaml"
        file.write_text(dump_resolved(experiment(steps)))
        addresses = [f"{LOOPBACK}:{port}" for port in free_ports(count)]
        pools = [start_pool(file, redis_url, number, address) for number, address in enumerate(addresses)]
        try:
            for address in addresses:
                asyncio.run(wait_until_it_serves(address))
            yield f"ipv4:{','.join(addresses)}", [pool.pid for pool in pools]
        finally:
            for pool in pools:
                pool.terminate()
            for pool in pools:
                pool.wait()


def start_pool(file: Path, redis_url: str, number: int, address: str) -> "subprocess.Popen[bytes]":
    """`nexrl serve trajectory-pool`."""
    environment = {
        "NEXRL_EXPERIMENT_FILE": str(file),
        "NEXRL_RUN_DIR": str(file.parent),
        "NEXRL_INSTANCE": f"trajectory-pool-{number}",
        "NEXRL_LISTEN": address,
        "NEXRL_REDIS_URL": redis_url,
    }
    with (file.parent / f"trajectory-pool-{number}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nexrl.cli", "serve", "trajectory-pool"],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )


async def wait_until_it_serves(address: str) -> None:
    """Ask until it answers."""
    async with connect(address) as channel:
        request = pool_pb.GetTrajectoryPoolStateRequest()
        await call(TrajectoryPoolServiceStub(channel).GetTrajectoryPoolState, request, timeout_seconds=START_SECONDS)


def start(targets: Sequence[Started]) -> list[BaseProcess]:
    """A process for each; they end with this one."""
    processes: list[BaseProcess] = [
        _processes.Process(target=target, args=args, daemon=True) for target, args in targets
    ]
    for process in processes:
        process.start()
    return processes


def next_end(times: Connection, processes: Sequence[BaseProcess]) -> float:
    """When the next batch was used up; ends this process when one of the others has failed."""
    running = list(processes)
    while times not in (ready := wait([times, *(process.sentinel for process in running)])):
        failed = [process.name for process in running if process.exitcode]
        if failed:
            sys.exit(f"{', '.join(failed)} failed")
        running = [process for process in running if process.sentinel not in ready]
    used_up: float = times.recv()
    return used_up


def pids_of(processes: Sequence[BaseProcess]) -> list[int]:
    """Their process ids."""
    return [process.pid for process in processes if process.pid is not None]


def redis_pid(url: str) -> int:
    """Process id of a server."""
    with redis.Redis.from_url(url) as connection:
        return int(connection.info("server")["process_id"])


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far; no number once it has ended."""
    if not Path(f"/proc/{pid}/stat").exists():
        return math.nan
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
