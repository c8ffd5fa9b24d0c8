"""What the operator hears of an experiment's controller."""

import asyncio

import pytest

from nexrl_controller.events import VersionCommitted
from nexrl_controller.operator import followers as followers_module
from nexrl_controller.operator.followers import Followers
from nexrl_controller.operator.observed import Seen
from nexrl_controller.operator.work_queue import Key
from tests.support.eventually import eventually
from tests.support.kubelet import Services, experiment_object

KEY = "rl", "x"


async def test_one_word_that_cannot_be_read_does_not_end_the_listening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard, read, services = asyncio.Event(), followers_module.seen_of, Services()

    def unreadable(*_: object) -> Seen:
        monkeypatch.setattr(followers_module, "seen_of", read)
        heard.set()
        raise ValueError("a phase of tomorrow")

    def nobody(key: Key) -> None:
        pass

    monkeypatch.setattr(followers_module, "seen_of", unreadable)
    monkeypatch.setattr(followers_module, "AGAIN_SECONDS", 0.1)
    followers = Followers(services.connect, nobody, nobody)
    async with services.serving(experiment_object("x", "rl")) as controller:
        followers.follow(KEY)
        await heard.wait()
        await controller.apply(VersionCommitted(7))

        async def knows() -> bool:
            seen = followers.seen(KEY)
            return seen is not None and seen.policy_version == 7

        await eventually(knows)
        await followers.close()
    assert "a phase of tomorrow" in caplog.text
