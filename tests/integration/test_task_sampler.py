"""data.sampler: tasks are left out when their turn comes, by the rewards of their newest grants."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nexrl.errors import FailedPreconditionError, NotFoundError
from nexrl.rpc.client import call, connect
from nexrl.spec import with_folder
from nexrl.store import Redis
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceStub
from nexrl_data_reader import server as data_reader
from nexrl_trajectory_pool.ledger import Drawn, ProducedSample
from tests.support.ledger import Make, produced
from tests.support.patience import LIMIT_SECONDS
from tests.support.pool import Deploy, PoolClient, scored, trajectory
from tests.support.services import running_service, small_experiment

if TYPE_CHECKING:
    from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceAsyncStub

EASY = {"type": "difficulty", "easyReward": 1.0, "easyProbability": 0.01, "hardProbability": 1.0}
TWO_TASKS = {"type": "mock", "size": 2, "shuffle": False}
"""Endless epochs of two tasks."""


def drawn(*names: str | bool, first: int = 0) -> Drawn:
    return Drawn(first, names)  # type: ignore[arg-type]


@pytest.mark.guide("E1")
async def test_tasks_that_are_left_out_are_passed_over_and_cost_no_credit(make: Make) -> None:
    ledger = make()
    grant = await ledger.lease_tasks("", 64, 60, drawn("a", False, False, "d", "e"))
    assert [(task.task, task.position) for task in grant.tasks] == [("0", 0), ("1", 3)]
    state = await ledger.state()
    assert (state["cursor"], state["tasks_left_out"], state["granted"], state.credit) == (4, 2, 4, 0)
    assert not (await ledger.audit()).findings


async def test_no_task_is_granted_that_was_not_drawn(make: Make) -> None:
    ledger = make()
    for not_drawn in (drawn(), drawn("b", first=1), drawn(False)):
        grant = await ledger.lease_tasks("", 64, 60, not_drawn)
        assert (grant.tasks, grant.waiting_on) == ((), "draw")
    assert await ledger.cursor() == 1  # the last draw left the first task out
    await ledger.add_task("", b"{}", front=True)
    (added,) = (await ledger.lease_tasks("", 2, 60, drawn())).tasks  # what is added by hand is never left out
    assert added.position == -1


async def test_without_credit_nobody_waits_for_a_draw(make: Make) -> None:
    ledger = make()
    await ledger.lease_tasks("", 64, 60, drawn("a", "b"))
    assert (await ledger.lease_tasks("", 64, 60, drawn(first=2))).waiting_on == "credit"


async def test_data_whose_last_tasks_are_left_out_is_exhausted(make: Make) -> None:
    ledger = make(positions=3)
    await ledger.put_samples("", produced(await ledger.lease_tasks("", 64, 60, drawn("a", False, False))))
    assert (await ledger.lease_tasks("", 64, 60, drawn(False, False, first=1))).exhausted
    _, exhausted = await ledger.lease_batch("", 60)
    assert not exhausted  # one group is ready: the last, smaller batch


async def test_the_trainer_learns_at_once_that_the_last_tasks_are_left_out(make: Make, redis: Redis) -> None:
    ledger = make(positions=1)
    messages = redis.pubsub()
    await messages.subscribe(ledger.wake_channel)
    await ledger.lease_tasks("", 64, 60, drawn(False))
    topics = [await messages.get_message(timeout=10) for _ in range(4)]
    await messages.aclose()  # type: ignore[no-untyped-call]
    assert {message["data"] for message in topics[1:] if message} == {b"tasks", b"batch", b"train"}


@pytest.mark.parametrize("max_refilled", [0, 9])
async def test_the_reward_of_a_task_is_the_mean_of_its_newest_grant(make: Make, max_refilled: int) -> None:
    ledger = make(staleness=9, max_refilled=max_refilled, max_attempts=1)
    assert await ledger.task_rewards(["a", "b"]) == [None, None]
    grant = await ledger.lease_tasks("", 4, 60, drawn("a", "b"))
    results = produced(grant, rewards={"0.0": "1.0", "0.1": "0.5", "1.0": "2.0", "1.1": "2.0"})
    await ledger.put_samples("", results[:1])
    assert await ledger.task_rewards(["a", "b"]) == [None, None]  # its grant has not ended
    await ledger.put_samples("", results[1:])
    assert await ledger.task_rewards(["a", "b"]) == [0.75, 2.0]
    again = produced(await ledger.lease_tasks("", 2, 60, drawn("a", first=2)), rewards={"2.0": "0.0", "2.1": "0.0"})
    await ledger.put_samples("", again)
    assert await ledger.task_rewards(["a", "b"]) == [0.0, 2.0]


async def test_a_sample_that_fails_has_no_part_in_the_reward_of_its_task(make: Make) -> None:
    ledger = make(max_attempts=1)
    grant = await ledger.lease_tasks("", 4, 60, drawn("a", "b"))
    scored, *others = produced(grant, rewards={"0.0": "3.0"})
    await ledger.put_samples("", [scored, *(ProducedSample(s.sample_id, s.attempt, "env_error") for s in others)])
    assert await ledger.task_rewards(["a", "b"]) == [3.0, None]


async def granted(pool: PoolClient, rewards: dict[str, float]) -> list[str]:
    """Lease and score all that the credit allows. Returns the ids of the tasks in the data."""
    names = []
    while leases := (await pool.lease()).leases:
        for lease in leases:
            names.append(lease.task.task_id)
            reward = trajectory(rewards[lease.task.task_id])
            await pool.put([scored(sample, reward) for sample in lease.samples])
    return names


@pytest.mark.guide("E1")
async def test_easy_tasks_get_fewer_grants(deploy: Deploy) -> None:
    weight_sync = {"mode": "batch-async", "stalenessThreshold": 9}
    pool = await deploy(data={**TWO_TASKS, "sampler": EASY}, weightSync=weight_sync, trainer={"steps": 99})
    names = await granted(pool, {"train-0": 1.0, "train-1": 0.5})
    assert len(names) == 20  # the credit: 10 batches of 4 samples
    assert names.count("train-1") >= 15
    assert (await pool.audit()).findings_total == 0


FUNCTION = """
def share(task, reward):
    if reward == 0.5:
        raise ValueError(task["prompt"])
    return 0.01 if task["id"] == "train-0" else 1
