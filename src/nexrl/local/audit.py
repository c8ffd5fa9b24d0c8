"""`nexrl audit`: counts every sample of a run again from the records of its ledger, and prints the balance."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from nexrl.errors import CheckFailedError
from nexrl.local.ledger_view import pool_of
from nexrl.rpc.client import call, connect
from nexrl.sample_states import IN_FLIGHT
from nexrl.v1 import trajectory_pool_service_pb2 as pb
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub

CALL_SECONDS = 300.0


async def print_audit(run: Path, pool: str | None) -> None:
    """Print the balance of the run's ledger, or of the pool at address `pool`, and each finding.

    Raises CheckFailedError if there are findings, and NotFoundError if the folder has no run.
    """
    async with _channel(run, pool) as channel:
        stub = TrajectoryPoolServiceStub(channel)
        answer = await call(stub.AuditLedger, pb.AuditLedgerRequest(), timeout_seconds=CALL_SECONDS)
    for audit in answer.audits:
        sys.stdout.write("\n".join(report(audit)) + "\n")
    wrong = sum(audit.findings_total for audit in answer.audits)
    if wrong:
        raise CheckFailedError(f"the ledger does not balance: {wrong} findings")


def report(audit: pb.LedgerAudit) -> list[str]:
    """Return lines with the balance and the findings."""
    samples = audit.samples
    dropped = sum(audit.dropped.values())
    in_flight = {name: samples[name] for name in IN_FLIGHT if samples[name]}
    lines = [
        f"{audit.model_tag}: granted {samples['granted']} = trained {samples['trained']} + dropped {dropped}"
        f"{_listed(audit.dropped)} + in flight {sum(in_flight.values())}{_listed(in_flight)}",
        f"{samples['durable']} of the trained samples are in a committed checkpoint",
    ]
    lines += [f"{finding.subject}: {finding.problem}" for finding in audit.findings]
    if audit.findings_total > len(audit.findings):
        lines.append(f"... and {audit.findings_total - len(audit.findings)} more")
    if not audit.findings_total:
        lines.append("every sample is accounted for exactly once")
    return lines


@asynccontextmanager
async def _channel(run: Path, pool: str | None) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(pool) if pool else pool_of(run) as channel:
        yield channel


def _listed(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})" if counts else ""
