"""Kills processes of a run, one after the other, and examines what the run has left. One seed is one schedule."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean, median

import torch
from safetensors.torch import load_file
from torch import Tensor

from nexrl.activity import ActivityTracker
from nexrl.datasets import open_datasets
from nexrl.models import iter_weights
from nexrl.rpc.client import connect
from nexrl.spec import load_resolved
from nexrl.store import connect_redis, key_prefix
from nexrl.v1.activity_service_pb2 import Module
from nexrl_trainer.checkpoint import read_metadata
from nexrl_trainer.codec import decode_train_batch
from nexrl_trainer.processor import AlgorithmProcessor
from nexrl_trainer.server import build_learner
from nexrl_trajectory_pool.ledger import Ledger, LedgerState, SampleRecord
from nexrl_trajectory_pool.pool import training_rules
from tests.support.redis import running_redis
from tests.support.runs import Process, Run, batches_of, eventually, metrics_of

GAP_SECONDS = (1.0, 2.0)
DOUBLE_KILLS = 0.1
"""Share of kills that follow the one before at once."""
EARLY_KILLS = 0.15
"""Share of kills that do not wait until the process serves again after its last."""
FORGETFUL_KILLS = 0.5
"""Share of Redis's kills after which it lacks what it wrote last, as after a fail-over or a power cut."""
FORGOTTEN_SECONDS = 1.0
"""What `appendfsync everysec` may lose."""
REDIS = "redis"
MOST_AWAY = 1
"""Processes that are away when the next kill is made; with more, a machine of two cores only ever starts processes."""
BACK_SECONDS = 90.0
SERVES = (b'"message": "listening"', b"eady to accept connections")
ENDS_STEPS = 10
"""Steps averaged for the first and the last reward: one batch alone is noisy."""
ALL = 10**9


@dataclass(frozen=True)
class Strike:
    """A kill to come, `gap_seconds` or more after the one before, of the first of `names` that serves."""

    gap_seconds: float
    names: tuple[str, ...]
    is_early: bool
    """Whether one that is still starting will do."""
    forgets: bool
    """If it is Redis: whether it forgets the last second."""


@dataclass
class Kill:
    """A kill that was made. `back_seconds`: until the process served again; None if it was killed again before."""

    name: str
    forgets: bool
    back_seconds: float | None = None

    @property
    def role(self) -> str:
        """What was killed: 'rollout' for 'rollout-0'."""
        return self.name.rstrip("-0123456789") + (", last second lost" if self.forgets else "")


def schedule(seed: int, kills: int, names: Sequence[str]) -> list[Strike]:
    """The kills of `seed`, every name as likely as any other."""
    random = Random(seed)
    return [
        Strike(
            0.0 if random.random() < DOUBLE_KILLS else random.uniform(*GAP_SECONDS),
            tuple(random.sample(names, len(names))),
            random.random() < EARLY_KILLS,
            random.random() < FORGETFUL_KILLS,
        )
        for _ in range(kills)
    ]


