"""The ledger's throughput, latency and memory, against raw Redis and a plain pool in a Ray actor, in one run.

    PYTHONPATH=. .venv/bin/python benchmarks/ledger.py [--rounds 3] [--batches 280] [--json FILE]

Throughput is that of the whole way of a trajectory: put, group of 8, batch of 64, acknowledged. A payload is a sample
of 1,024 tokens (ids, loss mask, float32 log-probs, span, reward, metadata, text), 8 KiB serialised. Of 8 client
processes 7 produce and 1 consumes, as rollout workers and a trainer do; each has 64 samples in hand, so that 8 groups
are complete at about the same time. The sides take turns, each on fresh processes; a rate leaves out the beginning and
the end. Every Redis is private, on a Unix socket, with the append-only file that `nexrl run` keeps (everysec).

ours    `nexrl serve trajectory-pool`, 1 or 4 processes, over TCP. Producers lease 64 samples, and put each group with
        one call of the SDK, which sends those together that come at the same time. The consumer is like a trainer: one
        part leases a batch and puts a train batch that has its sample ids and no tensors, the other acknowledges the
        step, and every 10 steps commits a checkpoint and moves the policy version. So everything counts: leases, the
        check of each token, groups, credit, idempotency, history.
raw     redis-py with hiredis: SETs in a pipeline; the consumer GETs 64 in a pipeline and deletes them. Names go from
        producer to consumer beside Redis, and bound how far the one is ahead. No lease, no group, no check.
ray     ledger_ray.py: an actor with dictionary and queue in memory. One call per trajectory, 8 at a time.

"One group at a time" is the same with producers that put a group, wait, and put the next: one PutSamples call a group,
or one pipeline of 8.

A put is timed at half of our rate: a PutSamples call with a group of 8, at random times, while the consumer goes on. A
raw SET is of one payload, as many of them a second as there are trajectories, and nothing else going on.

Memory is what Redis uses for a million samples, of 125,000 groups, that are leased, and that wait to be leased again;
and for produced ones, beyond raw keys with the same payloads.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import waiting_clients
from benchmarks.ledger_clients import BATCH_GROUPS, BATCH_SIZE, GROUP_SIZE, PAYLOAD_BYTES, Work
from benchmarks.ledger_runs import PRODUCERS, RAY_PYTHON, SKIPPED_BATCHES, run_pool, run_raw, run_raw_sets, run_ray
from nexrl.store import Redis, connect_redis
from nexrl_trajectory_pool.ledger import UNLIMITED, GrantedTask, Ledger, LedgerRules, ProducedSample
from tests.support.redis import running_redis

IN_HAND = BATCH_GROUPS
"""Groups that a producer has at a time."""
LATENCY_SECONDS = 20.0
OPEN_SAMPLES = 1_000_000
STORED_SAMPLES = 32_768
SAMPLES_PER_CALL = 1000


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=280, help="of each run")
    parser.add_argument("--json", type=Path, help="where everything that was measured goes")
    arguments = parser.parse_args()
    if not RAY_PYTHON.exists():
        sys.exit("Ray is not installed: run `make bench-ledger`")
    batches = SKIPPED_BATCHES + arguments.batches
    rounds = [measure_round(number, batches) for number in range(1, arguments.rounds + 1)]
    rate = median(entry["ours, 1 process"]["rate"] for entry in rounds)
    found = {
        "machine": machine(),
        "rounds": rounds,
        "latency": measure_latency(rate / 2),
        "memory": asyncio.run(measure_memory()),
        "waiting": waiting_clients.measure(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print_table(found)


def measure_round(number: int, batches: int) -> dict[str, Any]:
    """Each side once: rate, and CPU microseconds per trajectory where that is ours to see."""
    found: dict[str, Any] = {}
    for together, form in ((IN_HAND, ""), (1, ", one group at a time")):
        work = Work(batches * BATCH_GROUPS, together)  # more than any of them will come to
        found[f"raw{form}"] = vars(run_raw(work, batches))
        found[f"ours, 1 process{form}"] = vars(run_pool(1, work, batches))
    found["ours, 4 processes"] = vars(run_pool(4, Work(batches * BATCH_GROUPS, IN_HAND), batches))
    found["ray"] = run_ray(batches)
    for entry in found.values():
        entry.pop("put_seconds", None)
    rates = ", ".join(f"{side} {entry['rate']:,.0f}" for side, entry in found.items())
    print(f"round {number}, trajectories/s: {rates}", flush=True)
    return found


def measure_latency(rate: float) -> dict[str, float]:
    """99th percentiles (milliseconds) of a put and of a raw SET, at `rate` trajectories per second."""
    groups = int(rate * LATENCY_SECONDS / GROUP_SIZE / PRODUCERS / BATCH_GROUPS) * BATCH_GROUPS
    work = Work(groups, puts_per_second=rate / GROUP_SIZE / PRODUCERS)
    put = run_pool(1, work, PRODUCERS * groups // BATCH_GROUPS)
    set_seconds = run_raw_sets(Work(groups * GROUP_SIZE, puts_per_second=rate / PRODUCERS))
    return {
        "trajectories_per_second": rate,
        **{f"put_{name}": value for name, value in percentiles(put.put_seconds).items()},
        **{f"set_{name}": value for name, value in percentiles(set_seconds).items()},
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


async def measure_memory() -> dict[str, float]:
    """Bytes per sample in Redis: leased, open, and produced; and per raw key with the same payload."""
    with running_redis() as url:
        connection = await connect_redis(url)
        leased, opened = await open_bytes(connection)
        produced, raw = await stored_bytes(connection)
        await connection.aclose()
    return {"leased_bytes": leased, "open_bytes": opened, "produced_bytes": produced, "raw_key_bytes": raw}


async def open_bytes(connection: Redis) -> tuple[float, float]:
    """Bytes per sample of a million that are leased, and that wait to be leased again."""
    ledger, before = ledger_of(connection), await used_bytes(connection)
    leases: list[GrantedTask] = []
    for _ in range(OPEN_SAMPLES // SAMPLES_PER_CALL):
        leases += (await ledger.lease_tasks("", SAMPLES_PER_CALL, 3600.0)).tasks
    leased = await used_bytes(connection)
    for lease in leases:
        await ledger.return_samples("", lease.samples)
    opened = await used_bytes(connection)
    await connection.flushall()
    return (leased - before) / OPEN_SAMPLES, (opened - before) / OPEN_SAMPLES


async def stored_bytes(connection: Redis) -> tuple[float, float]:
    """Bytes per produced sample, and per raw key with the same payload."""
    ledger, before, payload = ledger_of(connection), await used_bytes(connection), os.urandom(PAYLOAD_BYTES)
    for _ in range(STORED_SAMPLES // SAMPLES_PER_CALL):
        for lease in (await ledger.lease_tasks("", SAMPLES_PER_CALL, 3600.0)).tasks:
            rows = [ProducedSample(sample, attempt, None, lease.task, 0, payload) for sample, attempt in lease.samples]
            await ledger.put_samples("", rows)
    produced = (await used_bytes(connection) - before) / (await ledger.state())["ready"]
    await connection.flushall()
    before = await used_bytes(connection)
    for number in range(STORED_SAMPLES):
        await connection.set(f"{number // GROUP_SIZE}:{number % GROUP_SIZE}", payload)
    return produced, (await used_bytes(connection) - before) / STORED_SAMPLES


def ledger_of(connection: Redis) -> Ledger:
    """A ledger whose credit has no end."""
    rules = LedgerRules(
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        samples_per_task=GROUP_SIZE,
        positions=UNLIMITED,
        staleness=OPEN_SAMPLES,
        scoped=True,
        release_incomplete=True,
        max_attempts=3,
        max_queued=2,
    )
    return Ledger(connection, "nexrl:{bench/default}:", rules)


async def used_bytes(connection: Redis) -> float:
    """What Redis has allocated for data."""
    return float((await connection.info("memory"))["used_memory_dataset"])


# the table


def print_table(found: dict[str, Any]) -> None:
    """The figures, each with its peer, the ratio and what is wanted; and what it ran on."""
    rounds, latency, memory, waiting = (found[name] for name in ("rounds", "latency", "memory", "waiting"))

    def throughput(name: str, side: str, peer: str, wanted: str, rate: str = "rate") -> tuple[str, ...]:
        ours, theirs = median(r[side]["rate"] for r in rounds), median(r[peer][rate] for r in rounds)
        ratio = median(r[side]["rate"] / r[peer][rate] for r in rounds)
        return (name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ratio:.2f}", wanted)

    more = max(0.0, memory["produced_bytes"] - memory["raw_key_bytes"])
    rows = [
        ("figure", "ours", "peer", "ratio", "wanted"),
        throughput("trajectories/s, 1 pool process; raw redis-py", "ours, 1 process", "raw", ">= 0.5"),
        throughput("trajectories/s, 4 pool processes; raw redis-py", "ours, 4 processes", "raw", ">= 0.5"),
        throughput("trajectories/s, 1 pool process; Ray actor", "ours, 1 process", "ray", ">= 5"),
        throughput("trajectories/s, 4 pool processes; Ray actor", "ours, 4 processes", "ray", ">= 5"),
        throughput("  the same; Ray called once per group", "ours, 1 process", "ray", "", "rate_call_per_group"),
        throughput(
            "  one group at a time; raw redis-py",
            "ours, 1 process, one group at a time",
            "raw, one group at a time",
            "",
        ),
        (
            "p99 of a put at half of that load, ms; raw SET",
            f"{latency['put_p99_ms']:.2f}",
            f"{latency['set_p99_ms']:.2f}",
            f"{latency['put_p99_ms'] / latency['set_p99_ms']:.1f}",
            "<= 10",
        ),
        ("bytes in Redis per leased sample, of a million", f"{memory['leased_bytes']:.0f}", "", "", "<= 400"),
        ("bytes in Redis per open sample, of a million", f"{memory['open_bytes']:.0f}", "", "", "<= 400"),
        ("bytes per produced sample beyond its raw key", f"{more:.0f}", "", "", ""),
        (
            f"{waiting['clients']:,.0f} waiting clients, % CPU; none",
            f"{waiting['cpu_percent_waiting']:.1f}",
            f"{waiting['cpu_percent_idle']:.1f}",
            "",
            "no more",
        ),
        ("  wake-up of one, ms (p99)", f"{waiting['wakeup_p99_ms']:.1f}", "", "", "<= 20"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
    print(f"medians of {len(rounds)} rounds; {found['machine']}")


def machine() -> str:
    """What it ran on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{os.cpu_count()} CPUs ({model}), load average {os.getloadavg()[0]:.1f} when the throughput was measured"


if __name__ == "__main__":
    main()
