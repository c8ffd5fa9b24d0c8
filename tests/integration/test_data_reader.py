"""The data reader: serves tasks by position, and may die while the pool uses it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from nexrl import datasets
from nexrl.datasets import open_datasets
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from nexrl.local.components import LOOPBACK, free_ports
from nexrl.rpc.client import call, connect, new_request_id
from nexrl.rpc.server import ServiceProcess
from nexrl.spec import Experiment, with_folder
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl.v1.activity_service_pb2 import GetActivityRequest
from nexrl.v1.activity_service_pb2_grpc import ActivityServiceStub
from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceStub
from nexrl.v1.trajectory_pb2 import PURPOSE_TRAINING, PURPOSE_VALIDATION
from nexrl_controller import server as controller
from nexrl_data_reader import server as data_reader
from nexrl_trajectory_pool import server as trajectory_pool
from nexrl_trajectory_pool import task_reader
from tests.support.patience import LIMIT_SECONDS, eventually
from tests.support.pool import TAG, PoolClient, samples_of, scored
from tests.support.services import running_service, settings, small_experiment

if TYPE_CHECKING:
    from nexrl.v1.activity_service_pb2_grpc import ActivityServiceAsyncStub
    from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceAsyncStub

TWO_EPOCHS = {"type": "mock", "size": 8, "epochs": 2}
LARGE = "def tasks(split):\n    return [{'prompt': 'x' * 1_500_000, 'answer': '1'}] * 4\n"


@asynccontextmanager
async def reading(folder: Path, experiment: Experiment) -> AsyncIterator["DataReaderServiceAsyncStub"]:
    async with running_service(folder, data_reader.start, experiment) as process, connect(process.address) as channel:
        yield DataReaderServiceStub(channel)


async def read(stub: "DataReaderServiceAsyncStub", **fields: int) -> pb.ReadTasksResponse:
    return await call(stub.ReadTasks, pb.ReadTasksRequest(**fields), timeout_seconds=LIMIT_SECONDS)  # type: ignore[arg-type]


@pytest.mark.guide("E1", "E3")
async def test_tasks_are_read_in_the_order_of_their_epoch_up_to_the_end_of_the_data(tmp_path: Path) -> None:
    experiment = small_experiment(data=TWO_EPOCHS)
    source = open_datasets(experiment.spec, tmp_path).train
    async with reading(tmp_path, experiment) as stub:
        answer = await read(stub, cursor=5, count=100)
        assert [task.task_id for task in answer.tasks] == [source.task(*source.locate(p))["id"] for p in range(5, 16)]
        assert (answer.items, answer.total) == (8, 16)
        in_order = await read(stub, cursor=5, count=100, in_source_order=True)
        assert [task.task_id for task in in_order.tasks] == ["train-5", "train-6", "train-7"]
        for wrong in ({"cursor": -1, "count": 1}, {"cursor": 16, "count": 1}):
            with pytest.raises(NotFoundError, match=r"cursor: .*; 0 to 15"):
                await read(stub, **wrong)
        with pytest.raises(NotFoundError, match="no section validation"):
            await read(stub, purpose=PURPOSE_VALIDATION)
        with pytest.raises(InvalidArgumentError, match="count: 4097; 0 to 4096"):
            await read(stub, count=4097)


async def test_an_answer_of_large_tasks_ends_early_and_has_one_at_least(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    experiment = small_experiment(data={"type": "python", "factory": "large:tasks"})
    async with reading(tmp_path, with_folder(experiment, tmp_path)) as stub:
        assert len((await read(stub, purpose=PURPOSE_TRAINING, count=4)).tasks) == 2


async def test_a_data_reader_that_dies_costs_no_task_and_grants_none_twice(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    experiment = small_experiment(experiment_name, data={"type": "mock", "size": 8, "shuffle": False, "epochs": 1})
    async with pool_of(tmp_path, redis_url, experiment) as (pool, reader):
        leasing = asyncio.create_task(pool.lease(2))
        await granted(pool)
        async with reader(experiment):
            first = await leasing
        others = await pool.lease(100)  # read ahead: needs no reader
        taken = [*first.leases, *others.leases]
        assert [lease.task.task_id for lease in taken] == [f"train-{index}" for index in range(len(taken))]
        assert len({*samples_of(first), *samples_of(others)}) == 2 * len(taken) == (await pool.state()).granted
        for lease in taken:
            assert await pool.put([scored(sample) for sample in lease.samples]) == ["ACCEPTED"] * 2
        assert not (await pool.audit()).findings


async def test_no_sample_is_granted_while_the_data_reader_is_away(
    tmp_path: Path, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_reader, "READ_SECONDS", 0.3)
    experiment = small_experiment(experiment_name)
    async with pool_of(tmp_path, redis_url, experiment) as (pool, reader):
        for _ in range(3):  # each as a worker that has given up the call before
            request = pb.LeaseTasksRequest(request_id=new_request_id(), model_tag=TAG, max_samples=2)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await pool.loader.LeaseTasks(request, timeout=LIMIT_SECONDS)
            assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (await pool.state()).granted == 2  # of the first call, which could not know
        async with reader(experiment):
            assert len((await pool.lease(2)).leases) == 1


async def test_what_is_read_after_a_restart_continues_in_the_same_order(
    tmp_path: Path, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_reader, "READ_AHEAD", 3)
    monkeypatch.setattr(task_reader, "MAX_KEPT_CHARACTERS", 300)
    batches = {"batchSize": 16, "groupSize": 2}  # credit for all leases
    experiment = small_experiment(experiment_name, data={**TWO_EPOCHS, "shuffle": True}, trajectoryPool=batches)
    source = open_datasets(experiment.spec, tmp_path).train
    taken: list[str] = []
    async with pool_of(tmp_path, redis_url, experiment) as (pool, reader):
        for _ in range(3):
            async with reader(experiment):  # a new one for each lease
                leased = await pool.lease(4)
            taken += [lease.task.task_id for lease in leased.leases]
    assert taken == [source.task(*source.locate(position))["id"] for position in range(6)]


async def test_a_data_set_that_changes_while_the_pool_runs_is_refused(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    experiment = small_experiment(experiment_name)
    changed = small_experiment(experiment_name, data={"type": "mock", "size": 3})
    async with pool_of(tmp_path, redis_url, experiment) as (pool, reader), reader(changed):
        with pytest.raises(FailedPreconditionError, match=r"it has 3 tasks .* and had 8 .* Data must be the same"):
            await pool.lease(2)


CHANGES = {
    "another order": "data[130], data[131] = data[131], data[130]",
    "another task": "data[199]['prompt'] = 'another'",
    "other metadata": "data[0]['level'] = 2",
    "one task more": "data.append(data[0])",
}


def of_the_user(folder: Path, name: str, change: str = "") -> Experiment:
    """An experiment whose data is a function of the user with this last change."""
    body = f"data = [{{'prompt': f'task {{n}}', 'answer': '1'}} for n in range(200)]\n    {change}\n    return data"
    module = f"{name.replace('-', '_')}_{len(list(folder.glob('*.py')))}"  # imported once per test process
    (folder / f"{module}.py").write_text(f"def tasks(split):\n    {body}\n")
    return with_folder(small_experiment(name, data={"type": "python", "factory": f"{module}:tasks"}), folder)


@pytest.mark.parametrize("change", CHANGES)
async def test_data_that_changes_while_the_pool_is_down_ends_the_pool_with_an_error_that_says_what_to_do(
    tmp_path: Path, redis_url: str, experiment_name: str, change: str
) -> None:
    for same in (of_the_user(tmp_path, experiment_name), of_the_user(tmp_path, experiment_name)):
        async with pool_of(tmp_path, redis_url, same):
            pass
    changed = of_the_user(tmp_path, experiment_name, CHANGES[change])
    async with running_service(tmp_path, data_reader.start, changed) as reader:
        own = settings(tmp_path, redis_url=redis_url, data_reader=reader.address)
        tasks = 201 if change == "one task more" else 200
        words = rf"^spec\.data, or spec\.validation with heldOut: .* it has {tasks} .* had 200 .* Restore it, or"
        with pytest.raises(InvalidArgumentError, match=words):
            await ServiceProcess("test", own, changed).run(trajectory_pool.start)


async def test_data_is_not_compared_with_that_which_another_release_has_read(
    tmp_path: Path,
    redis_url: str,
    experiment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pool_of(tmp_path, redis_url, small_experiment(experiment_name)):
        pass
    changed = small_experiment(experiment_name, data={"type": "mock", "size": 3})
    monkeypatch.setattr(trajectory_pool, "__version__", "99.1")
    async with pool_of(tmp_path, redis_url, changed):
        assert "is not compared" in caplog.text
    async with running_service(tmp_path, data_reader.start, small_experiment(experiment_name)) as reader:
        own = settings(tmp_path, redis_url=redis_url, data_reader=reader.address)
        with pytest.raises(InvalidArgumentError, match=r"it has 8 tasks .* and had 3"):  # the newer release compares
            await ServiceProcess("test", own, changed).run(trajectory_pool.start)


async def test_validation_data_may_change_while_the_pool_is_down(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    for size in (3, 5):
        validation = {"data": {"type": "mock", "size": size}, "heldOut": False}
        async with pool_of(tmp_path, redis_url, small_experiment(experiment_name, validation=validation)):
            pass


async def test_a_data_factory_that_does_not_return_is_named_to_the_controller_with_what_to_do(
    tmp_path: Path, redis_url: str, experiment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "SLOW_SECONDS", 0.1)
    nobody = {"weight_sync": "127.0.0.1:1", "trajectory_pool": "127.0.0.1:1"}
    experiment = of_the_user(tmp_path, experiment_name, "import threading; threading.Event().wait(5)")
    async with (
        running_service(tmp_path, controller.start, experiment, redis_url=redis_url, **nobody) as told,
        running_service(tmp_path, data_reader.start, experiment, controller=told.address),
        connect(told.address) as channel,
    ):
        activity: ActivityServiceAsyncStub = ActivityServiceStub(channel)

        async def is_named() -> bool:
            answer = await call(activity.GetActivity, GetActivityRequest(), timeout_seconds=LIMIT_SECONDS)
            return any(
                error.message.startswith("spec.data.factory: ")
                and ":tasks('train') has not returned for 0.1 s. The run waits for it. " in error.message
                and error.message.endswith("stop the run and correct the function")
                for error in answer.errors
            )

        await eventually(is_named)


async def test_data_that_changes_its_order_while_the_pool_runs_is_refused(
    tmp_path: Path, redis_url: str, experiment_name: str
) -> None:
    changed = of_the_user(tmp_path, experiment_name, CHANGES["another order"])
    async with pool_of(tmp_path, redis_url, of_the_user(tmp_path, experiment_name)) as (pool, reader), reader(changed):
        with pytest.raises(FailedPreconditionError, match=r"the data has changed: it has 200 tasks"):
            await pool.lease(2)


async def granted(pool: PoolClient) -> None:
    async def has_granted() -> bool:
        return (await pool.state()).granted > 0

    await eventually(has_granted)


@asynccontextmanager
async def pool_of(
    folder: Path, redis_url: str, experiment: Experiment
) -> AsyncIterator[tuple[PoolClient, Callable[[Experiment], AbstractAsyncContextManager[object]]]]:
    """Run a pool whose data reader has ended since it was opened. Also yield what runs a reader at its address."""
    address = f"{LOOPBACK}:{free_ports(1)[0]}"

    def reader(given: Experiment) -> AbstractAsyncContextManager[object]:
        return running_service(folder, data_reader.start, given, listen=address)

    async with AsyncExitStack() as stack:
        async with reader(experiment):
            process = await stack.enter_async_context(
                running_service(folder, trajectory_pool.start, experiment, redis_url=redis_url, data_reader=address)
            )
            client = PoolClient(process.address, await stack.enter_async_context(connect(process.address)))
            await client.state()
        yield client, reader
