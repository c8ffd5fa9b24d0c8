"""A run whose reward always raises says so while it goes on. How such runs end: test_hostile_code.py."""

from pathlib import Path

import pytest

from tests.support.patience import eventually
from tests.support.runs import NAME, nexrl, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

REWARD = """
def reward(task, text, is_finished):
    raise ValueError(f"no grade for [/{task['id']}]")
"""
FAILING = ("rollout.reward=broken:reward", "validation=null", "monitor.health.checkIntervalSeconds=1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a reward that always raises."""
    (tmp_path / "broken.py").write_text(REWARD)
    return tmp_path


@pytest.mark.soak
async def test_the_status_of_a_run_that_goes_on_shows_the_samples_that_fail(root: Path) -> None:
    goes_on = "monitor.errors.policy=continue"
    async with running(root, *FAILING, goes_on) as run:
        await run.until(lambda experiment: bool(experiment.failing_samples))
        status = nexrl(root, "status", NAME)
        assert (status.returncode, run.launcher.returncode) == (0, None)
        await eventually(lambda: "samples fail 100 % of the last " in (root / "output").read_text())
    told = " ".join(status.stdout.split())
    assert "copy-digits: Running" in told
    assert "samples fail: 100 % of the last " in told
    assert "ValueError (" in told
    assert "fix the reward function" in told
