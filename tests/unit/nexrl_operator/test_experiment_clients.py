"""The connection between the operator and an experiment's controller."""

import asyncio

import pytest

from nexrl_controller.events import VersionCommitted
from nexrl_operator import experiment_clients
from nexrl_operator.experiment_clients import ExperimentClients
from nexrl_operator.observed import Seen
from nexrl_operator.work_queue import Key
from tests.support.kubelet import Services, experiment_object
from tests.support.patience import eventually

KEY = "rl", "x"


async def test_one_word_that_cannot_be_read_does_not_end_the_listening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard, read, services = asyncio.Event(), experiment_clients.seen_of, Services()

    def unreadable(*_: object) -> Seen:
        monkeypatch.setattr(experiment_clients, "seen_of", read)
        heard.set()
        raise ValueError("a phase of tomorrow")

    def nobody(key: Key) -> None:
        pass

    monkeypatch.setattr(experiment_clients, "seen_of", unreadable)
    monkeypatch.setattr(experiment_clients, "UNREADABLE_SECONDS", 0.1)
    clients = ExperimentClients(services.connect, nobody, nobody)
    async with services.serving(experiment_object("x", "rl")) as controller:
        clients.follow(KEY)
        await heard.wait()
        await controller.apply(VersionCommitted(7))

        async def knows() -> bool:
            seen = clients.seen(KEY)
            return seen is not None and seen.policy_version == 7

        await eventually(knows)
        await clients.close()
    assert "a phase of tomorrow" in caplog.text
