"""rollout.type agent: an environment runs the episode against a gateway session, which records the tokens to train."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

from nexrl.environment import SCORED, Environment, Outcome, Task
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


class AgentWorker(RolloutWorker):
    """Opens one session and runs the environment once for each sample."""

    samples_together = False

    def __init__(
        self, gateway: Gateway, environment: Environment, threads: UserThreads, experiment: Experiment
    ) -> None:
        self._gateway = gateway
        self._threads = threads
        self._environment = environment
        self._rollout = experiment.spec.rollout
        self._seed = experiment.spec.inference.seed
        self._key_list = experiment.spec.trajectory_pool.key_list

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """Run one episode."""
        item = parse_task(lease.task)
        seeds = _seeds(self._seed, lease.samples[0])
        sampling = Sampling.of(lease, max_new_tokens=self._rollout.max_new_tokens)
        with self._gateway.session(sampling, seeds) as session:
            task = Task(item["id"], item, "training" if lease.purpose == PURPOSE_TRAINING else "validation")
            arguments = (task, self._gateway.endpoint(session))
            outcome = await self._threads.run(self._environment.run, arguments, "the environment")
        if not isinstance(outcome, Outcome):
            raise NexrlError(f"the environment returned {type(outcome).__name__}; it must return an Outcome")
        metadata = trajectory_metadata(item, self._key_list)
        return [_result(lease.samples[0], outcome, session, metadata)]

    async def close(self) -> None:
        """Call the environment's `close` if it has one."""
        if close := getattr(self._environment, "close", None):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._threads.run(close, (), "close of the environment")


def _seeds(seed: int, sample: SampleLease) -> Iterator[int]:
    """Yields a seed for each turn."""
    return (draw_seed(seed, sample.sample_id, sample.attempt, turn) for turn in itertools.count())


def _result(sample: SampleLease, outcome: Outcome, session: Session, metadata: dict[str, str]) -> SampleResult:
    if outcome.status not in SCORED or outcome.reward is None:
        return failed(sample, _VERDICTS[outcome.status], outcome.error)
    trajectories = session.trajectories(outcome.reward, outcome.components, metadata, outcome.turn_rewards)
    if not trajectories:
        return failed(sample, VERDICT_ENV_ERROR, "the environment scored an episode without asking the policy once")
    return scored(sample, trajectories, "length" if outcome.status == "truncated" else session.finish_reason)
