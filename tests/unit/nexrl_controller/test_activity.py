"""Modules, their work, and quiescence."""

import asyncio

import pytest

from nexrl.errors import ResourceExhaustedError
from nexrl_controller.activity import MAX_MODULES, Activity, Module, Work
from tests.support.clock import Clock

ROLLOUT = Module("rollout-0", role="rollout")
TRAINER = Module("trainer", role="trainer")


def work(activity: str, start: float = 1_000_000.0, waiting_on: str = "") -> Work:
    return Work(f"{activity}-{start}-{waiting_on}", activity, start, waiting_on)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(clock, timeout_seconds=30)


@pytest.mark.guide("M10", "M22", "D5")
def test_a_module_is_alive_while_it_is_heard_of(activity: Activity, clock: Clock) -> None:
    activity.heartbeat(ROLLOUT, [])
    clock.advance(29)
    activity.heartbeat(TRAINER, [])
    clock.advance(2)
    assert activity.mark_silent_dead() == ["rollout-0"]
    assert {module.name: module.is_alive for module in activity.modules} == {"rollout-0": False, "trainer": True}


def test_a_death_is_told_once_and_a_heartbeat_brings_back(activity: Activity, clock: Clock) -> None:
    activity.heartbeat(ROLLOUT, [])
    clock.advance(31)
    assert activity.mark_silent_dead() == ["rollout-0"]
    assert activity.mark_silent_dead() == []
    activity.heartbeat(ROLLOUT, [])
    assert activity.modules[0].is_alive


@pytest.mark.guide("M3", "M4", "M5")
def test_work_is_in_flight_between_its_start_and_its_end(activity: Activity) -> None:
    activity.start_work("script", "1", "evaluate")
    activity.start_work("script", "2", "evaluate")
    activity.end_work("1")
    activity.end_work("unknown")
    assert not activity.is_quiescent()
    activity.end_work("2")
    assert activity.is_quiescent()


def test_a_repeated_start_is_one_piece_of_work(activity: Activity) -> None:
    activity.start_work("script", "1", "evaluate")
    activity.start_work("script", "1", "evaluate")
    assert len(activity.modules[0].work) == 1


def test_work_that_a_heartbeat_no_longer_lists_has_ended(activity: Activity) -> None:
    activity.heartbeat(TRAINER, [work("train")])
    assert not activity.is_quiescent()
    activity.heartbeat(TRAINER, [])
    assert activity.is_quiescent()


@pytest.mark.guide("M9", "M18")
def test_rollout_workers_can_be_asked_for_alone(activity: Activity) -> None:
    activity.heartbeat(ROLLOUT, [])
    activity.heartbeat(TRAINER, [work("train")])
    assert activity.is_quiescent(rollout_only=True)
    assert not activity.is_quiescent()


def test_the_work_of_a_dead_module_is_not_in_flight(activity: Activity) -> None:
    activity.heartbeat(ROLLOUT, [work("rollout")])
    activity.mark_dead("rollout-0")
    assert activity.is_quiescent()


@pytest.mark.guide("M6")
async def test_a_wait_for_quiescence_ends_with_the_last_work(activity: Activity) -> None:
    activity.start_work("script", "1", "evaluate")
    waiting = asyncio.create_task(activity.wait_quiescent(rollout_only=False, wait_seconds=30))
    await asyncio.sleep(0)
    activity.end_work("1")
    assert await waiting


@pytest.mark.guide("M6")
async def test_a_wait_for_quiescence_is_false_when_it_is_over(activity: Activity) -> None:
    activity.start_work("script", "1", "evaluate")
    assert not await activity.wait_quiescent(rollout_only=False, wait_seconds=0)


@pytest.mark.guide("M7", "S12", "S8")
def test_the_summary_says_what_runs_and_what_waits(activity: Activity, clock: Clock) -> None:
    activity.heartbeat(ROLLOUT, [work("rollout"), work("rollout", 999_999.0), work("lease", waiting_on="pool")])
    activity.heartbeat(TRAINER, [])
    activity.heartbeat(Module("rollout-1"), [])
    activity.mark_dead("rollout-1")
    clock.advance(2)
    assert activity.summary().splitlines() == [
        "rollout-0: 2 x rollout for 3.0 s, 1 x lease for 2.0 s (waits on pool)",
        "trainer: idle",
        "rollout-1: not alive, last message 2 s ago",
    ]


def test_modules_are_limited(activity: Activity) -> None:
    for number in range(MAX_MODULES):
        activity.heartbeat(Module(f"script-{number}"), [])
    with pytest.raises(ResourceExhaustedError, match="one-too-many"):
        activity.heartbeat(Module("one-too-many"), [])
