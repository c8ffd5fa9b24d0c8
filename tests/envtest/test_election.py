"""Of several operators one leads, and it knows when it does no more."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import aiohttp
import pytest

from nexrl.k8s.api import LEASE, Api, Object
from nexrl_operator import election as election_module
from nexrl_operator.election import LEASE_SECONDS, RENEW_SECONDS, Election, LeadershipLostError
from tests.support.kubelet import Services
from tests.support.operator import operating
from tests.support.patience import eventually


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election_module, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(election_module, "RENEW_SECONDS", 40.0)
    monkeypatch.setattr(election_module, "LEASE_SECONDS", 60)


@dataclass
class Time:
    """The module `time` of the elections: a test lets time pass."""

    passed_seconds: float = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The time of all candidates."""
    monkeypatch.setattr(election_module, "time", found := Time())
    return found


@pytest.fixture
def lease() -> str:
    """A name that no other test takes."""
    return f"lease-{uuid4().hex[:8]}"


@asynccontextmanager
async def candidate(api: Api, lease: str, holder: str) -> AsyncIterator[Election]:
    """One that wins as soon as it can."""
    election = Election(api, "default", lease, holder)
    winning = asyncio.create_task(election.win())
    try:
        yield election
    finally:
        winning.cancel()
        await asyncio.gather(winning, return_exceptions=True)


async def until_leading(election: Election) -> None:
    async def leads() -> bool:
        return election.is_leader

    await eventually(leads)


async def until_it_has_tried(election: Election) -> None:
    async def has_seen_another() -> bool:
        return bool(election._seen[0])

    await eventually(has_seen_another)


async def until_it_sees_a_renewal(election: Election) -> None:
    seen = election._seen

    async def has_seen_it() -> bool:
        return election._seen != seen or election.is_leader

    await eventually(has_seen_it)


async def test_the_second_operator_is_ready_and_leads_when_the_first_ends(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = Services()
    async with AsyncExitStack() as until_the_first_ends:
        first = await until_the_first_ends.enter_async_context(
            operating(api, namespace, services, pod_name="operator-1")
        )
        await until_leading(first.election)
        async with operating(api, namespace, services, pod_name="operator-2") as second:
            await until_it_has_tried(second.election)
            assert second.is_ready()
            assert not second.election.is_leader
            await until_the_first_ends.aclose()
            assert not first.election.is_leader
            await until_leading(second.election)


async def test_a_lease_that_is_not_renewed_is_taken_over(api: Api, lease: str, clock: Time) -> None:
    async with candidate(api, lease, "first") as first:
        await until_leading(first)
        async with candidate(api, lease, "second") as second:
            await until_it_has_tried(second)
            assert not second.is_leader
            clock.passed_seconds += election_module.LEASE_SECONDS + 1
            await until_leading(second)
        with pytest.raises(LeadershipLostError):
            await first.keep()
        assert not first.is_leader


async def test_one_whose_lease_another_holds_leads_no_more(api: Api, lease: str) -> None:
    async with candidate(api, lease, "first") as first:
        await until_leading(first)
        await api.merge(LEASE, "default", lease, {"spec": {"holderIdentity": "second"}})
        with pytest.raises(LeadershipLostError, match="second holds it"):
            await first.keep()
        assert not first.is_leader


async def test_a_lease_that_is_renewed_is_not_taken_over(api: Api, lease: str, clock: Time) -> None:
    async with candidate(api, lease, "first") as first:
        await until_leading(first)
        keeping = asyncio.create_task(first.keep())
        async with candidate(api, lease, "second") as second:
            for _ in range(4):
                await until_it_has_tried(second)
                clock.passed_seconds += election_module.LEASE_SECONDS / 2
                await until_it_sees_a_renewal(second)
            assert first.is_leader
            assert not second.is_leader
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def refused(*_: object, **__: object) -> Object:
    raise aiohttp.ClientConnectionError("no route")


async def unanswered(*_: object, **__: object) -> Object:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("request_", [refused, unanswered])
async def test_one_that_cannot_renew_leads_no_more_before_another_may(
    api: Api, lease: str, monkeypatch: pytest.MonkeyPatch, request_: Callable[..., Awaitable[Object]]
) -> None:
    assert RENEW_SECONDS < LEASE_SECONDS, "with these constants another may lead before"
    monkeypatch.setattr(election_module, "RETRY_SECONDS", 1.5)
    monkeypatch.setattr(election_module, "RENEW_SECONDS", 2.0)
    async with candidate(api, lease, "first") as first:
        await until_leading(first)
        found = await api.get(LEASE, "default", lease)
        assert found is not None
        monkeypatch.setattr(api, "request", request_)
        async with asyncio.timeout(found["spec"]["leaseDurationSeconds"]):
            with pytest.raises(LeadershipLostError, match="could not be renewed"):
                await first.keep()
        assert not first.is_leader
