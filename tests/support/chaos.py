"""Kills the processes of a run one after the other, then examines the files of the run. A seed fixes the schedule."""

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

from nexrl.batch_proto import decode_batch
from nexrl.datasets import open_datasets
from nexrl.models import iter_weights
from nexrl.spec import load_resolved
from nexrl.store import connect_redis, key_prefix
from nexrl.train_batch import TrainBatch
from nexrl_trainer.build import build_learner
from nexrl_trainer.checkpoint import read_metadata
from nexrl_trainer.processor import build_processor
from nexrl_trajectory_pool.ledger import Ledger, LedgerState, SampleRecord
from nexrl_trajectory_pool.pool import training_rules
from tests.support.patience import for_minutes
from tests.support.redis import running_redis
from tests.support.runs import Process, Run, batches_of, metrics_of

NAMES = (
    *("redis", "controller", "weight-sync", "data-reader", "trainer", "trajectory-pool-0", "trajectory-pool-1"),
    *("inference-0", "inference-1", "rollout-0", "rollout-1"),
)
"""The processes of `tests/chaos/copy-digits.yaml`."""
GAP_SECONDS = (1.0, 2.0)
DOUBLE_KILLS = 0.1
"""Share of kills that follow the previous kill at once."""
EARLY_KILLS = 0.15
"""Share of kills that may hit a process that is still starting after its previous kill."""
FORGETFUL_KILLS = 0.5
"""Share of Redis kills after which Redis lacks its last writes, as after a failover or a power cut."""
FORGOTTEN_SECONDS = 1.0
"""Duration of the writes that `appendfsync everysec` may lose."""
REDIS = "redis"
MOST_AWAY = 1
"""Most processes that may be down at the next kill. With more, a machine of two cores would only restart processes."""
SERVES = (b'"message": "listening"', b"eady to accept connections")
ENDS_STEPS = 10
"""Number of steps whose rewards are averaged at the start and at the end. The reward of one batch is noisy."""
ALL = 10**9


@dataclass(frozen=True)
class Strike:
    """A planned kill of the first process in `names` that serves, at least `gap_seconds` after the previous kill."""

    gap_seconds: float
    names: tuple[str, ...]
    is_early: bool
    """Whether the kill may hit a process that is still starting."""
    forgets: bool
    """Whether Redis loses the writes of the last second. Ignored for other processes."""


@dataclass
class Kill:
    """A kill that was made. `back_seconds`: time until the process served again; None if another kill came first."""

    name: str
    forgets: bool
    back_seconds: float | None = None

    @property
    def role(self) -> str:
        """The role of the killed process: 'rollout' for 'rollout-0'."""
        return self.name.rstrip("-0123456789") + (", last second lost" if self.forgets else "")


