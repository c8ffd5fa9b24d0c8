"""The trainer's log shows how training goes."""

import pytest

from nexrl_trainer.progress_log import ProgressLog


def test_the_first_and_the_last_of_short_steps_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = ProgressLog(4)
    for step in range(1, 5):
        progress.add(step, {"loss": 1 / 3, "reward_mean": step, "entropy": 9.0})
    assert caplog.messages == ["step 1 of 4: reward_mean 1, loss 0.3333", "step 4 of 4: reward_mean 4, loss 0.3333"]


def test_each_of_long_steps_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("nexrl_trainer.progress_log.LOG_SECONDS", 0.0)
    progress = ProgressLog(9)
    for step in (1, 2, 3):
        progress.add(step, {})
    assert [message.split(":")[0] for message in caplog.messages] == ["step 1 of 9", "step 2 of 9", "step 3 of 9"]
