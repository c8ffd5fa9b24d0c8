"""Episodes against a session of the gateway, which records the tokens; rollout.type agent: an environment runs them."""

import asyncio
import itertools
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nexrl.environment import SCORED, Endpoint, Environment, Outcome, Task
from nexrl.errors import NexrlError
from nexrl.policy import Sampling, draw_seed
from nexrl.rollout_worker import RolloutWorker, failed, scored
from nexrl.spec.experiment import Experiment
from nexrl.tasks import parse_task, trajectory_metadata
from nexrl.v1.trajectory_pb2 import (
    PURPOSE_TRAINING,
    VERDICT_ENV_ERROR,
    VERDICT_REWARD_ERROR,
    VERDICT_TIMEOUT,
    SampleLease,
    SampleResult,
    TaskLease,
)
from nexrl_rollout.gateway import Gateway
from nexrl_rollout.session import Session
from nexrl_rollout.user_threads import UserThreads

CLOSE_SECONDS = 5.0
_VERDICTS = {"env_error": VERDICT_ENV_ERROR, "reward_error": VERDICT_REWARD_ERROR, "timeout": VERDICT_TIMEOUT}


@dataclass(frozen=True)
class Episode:
    """One sample on its way: the session in which the policy is asked, and what belongs to its trajectories."""

    sample: SampleLease
    task: Task
    session: Session
    endpoint: Endpoint
    metadata: Mapping[str, str]
    deadline_unix_seconds: float
    """When its time is over."""

    def result(self, outcome: Outcome) -> SampleResult:
        """Return the sample's result. Raises InvalidArgumentError if the outcome does not fit what was served."""
        if outcome.status not in SCORED or outcome.reward is None:
            return failed(self.sample, _VERDICTS[outcome.status], outcome.error)
        session = self.session
        trajectories = session.trajectories(outcome.reward, outcome.components, self.metadata, outcome.turn_rewards)
        if not trajectories:
            return failed(self.sample, VERDICT_ENV_ERROR, "an episode was scored that never asked the policy")
        return scored(self.sample, trajectories, "length" if outcome.status == "truncated" else session.finish_reason)


class EpisodeWorker(RolloutWorker):
    """Opens one session for each sample. Its subclasses say who runs the episode."""

    samples_together = False

    def __init__(self, gateway: Gateway, experiment: Experiment) -> None:
        self._gateway = gateway
        self._rollout = experiment.spec.rollout
        self._seed = experiment.spec.inference.seed
        self._key_list = experiment.spec.trajectory_pool.key_list

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """Run one episode."""
        item = parse_task(lease.task)
        task = Task(item["id"], item, "training" if lease.purpose == PURPOSE_TRAINING else "validation")
        metadata = trajectory_metadata(item, self._key_list)
        deadline = time.time() + self._rollout.timeout_seconds
        sampling = Sampling.of(lease, max_new_tokens=self._rollout.max_new_tokens)
        (sample,) = lease.samples
        with self._gateway.session(sampling, _seeds(self._seed, sample)) as session:
            endpoint = self._gateway.endpoint(session)
            return [await self._run(Episode(sample, task, session, endpoint, metadata, deadline))]

    @abstractmethod
    async def _run(self, episode: Episode) -> SampleResult:
        """Return the result of an episode."""


class AgentWorker(EpisodeWorker):
    """Runs an environment in this process."""

    def __init__(
        self, gateway: Gateway, environment: Environment, threads: UserThreads, experiment: Experiment
    ) -> None:
        super().__init__(gateway, experiment)
        self._threads = threads
        self._environment = environment

    async def close(self) -> None:
        """Call the environment's `close` if it has one."""
        if close := getattr(self._environment, "close", None):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._threads.run(close, (), "close of the environment")

    async def _run(self, episode: Episode) -> SampleResult:
        outcome = await self._threads.run(self._environment.run, (episode.task, episode.endpoint), "the environment")
        if not isinstance(outcome, Outcome):
            raise NexrlError(f"the environment returned {type(outcome).__name__}; it must return an Outcome")
        return episode.result(outcome)


def _seeds(seed: int, sample: SampleLease) -> Iterator[int]:
    """Yields a seed for each turn."""
    return (draw_seed(seed, sample.sample_id, sample.attempt, turn) for turn in itertools.count())
