"""A stall is found, its blocking edge named, and nothing else is taken for one."""

import pytest

from nexrl.sample_states import ATTEMPT
from nexrl_controller.activity import Module, Work
from nexrl_controller.wait_graph import find_stall

SINCE = 1000.0


def module(name: str, *work: Work, role: str = "") -> Module:
    return Module(name, role=role or name, work={piece.token: piece for piece in work}, is_alive=True)


def wait(on: str, activity: str = "wait") -> Work:
    return Work(f"{activity}-{on}", activity, SINCE + 1, waiting_on=on)


def busy(activity: str, start: float = SINCE + 1) -> Work:
    return Work(activity, activity, start)


@pytest.mark.guide("S5", "S8")
def test_the_blocking_edge_is_the_end_of_the_trainers_chain() -> None:
    stall = find_stall(
        [
            module("rollout-0", wait("inference", "generate"), role="rollout"),
            module("trainer", wait("rollout", "lease batch")),
            module("inference-0", wait("weight-sync", "load"), role="inference"),
        ],
        SINCE,
    )
    assert stall is not None
    assert stall.startswith("blocked at inference-0 -> weight-sync: ")
    assert "trainer (lease batch) waits on rollout" in stall


def test_a_circle_of_waits_is_followed_once() -> None:
    stall = find_stall([module("trainer", wait("rollout")), module("rollout", wait("trainer"))], SINCE)
    assert stall is not None
    assert stall.startswith("blocked at rollout -> trainer")


def test_nothing_stalls_while_a_module_works() -> None:
    assert find_stall([module("trainer", wait("rollout")), module("rollout", busy("generate"))], SINCE) is None


def test_an_old_frame_around_a_wait_does_not_hide_the_stall() -> None:
    rollout = module("rollout", busy("rollout", start=SINCE - 1), wait("inference"))
    assert find_stall([rollout], SINCE) is not None


def test_attempts_that_begin_again_and_again_do_not_hide_the_stall() -> None:
    rollout = module("rollout-0", busy(ATTEMPT), wait("the reward", "user code"), role="rollout")
    stall = find_stall([module("trainer", wait("rollout")), rollout], SINCE)
    assert stall is not None
    assert stall.startswith("blocked at rollout-0 -> the reward")


def test_young_work_beside_a_wait_is_progress() -> None:
    assert find_stall([module("rollout", busy("score"), wait("inference"))], SINCE) is None


def test_idle_and_dead_modules_do_not_stall() -> None:
    dead = module("rollout", wait("inference"))
    dead.is_alive = False
    assert find_stall([module("trajectory-pool"), dead], SINCE) is None
