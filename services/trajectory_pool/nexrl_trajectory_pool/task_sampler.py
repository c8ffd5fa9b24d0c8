"""data.sampler: draws which tasks are granted when their turn comes, by the rewards of their newest grants."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from nexrl.rpc.client import call
from nexrl.spec.sampler import DifficultySamplerSpec, SamplerSpec
from nexrl.v1 import data_loader_service_pb2 as pb
from nexrl_trajectory_pool.ledger import Drawn, Ledger
from nexrl_trajectory_pool.task_reader import READ_SECONDS, TaskReader

if TYPE_CHECKING:
    from nexrl.v1.data_loader_service_pb2_grpc import DataReaderServiceAsyncStub

DRAWN_AHEAD = 64
"""Most tasks in one draw; never more than an epoch, so that the newest reward of each is known."""


class Probabilities(Protocol):
    """Which share of the turns of each task is granted, 0 to 1."""

    async def of(self, names: Sequence[str], rewards: Sequence[float | None]) -> Sequence[float]:
        """Return a probability for each task: `names` are their ids, `rewards` as in Ledger.task_rewards."""
        ...


class ByDifficulty:
    """`type: difficulty`: tasks that are always solved, or never, get fewer grants."""

    def __init__(self, spec: DifficultySamplerSpec) -> None:
        self._spec = spec

    async def of(self, names: Sequence[str], rewards: Sequence[float | None]) -> Sequence[float]:
        return [self._probability(reward) for reward in rewards]

    def _probability(self, reward: float | None) -> float:
        if reward is None:
            return 1.0
        if reward >= self._spec.easy_reward:
            return self._spec.easy_probability
        return self._spec.hard_probability if reward <= self._spec.hard_reward else 1.0


class ByFunction:
    """`type: python`: the data reader, which has no access to Redis, calls the user's function."""

    def __init__(self, reader: "DataReaderServiceAsyncStub") -> None:
        self._reader = reader

    async def of(self, names: Sequence[str], rewards: Sequence[float | None]) -> Sequence[float]:
        tasks = [pb.TaskReward(task_id=name, reward=reward) for name, reward in zip(names, rewards, strict=True)]
        request = pb.GetProbabilitiesRequest(tasks=tasks)
        return (await call(self._reader.GetProbabilities, request, timeout_seconds=READ_SECONDS)).probabilities


class TaskSampler:
    """Draws for the next tasks of the data. Several pools may draw at a time; the ledger uses one draw for a task."""

    def __init__(self, spec: SamplerSpec, seed: int, reader: "DataReaderServiceAsyncStub") -> None:
        by_difficulty = ByDifficulty(spec) if isinstance(spec, DifficultySamplerSpec) else None
        self._probabilities: Probabilities = by_difficulty or ByFunction(reader)
        self._seed = seed
        self.drawn = Drawn(0, ())

    async def draw(self, ledger: Ledger, tasks: TaskReader) -> None:
        """Set `drawn` for the tasks whose turn is next. Raises the errors of the data reader."""
        first = await ledger.cursor()
        last = first + min(DRAWN_AHEAD, tasks.items)
        positions = range(first, last if tasks.total is None else min(last, tasks.total))
        names = [task.task_id for task in await tasks.tasks(positions)]
        probabilities = await self._probabilities.of(names, await ledger.task_rewards(names))
        shares = zip(positions, names, probabilities, strict=True)
        self.drawn = Drawn(first, [name if self._number(at) < share else False for at, name, share in shares])

    def _number(self, position: int) -> float:
        """Return a number from 0 to 1 that is the same each time that it is drawn for this position."""
        digest = hashlib.blake2b(f"{self._seed} {position}".encode(), digest_size=7).digest()
        return int.from_bytes(digest) / 2**56
