"""Rollout workers: what a user writes for `rollout.type: worker`, and the base of the built-in ones.

class Mine(RolloutWorker):
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        task = self.context.task(lease)
        prompt_ids = self.context.text.encode_prompt(task["prompt"])
        completions = await self.context.generate(lease, prompt_ids)
        results = []
        for sample, completion in zip(lease.samples, completions, strict=True):
            transcript = Transcript(prompt_ids)
            transcript.add_completion(completion)
            trajectory = transcript.trajectory(my_reward(completion), metadata=self.context.metadata(task))
            results.append(scored(sample, [trajectory], completion.finish_reason))
        return results
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import ArrayLike

from nexrl.code_reference import USER_CODE_ERRORS, load_reference
from nexrl.column_proto import encode_columns
from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.exception_text import exception_text
from nexrl.policy import Policy, Sampling, draw_seed
from nexrl.rpc.client import is_passing
from nexrl.spec.experiment import Experiment
from nexrl.tasks import parse_task, trajectory_metadata
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import (
    VERDICT_OK,
    VERDICT_TRUNCATED,
    SampleLease,
    SampleResult,
    TaskLease,
    Trajectory,
    Verdict,
)

if TYPE_CHECKING:
    from nexrl.text import TextCodec

MAX_ERROR_CHARACTERS = 4096


class NotAttemptedError(NexrlError):
    """Raised by `rollout` if nothing was begun: the samples are granted again, and no attempt is counted."""


class RolloutWorker(ABC):
    """Produces samples. Subclass it and override `rollout`; the rollout process leases, renews and puts.

    A class that `rollout.worker` names is called once in each rollout process, with a WorkerContext.
    """

    samples_together: ClassVar[bool] = True
    """False: `rollout` is called once for each sample, so that each has its own time limit and is put when it is
    ready."""

    @abstractmethod
    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """One result for each sample of `lease`, in any order; many calls run at the same time.

        `lease.purpose` tells training from validation. If it raises RewardFailedError (nexrl.rewards), all samples get
        the verdict REWARD_ERROR; DeadlineExceededError gives TIMEOUT, anything else ENV_ERROR. The pool then has them
        attempted again. The call is cancelled when the lease is lost or the process stops.
        """

    async def wanted(self, most: int) -> int:
        """Return how many samples to lease now, 1 to `most`. May wait."""
        return most


@dataclass(frozen=True)
class WorkerContext:
    """What a rollout worker may use: the policy, the model's tokenizer and chat template, the experiment."""

    policy: Policy
    text: "TextCodec"
    experiment: Experiment

    def task(self, lease: TaskLease) -> dict[str, Any]:
        """The leased task: `id`, `prompt`, `answer`, `metadata`, and more keys if its item has them."""
        return parse_task(lease.task)

    def metadata(self, task: Mapping[str, Any]) -> dict[str, str]:
        """What each trajectory of the task must say, so that the pool can group it."""
        return trajectory_metadata(task, self.experiment.spec.trajectory_pool.key_list)

    def sampling(self, lease: TaskLease) -> Sampling:
        """The sampling parameters of the lease; the pool refuses samples that were drawn with others."""
        return Sampling.of(lease, max_new_tokens=self.experiment.spec.rollout.max_new_tokens)

    async def generate(
        self, lease: TaskLease, prompt_ids: Sequence[int], turn: int = 0
    ) -> Sequence[GeneratedCompletion]:
        """One completion of the prompt for each sample of the lease, drawn as the experiment says.

        A worker of several turns numbers its calls with `turn`, so that each has its own seeds.
        """
        seed = self.experiment.spec.inference.seed
        return await self.policy.generate(
            prompt_ids,
            len(lease.samples),
            self.sampling(lease),
            seeds=[draw_seed(seed, sample.sample_id, sample.attempt, turn) for sample in lease.samples],
            timeout_seconds=self.experiment.spec.rollout.timeout_seconds,
        )


def load_worker(reference: str, folder: Path, context: WorkerContext) -> RolloutWorker:
    """The worker of the class `module:Class`, looked up in `folder` first. Raises InvalidArgumentError."""
    found = load_reference(reference, folder)
    if not (isinstance(found, type) and issubclass(found, RolloutWorker)):
        raise InvalidArgumentError(f"rollout.worker {reference}: not a subclass of nexrl.rollout_worker.RolloutWorker")
    try:
        return found(context)  # type: ignore[call-arg]  # its own constructor, as documented
    except USER_CODE_ERRORS as error:
        raise InvalidArgumentError(f"rollout.worker {reference}: {exception_text(error)}") from error


async def committed_version(policy: Policy) -> int:
    """Return the policy version that a sample must name which no engine generated.

    It is at least the version that let the pool grant the sample, so mode sync does not drop it as stale. Raises
    NotAttemptedError if weight sync cannot be asked, or has committed none.
    """
    try:
        version = await policy.newest_version()
    except NexrlError as error:
        if is_passing(error):
            raise NotAttemptedError(f"weight sync: {error}") from error
        raise
    if version < 0:
        raise NotAttemptedError("no policy version is committed")
    return version


def with_columns(trajectory: Trajectory, columns: Mapping[str, ArrayLike]) -> Trajectory:
    """Add columns to the trajectory, each one value per token or one for all; the loss and the processor get them.

    Returns the trajectory. Raises InvalidArgumentError for anything but numbers and booleans.
    """
    for name, tensor in encode_columns(columns).items():
        trajectory.columns[name].CopyFrom(tensor)
    return trajectory


def scored(sample: SampleLease, trajectories: Sequence[Trajectory], finish_reason: str) -> SampleResult:
    """A sample with a reward: TRUNCATED if a limit cut its last completion, else OK."""
    return SampleResult(
        sample_id=sample.sample_id,
        attempt=sample.attempt,
        verdict=VERDICT_TRUNCATED if finish_reason == "length" else VERDICT_OK,
        trajectories=trajectories,
    )


def failed(sample: SampleLease, verdict: Verdict.ValueType, error: object) -> SampleResult:
    """A sample without a reward."""
    return SampleResult(
        sample_id=sample.sample_id, attempt=sample.attempt, verdict=verdict, error=str(error)[:MAX_ERROR_CHARACTERS]
    )


def all_failed(lease: TaskLease, verdict: Verdict.ValueType, error: object) -> list[SampleResult]:
    """Every sample of a lease failed in the same way."""
    return [failed(sample, verdict, error) for sample in lease.samples]
