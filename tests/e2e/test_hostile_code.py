"""Rewards that raise, loop, exit, fork, or use up memory or disk: each run ends, and its status says why.

Each takes a whole run, so only `make soak-runs` tries them here. In the gate, tests/integration/test_failing_samples.py
and, on a cluster, tests/kubernetes/test_hostile.py try what ends like them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from nexrl.errors import TrainingFailedError
from tests.support.runs import NAME, nexrl, processes_in, running

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SHORT = "rollout.timeoutSeconds=5"
"""Speed: of rewards that never return. Others have the usual limit, because a busy machine is slow."""
LIMITS = (
    "rollout.workers=64",
    "trajectoryPool.batchSize=64",
    "trajectoryPool.groupSize=64",  # a call of rewards for 64 samples: many that loop would starve the process
    "failurePolicy.maxRestarts=0",
)
OFTEN = ("validation=null", "monitor.health.checkIntervalSeconds=1")
HEAD = "import os, signal, time\n\n\ndef reward(task, text, is_finished):\n    "
SAMPLES_FAIL = ("Failed (SamplesFailing), exit code 10: 100 % of the last ", " of rollout-0: ")
FIX = ("REWARD_ERROR: reward of task train-", "fix the reward function; the limit is rollout.maxFailureRatio, 1")
TOO_LONG = ("no result after 5 s; the reward at {file}:5 had not returned", "or raise rollout.timeoutSeconds")
ENDED = ("Failed (ComponentFailed), exit code 10: rollout-0 ", "the limit of failurePolicy.maxRestarts")


@dataclass(frozen=True)
class Fault:
    """The body of a reward, and what the status of the run must say. `{file}` is the module of the reward."""

    body: str
    says: tuple[str, ...]
    settings: tuple[str, ...] = ()


FAULTS = {
    "raises": Fault(
        "raise ValueError(f'no grade for [/{task[\"id\"]}]')",
        (*SAMPLES_FAIL, *FIX, "ValueError ({file}:5): no grade for [/train-"),
    ),
    "returns NaN": Fault("return float('nan')", (*SAMPLES_FAIL, *FIX, "({file}:4) returned {{'reward': nan}}")),
    "loops": Fault("while True: pass", (*SAMPLES_FAIL, *TOO_LONG), (SHORT,)),
    "sleeps": Fault("time.sleep(3600)", (*SAMPLES_FAIL, *TOO_LONG), (SHORT,)),
    "exits": Fault("os._exit(42)", (*ENDED, "exit code 42, which is none of NexRL: your code or a library")),
    "is killed for memory": Fault(
        "os.kill(os.getpid(), signal.SIGKILL)",
        (*ENDED, "SIGKILL; unless somebody killed it, it used too much"),
    ),
    "uses up memory": Fault("return bytearray(10**15)", (*SAMPLES_FAIL, *FIX, "MemoryError ({file}:5)")),
    "forks": Fault("os.fork() or time.sleep(3600)\n    raise OSError", (*SAMPLES_FAIL, "{file}:")),
    "prints without end": Fault("print('x' * 100_000)\n    raise ValueError('y' * 10**6)", (*SAMPLES_FAIL, "yyy")),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_run_with_a_hostile_reward_ends_and_its_status_says_why(tmp_path: Path, name: str) -> None:
    fault, file = FAULTS[name], tmp_path / "mine.py"
    file.write_text(f"{HEAD}{fault.body}\n")
    async with running(tmp_path, "rollout.reward=mine:reward", *LIMITS, *fault.settings, *OFTEN) as run:
        await run.ends(TrainingFailedError.exit_code)
        assert not processes_in(tmp_path), "what user code has forked has ended, too"
    status = nexrl(tmp_path, "status", NAME).stdout
    output = (tmp_path / "output").read_text()
    for part in fault.says:
        assert part.format(file=file) in status
    assert max(map(len, (status, output))) < 20_000
    error = next(line for line in output.splitlines() if line.startswith("error: "))
    assert error.removeprefix("error: ") in status