class Killer:
    """Makes kills by SIGKILL, and watches how long each process is away."""

    def __init__(self, run: Run, back_seconds: float = BACK_SECONDS) -> None:
        """`back_seconds`: longest time in which a process that was killed must serve again."""
        self._back_seconds = back_seconds
        self.kills: list[Kill] = []
        self.seconds = 0.0
        """From the first kill until all was back after the last."""
        self.steps = 0
        """Training steps made in that time."""
        self._run = run
        self._killed: dict[str, Process] = {}
        self._returns: dict[str, asyncio.Task[None]] = {}

    async def kill_all(self, strikes: Sequence[Strike]) -> None:
        """Make the kills; returns when all that was killed is back. Fails when something does not come back."""
        began, before = time.monotonic(), self._steps()
        await self._kill_all(strikes)
        self.seconds, self.steps = time.monotonic() - began, self._steps() - before

    async def _kill_all(self, strikes: Sequence[Strike]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, strike in enumerate(strikes, start=1):
                await asyncio.sleep(strike.gap_seconds)
                kill = await self._kill(strike)
                if kill.name in self._returns:
                    self._returns[kill.name].cancel()
                self.kills.append(kill)
                watch = self._watch(f"kill {number:3d}/{len(strikes)}", kill, self._log(kill.name).stat().st_size)
                self._returns[kill.name] = tasks.create_task(watch)

    async def _kill(self, strike: Strike) -> Kill:
        while True:
            name, process = await self._victim(strike)
            forgets = name == REDIS and strike.forgets
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself: take another
                if forgets:
                    await self._forget(process)
                os.kill(process.pid, signal.SIGKILL)
                self._killed[name] = process
                return Kill(name, forgets)

    async def _victim(self, strike: Strike) -> tuple[str, Process]:
        found: list[tuple[str, Process]] = []

        def is_there() -> bool:
            assert self._run.launcher.returncode is None, f"the run ended after {len(self.kills)} kills"
            away = [name for name, watch in self._returns.items() if not watch.done()]
            if len(away) > MOST_AWAY:
                return False
            processes = self._run.processes
            there = [name for name in strike.names if processes.get(name) not in (None, self._killed.get(name))]
            found.extend((name, processes[name]) for name in there if strike.is_early or name not in away)
            return bool(found)

        await eventually(is_there, seconds=self._back_seconds)
        return found[0]

    async def _forget(self, redis: Process) -> None:
        folder = self._run.folder / "redis"  # as Redis 6 and as Redis 7 name them
        files = [*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")]
        sizes = {file: file.stat().st_size for file in files}
        await asyncio.sleep(FORGOTTEN_SECONDS)
        os.kill(redis.pid, signal.SIGSTOP)
        for file, size in sizes.items():
            os.truncate(file, size)

    async def _watch(self, title: str, kill: Kill, log_bytes: int) -> None:
        began = time.monotonic()
        try:
            await eventually(lambda: self._serves(kill.name, log_bytes), seconds=self._back_seconds)
        except AssertionError:
            raise AssertionError(f"{title}: {kill.name} did not come back within {self._back_seconds:g} s") from None
        except asyncio.CancelledError:
            self._say(f"{title}  {kill.name:18s} killed again before it was back")
            raise
        kill.back_seconds = time.monotonic() - began
        self._say(f"{title}  {kill.name:18s} back after {kill.back_seconds:5.1f} s")

    def _serves(self, name: str, log_bytes: int) -> bool:
        with self._log(name).open("rb") as log:
            log.seek(log_bytes)
            written = log.read()
        return any(mark in written for mark in SERVES)

    def _say(self, text: str) -> None:
        line = next(iter(steps_of(self._run.folder)[-1:]), {"step": 0.0, "reward_mean": 0.0})
        sys.stdout.write(f"{text}   step {line['step']:3.0f}   reward {line['reward_mean']:.2f}\n")
        sys.stdout.flush()

    def _steps(self) -> int:
        return len({line["step"] for line in steps_of(self._run.folder)})

    def _log(self, name: str) -> Path:
        return self._run.folder / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Remains:
    """What a run has left on disk, for each of its steps and samples."""

    steps: Sequence[Mapping[str, float]]
    """Metrics in the order in which they were written; of a step that was made again, more than once."""
    batches: Sequence[Sequence[str]]
    """Ids of the samples of the batch of each step; of a batch that was formed again, the last."""
    checkpointed: Sequence[int]
    """Numbers of the batches that the checkpoints are made of, in their order."""
    ledger: LedgerState
    records: Sequence[SampleRecord]

    @property
    def steps_made(self) -> int:
        """How many there are."""
        return len({line["step"] for line in self.steps})

    @property
    def trained_twice(self) -> int:
        """Samples in more than one batch."""
        sample_ids = list(chain.from_iterable(self.batches))
        return len(sample_ids) - len(set(sample_ids))

    @property
    def lost(self) -> int:
        """Samples that were granted and that are neither dropped, nor in flight, nor in a batch on disk."""
        in_batches = set(chain.from_iterable(self.batches))
        trained = [record for record in self.records if record.state in ("trained", "durable")]
        missing = [record for record in trained if record.sample_id not in in_batches]
        return self.ledger["granted"] - len(self.records) + len(missing)

    def reward(self, steps: slice) -> float:
        """Mean reward of those steps."""
        by_step = {line["step"]: line["reward_mean"] for line in self.steps}
        return round(fmean([by_step[step] for step in sorted(by_step)][steps]), 3)


@dataclass(frozen=True)
class Away:
    """How often processes of a role were killed, and for how many seconds they were away."""

    kills: int
    median_seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Result:
    """What a run came to under kills. Rewards are means of ENDS_STEPS steps."""

    seed: int
    kills: int
    seconds: float
    """Of the whole run."""
    killing_seconds: float
    """From the first kill to the last."""
    steps: int
    steps_while_killing: int
    steps_made_again: int
    granted: int
    trained: int
    dropped: Mapping[str, int]
    trained_twice: int
    lost: int
    reward_first: float
    reward_last: float
    away: Mapping[str, Away]
    """By role."""

    @staticmethod
    def of(killer: Killer, remains: Remains, *, seed: int, seconds: float) -> "Result":
        """The result of a run, which took `seconds`."""
        return Result(
            seed=seed,
            kills=len(killer.kills),
            seconds=round(seconds, 1),
            killing_seconds=round(killer.seconds, 1),
            steps=remains.steps_made,
            steps_while_killing=killer.steps,
            steps_made_again=len(remains.steps) - remains.steps_made,
            granted=remains.ledger["granted"],
            trained=remains.ledger["trained"],
            dropped=remains.ledger.dropped,
            trained_twice=remains.trained_twice,
            lost=remains.lost,
            reward_first=remains.reward(slice(ENDS_STEPS)),
            reward_last=remains.reward(slice(-ENDS_STEPS, None)),
            away=away_by_role(killer.kills),
        )

    def table(self) -> str:
        """For people."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "0"
        return "\n".join(
            [
                f"seed {self.seed}: {self.kills} kills within {self.killing_seconds:.0f} s, {self.seconds:.0f} in all",
                f"{'killed':24s} times  back after (median, longest)",
                *(
                    f"{role:24s} {away.kills:5d}  {away.median_seconds:5.1f} s {away.longest_seconds:5.1f} s"
                    for role, away in sorted(self.away.items())
                ),
                f"steps: {self.steps}, {self.steps_while_killing} of them between kills; made again: "
                f"{self.steps_made_again}; reward: {self.reward_first:.2f} to {self.reward_last:.2f}",
                f"samples: {self.granted} granted, {self.trained} trained, dropped {dropped}; "
                f"trained twice: {self.trained_twice}; lost: {self.lost}",
            ]
        )

    def json(self) -> str:
        """For machines."""
        return json.dumps(asdict(self), indent=2) + "\n"


def away_by_role(kills: Sequence[Kill]) -> dict[str, Away]:
    """How long what was killed was away, where it came back."""
    away = {}
    for role in {kill.role for kill in kills}:
        seconds = [kill.back_seconds or 0.0 for kill in kills if kill.role == role]
        back = [each for each in seconds if each] or [0.0]
        away[role] = Away(len(seconds), round(median(back), 2), round(max(back), 2))
    return away


async def examine(folder: Path, steps: int) -> Remains:
    """What the run in `folder` has left, which is to have made `steps` steps."""
    async with _ledger(folder) as ledger:
        return Remains(
            steps_of(folder),
            [
                [sample.sample_id for group in batch.groups for sample in group.samples]
                for batch in batches_of(folder)[:steps]
            ],
            [batch_id for path in _checkpoints(folder) for batch_id in read_metadata(path).batch_ids],
            await ledger.state(),
            (await ledger.samples(0, ALL))[0],
        )


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Metrics of training steps in the order in which they were written; of a step made again, more than once."""
    if not (folder / "metrics.jsonl").exists():
        return []
    return [line for line in metrics_of(folder) if "reward_mean" in line]


def final_weights(folder: Path) -> dict[str, Tensor]:
    """What the run has learned."""
    return load_file(_checkpoints(folder)[-1] / "model.safetensors")


async def trained_once_on_each(folder: Path, steps: int) -> dict[str, Tensor]:
    """The weights that come of training each batch on disk once, in order, in one process that nobody kills."""
    spec = load_resolved(folder / "experiment.yaml").spec
    torch.set_num_threads(spec.trainer.threads)
    learner = build_learner(spec)
    async with connect("127.0.0.1:1") as nobody:
        activity = ActivityTracker(Module(name="trainer"), None)
        processor = AlgorithmProcessor(spec.algorithm, nobody, spec.model.tag, activity, folder)
        for batch in batches_of(folder)[:steps]:
            learner.train(decode_train_batch(processor.fit(batch).tensors))
    return dict(iter_weights(learner.model))


def _checkpoints(folder: Path) -> list[Path]:
    names = [path.name.removeprefix("global_step_") for path in (folder / "checkpoints").glob("global_step_*")]
    steps = sorted(int(name) for name in names if name.isdigit())  # without those that were put aside
    return [folder / "checkpoints" / f"global_step_{step}" for step in steps]


@contextlib.asynccontextmanager
async def _ledger(folder: Path) -> AsyncIterator[Ledger]:
    """The ledger in a copy of the files of the run's private Redis."""
    experiment = load_resolved(folder / "experiment.yaml")
    rules = training_rules(experiment.spec, open_datasets(experiment.spec, experiment.folder).train)
    with running_redis(folder / "redis") as url:
        redis = await connect_redis(url)
        try:
            yield Ledger(redis, key_prefix(experiment.metadata.name, experiment.spec.model.tag), rules)
        finally:
            await redis.aclose()