"""


async def test_the_users_function_decides_and_is_named_when_it_fails(deploy: Deploy, tmp_path: Path) -> None:
    (tmp_path / "sampling.py").write_text(FUNCTION)
    sampler = {"type": "python", "function": "sampling:share"}
    pool = await deploy(data={**TWO_TASKS, "sampler": sampler}, trajectoryPool={"batchSize": 2, "groupSize": 2})
    assert await granted(pool, {"train-1": 0.5}) == ["train-1"]
    await pool.set_version(1)
    named = r"spec.data.sampler.function: sampling:share\(train-1, 0.5\) raised ValueError"
    with pytest.raises(FailedPreconditionError, match=named):
        await pool.lease()


SHARES = """
import time
from pathlib import Path

def nothing(task, reward): return 0
def text(task, reward): return "0.5"
def not_a_number(task, reward): return float("nan")
def too_much(task, reward): return 1.5

def hangs(task, reward):
    while not Path(__file__).with_name("end").exists():
        time.sleep(0.01)
    return 1
"""


@asynccontextmanager
async def reading(folder: Path, function: str) -> AsyncIterator["DataReaderServiceAsyncStub"]:
    """Run a data reader whose sampler is this function of SHARES."""
    (folder / "shares.py").write_text(SHARES)
    sampler = {"type": "python", "function": f"shares:{function}"}
    experiment = with_folder(small_experiment(data={"type": "mock", "sampler": sampler}), folder)
    async with running_service(folder, data_reader.start, experiment) as process, connect(process.address) as channel:
        yield DataReaderServiceStub(channel)


ONE_TASK = pb.GetProbabilitiesRequest(tasks=[pb.TaskReward(task_id="train-3")])


@pytest.mark.parametrize(
    ("function", "returned"), [("nothing", "0"), ("text", "'0.5'"), ("not_a_number", "nan"), ("too_much", "1.5")]
)
async def test_what_is_no_probability_is_refused(tmp_path: Path, function: str, returned: str) -> None:
    named = rf"shares:{function}\(train-3, None\) returned {returned}; it must return a number from 0.01 to 1"
    async with reading(tmp_path, function) as stub:
        with pytest.raises(FailedPreconditionError, match=named):
            await call(stub.GetProbabilities, ONE_TASK, timeout_seconds=LIMIT_SECONDS)


async def test_a_function_that_does_not_return_is_named_and_tasks_are_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexrl_data_reader.service.FUNCTION_SECONDS", 0.05)
    async with reading(tmp_path, "hangs") as stub:
        try:
            with pytest.raises(FailedPreconditionError, match=r"shares:hangs\(train-3, None\) .* not returned within"):
                await call(stub.GetProbabilities, ONE_TASK, timeout_seconds=LIMIT_SECONDS)
            assert (await call(stub.ReadTasks, pb.ReadTasksRequest(count=1), timeout_seconds=LIMIT_SECONDS)).tasks
        finally:
            (tmp_path / "end").touch()


async def test_a_task_that_the_data_does_not_have_is_refused_by_its_id(tmp_path: Path) -> None:
    request = pb.GetProbabilitiesRequest(tasks=[pb.TaskReward(task_id="train-99")])
    async with reading(tmp_path, "too_much") as stub:
        with pytest.raises(NotFoundError, match=r"tasks.task_id: 'train-99' is no task of the training data"):
            await call(stub.GetProbabilities, request, timeout_seconds=LIMIT_SECONDS)


async def test_without_a_function_there_are_no_probabilities(tmp_path: Path) -> None:
    async with running_service(tmp_path, data_reader.start) as process, connect(process.address) as channel:
        stub: DataReaderServiceAsyncStub = DataReaderServiceStub(channel)
        with pytest.raises(FailedPreconditionError, match=r"no data.sampler of type python"):
            await call(stub.GetProbabilities, pb.GetProbabilitiesRequest(), timeout_seconds=LIMIT_SECONDS)
