"""Rewards that raise, return NaN, or run over their time: each experiment fails, and its status names the line."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.cluster import Namespace, condition
from tests.support.experiments import Running, applied, sort_digits

REWARD = "import time\n\n\ndef reward(task, text, is_finished):\n    "
BODIES = {
    "samples-raise": "raise ValueError('no grade')",
    "samples-nan": "return float('nan')",
    "samples-sleep": "time.sleep(3600)",
}
TOLD = {
    "samples-raise": ("REWARD_ERROR: ", "ValueError (", "mine.py:5): no grade", "fix the reward function"),
    "samples-nan": (
        "REWARD_ERROR: ",
        "mine.py:4) returned {'reward': nan}",
        "fix the reward function",
    ),
    "samples-sleep": ("TIMEOUT: ", "the reward at ", "mine.py:5 had not returned", "or raise rollout.timeoutSeconds"),
}


@pytest.fixture(scope="module")
def failing(namespace: Namespace) -> Iterator[dict[str, Running]]:
    """All experiments, applied at once."""
    with ExitStack() as stack:
        found = {}
        for name, body in BODIES.items():
            item = sort_digits(
                name,
                rollout__reward="mine:reward",
                rollout__timeoutSeconds=2,
                rollout__workers=64,
                trajectoryPool__batchSize=64,
                validation=None,
            )
            item["spec"]["code"]["mine.py"] = f"{REWARD}{body}\n"
            found[name] = stack.enter_context(applied(namespace, item))
        yield found


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.soak
def test_experiment_whose_samples_fail_ends_and_its_status_names_the_line_and_what_to_do(
    failing: dict[str, Running], name: str
) -> None:
    failed = failing[name].until("Failed")
    ended, warned = condition(failed, "Failed"), condition(failed, "SamplesFailing")
    assert ended["reason"] == "SamplesFailing"
    for part in (*TOLD[name], "100 % of the last "):
        assert part in ended["message"]
        assert part in warned["message"]
    assert "the limit is rollout.maxFailureRatio, 1" in ended["message"]