def schedule(seed: int, kills: int, names: Sequence[str]) -> list[Strike]:
    """Return the planned kills of `seed`. All names are equally likely."""
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
    """Kills processes with SIGKILL, and measures how long each one is down."""

    def __init__(self, run: Run) -> None:
        self.kills: list[Kill] = []
        self.seconds = 0.0
        """Time from the first kill until all processes served again after the last kill."""
        self.steps = 0
        """Training steps that were made in `seconds`."""
        self._run = run
        self._killed: dict[str, Process] = {}
        self._returns: dict[str, asyncio.Task[None]] = {}

    async def kill_all(self, strikes: Sequence[Strike]) -> None:
        """Make the kills. Returns when all killed processes serve again. Fails if one does not."""
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
            with contextlib.suppress(ProcessLookupError):  # the process has just ended by itself: choose another
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

        await for_minutes.eventually(is_there, f"one of {strike.names} can be killed")
        return found[0]

    async def _forget(self, redis: Process) -> None:
        folder = self._run.folder / "redis"  # Redis 6 and Redis 7 name their files differently
        files = [*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")]
        sizes = {file: file.stat().st_size for file in files}
        await asyncio.sleep(FORGOTTEN_SECONDS)
        os.kill(redis.pid, signal.SIGSTOP)
        for file, size in sizes.items():
            os.truncate(file, size)

    async def _watch(self, title: str, kill: Kill, log_bytes: int) -> None:
        began = time.monotonic()
        try:
            await for_minutes.eventually(lambda: self._serves(kill.name, log_bytes), f"{title}: {kill.name} is back")
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
        component = name.partition("-rank-")[0]  # all ranks of a trainer write into one log
        return self._run.folder / "logs" / f"{component}.log"


@dataclass(frozen=True)
class Remains:
    """The steps, batches and samples that a run left on disk."""

    steps: Sequence[Mapping[str, float]]
    """Metrics in the order in which they were written. A repeated step has several entries."""
    batches: Sequence[Sequence[str]]
    """Sample ids of the batch of each step. If a batch was formed again, those of the last one."""
    checkpointed: Sequence[int]
    """Numbers of the batches that the checkpoints contain, in the order of the checkpoints."""
    ledger: LedgerState
    records: Sequence[SampleRecord]

    @property
    def steps_made(self) -> int:
        """The number of different steps."""
        return len({line["step"] for line in self.steps})

    @property
    def trained_twice(self) -> int:
        """The number of samples in more than one batch."""
        sample_ids = list(chain.from_iterable(self.batches))
        return len(sample_ids) - len(set(sample_ids))

    @property
    def lost(self) -> int:
        """The number of granted samples that are neither dropped, nor in flight, nor in a batch on disk."""
        in_batches = set(chain.from_iterable(self.batches))
        trained = [record for record in self.records if record.state in ("trained", "durable")]
        missing = [record for record in trained if record.sample_id not in in_batches]
        return self.ledger["granted"] - len(self.records) + len(missing)

    def reward(self, steps: slice) -> float:
        """Return the mean reward of `steps`."""
        by_step = {line["step"]: line["reward_mean"] for line in self.steps}
        return round(fmean([by_step[step] for step in sorted(by_step)][steps]), 3)


@dataclass(frozen=True)
class Away:
    """How often the processes of a role were killed, and for how many seconds they were down."""

    kills: int
    median_seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Result:
    """The result of a run under kills. Rewards are means of ENDS_STEPS steps."""

    seed: int
    kills: int
    seconds: float
    """Duration of the whole run."""
    killing_seconds: float
    """Time from the first kill until all processes served again after the last kill."""
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
    """Kills and downtime by role."""

    @staticmethod
    def of(killer: Killer, remains: Remains, *, seed: int, seconds: float) -> "Result":
        """Return the result of a run that took `seconds`."""
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
        """Return the result as text for people."""
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
        """Return the result as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def away_by_role(kills: Sequence[Kill]) -> dict[str, Away]:
    """Return the kills and the downtime of each role. Counts the time only if the process served again."""
    away = {}
    for role in {kill.role for kill in kills}:
        seconds = [kill.back_seconds or 0.0 for kill in kills if kill.role == role]
        back = [each for each in seconds if each] or [0.0]
        away[role] = Away(len(seconds), round(median(back), 2), round(max(back), 2))
    return away


async def examine(folder: Path, steps: int) -> Remains:
    """Return the state on disk of the run in `folder`. The run must have made `steps` steps."""
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
    """Return the metrics of training steps in the order of writing. A repeated step has several entries."""
    if not (folder / "metrics.jsonl").exists():
        return []
    return [line for line in metrics_of(folder) if "reward_mean" in line]


def final_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the run's last checkpoint."""
    return load_file(_checkpoints(folder)[-1] / "model.safetensors")


def trained_once_on_each(folder: Path, steps: int) -> dict[str, Tensor]:
    """Return the weights after training on each batch on disk once, in order, in one process without kills."""
    spec = load_resolved(folder / "experiment.yaml").spec
    torch.set_num_threads(spec.trainer.threads)
    learner = build_learner(spec)
    processor = build_processor(spec.algorithm, folder, learner.forward, learner.forward)
    for batch in batches_of(folder)[:steps]:
        learner.train(TrainBatch.pack(processor.fit(decode_batch(batch)).sequences))
    return dict(iter_weights(learner.model))


def _checkpoints(folder: Path) -> list[Path]:
    names = [path.name.removeprefix("global_step_") for path in (folder / "checkpoints").glob("global_step_*")]
    steps = sorted(int(name) for name in names if name.isdigit())  # checkpoints that were put aside have other names
    return [folder / "checkpoints" / f"global_step_{step}" for step in steps]


@contextlib.asynccontextmanager
async def _ledger(folder: Path) -> AsyncIterator[Ledger]:
    """Open the ledger on a copy of the files of the run's private Redis."""
    experiment = load_resolved(folder / "experiment.yaml")
    rules = training_rules(experiment.spec, open_datasets(experiment.spec, experiment.folder).train.total)
    with running_redis(folder / "redis") as url:
        redis = await connect_redis(url)
        try:
            yield Ledger(redis, key_prefix(experiment.metadata.name, experiment.spec.model.tag), rules)
        finally:
            await redis.aclose()
