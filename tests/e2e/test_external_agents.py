"""The example of an agent in a process of its own: it is trained, whoever is killed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.runs import NAME, Run, metrics_of, nexrl, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent-elsewhere"
STEPS = 12
SHORT = (f"metadata.name={NAME}", f"trainer.steps={STEPS}", "checkpoint.everySteps=4", "trajectoryPool.batchSize=32")
# Episodes of an agent or a gateway that was killed come back when these times have passed.
AFTER_KILLS = ("rollout.leaseSeconds=5", "rollout.timeoutSeconds=5")


@pytest.mark.guide("R3")
async def test_agent_and_gateway_may_be_killed_in_the_middle_of_episodes(tmp_path: Path) -> None:
    async with running(tmp_path, *SHORT, *AFTER_KILLS, file=EXAMPLE / "experiment.yaml") as run:
        first = await agent(run)
        await run.until_step(3)
        first.kill()  # its episodes end at their time limit, and are granted to the next agent
        await first.wait()
        second = await agent(run)
        before = await run.process("rollout-0")
        await run.until_step(6)
        os.kill(before.pid, signal.SIGKILL)  # its sessions are gone; their leases run out
        await run.process("rollout-0", other_than=before)
        await run.ends()
        second.kill()
        await second.wait()
    assert {line["step"] for line in metrics_of(run.folder) if "loss" in line} == {*range(1, STEPS + 1)}
    audit = nexrl(tmp_path, "audit", NAME)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "every sample is accounted for exactly once" in audit.stdout


@pytest.mark.guide("R3")
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js: `node` on the PATH")
async def test_an_agent_in_another_language_needs_http_alone(tmp_path: Path) -> None:
    async with running(tmp_path, *SHORT, "trainer.steps=4", file=EXAMPLE / "experiment.yaml") as run:
        early = await agent_in_javascript(run, LIMIT_SECONDS)  # before the gateway listens
        try:
            await run.until_step(1)
            late = await agent_in_javascript(run, 1.0)  # now the gateway listens, and does so until the run ends
            await run.ends()
            said, _ = await late.communicate()
        finally:
            early.kill()
            await early.wait()
    assert said.startswith(b"the run is over: ")
    assert {line["step"] for line in metrics_of(run.folder) if "loss" in line} == {1, 2, 3, 4}


async def agent(run: Run) -> asyncio.subprocess.Process:
    """Start the example's agent as soon as the run has an address for it."""
    script = str(EXAMPLE / "agent.py")
    return await asyncio.create_subprocess_exec(sys.executable, script, await address_of(run, "gateway"), cwd=run.root)


async def agent_in_javascript(run: Run, gateway_seconds: float) -> asyncio.subprocess.Process:
    """Start the example's other agent. It ends when the gateway has not answered for `gateway_seconds`."""
    script, address = str(EXAMPLE / "agent.mjs"), await address_of(run, "gateway_http")
    environment = {**os.environ, "GATEWAY_SECONDS": str(gateway_seconds)}
    return await asyncio.create_subprocess_exec("node", script, address, env=environment, stdout=subprocess.PIPE)


async def address_of(run: Run, name: str) -> str:
    endpoints = run.folder / "endpoints.json"
    await eventually(endpoints.exists, "the run has addresses")
    address: str = json.loads(endpoints.read_text())[name]
    return address
