"""rollout.type demonstrations: the answers of the tasks are trained, and the policy is sampled for validation only."""

from collections.abc import Sequence

from nexrl.errors import InvalidArgumentError
from nexrl.policy import Policy
from nexrl.rewards import Reward
from nexrl.rollout_worker import committed_version, scored
from nexrl.spec.experiment import Experiment
from nexrl.tasks import parse_task, trajectory_metadata
from nexrl.text import TextCodec
from nexrl.transcript import Transcript
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION, SampleResult, TaskLease
from nexrl_rollout.single_turn import SingleTurnWorker
from nexrl_rollout.user_threads import UserThreads

REWARD = 1.0
"""Of each demonstration. Nothing is trained with it."""


class DemonstrationWorker(SingleTurnWorker):
    """Takes the answer of a task as the completion of its prompt.

    It ends with the model's end token. A longer one than `rollout.maxNewTokens`, or than the row has room for, is cut,
    as a generated one is. Its tokens have no log-probabilities, so they are 0, and name the committed policy version.
    """

    def __init__(
        self, policy: Policy, codec: TextCodec, reward: Reward, threads: UserThreads, experiment: Experiment
    ) -> None:
        super().__init__(policy, codec, reward, threads, experiment)
        self._max_sequence_tokens = experiment.spec.max_sequence_tokens

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """One demonstration for each sample; for validation, completions of the policy and their rewards."""
        if lease.purpose == PURPOSE_VALIDATION:
            return await super().rollout(lease)
        task = parse_task(lease.task)
        prompt_ids = self._codec.encode_prompt(task["prompt"])
        room = min(self._rollout.max_new_tokens, self._max_sequence_tokens - len(prompt_ids))
        if room < 1:
            raise InvalidArgumentError(
                f"task {task['id']}: prompt: {len(prompt_ids)} tokens; at most {self._max_sequence_tokens - 1} "
                "(inference.maxTokensPerRow, or model.scratch.maxPositions)"
            )
        answer_ids = self._codec.encode_answer(_answer(task))
        token_ids = answer_ids[:room]
        transcript = Transcript(prompt_ids)
        transcript.add_completion(
            GeneratedCompletion(
                token_ids=token_ids,
                logprobs=[0.0] * len(token_ids),
                policy_versions=[await committed_version(self._policy)] * len(token_ids),
                finish_reason="stop" if len(token_ids) == len(answer_ids) else "length",
            )
        )
        trajectory = transcript.trajectory(
            REWARD,
            metadata=trajectory_metadata(task, self._key_list),
            prompt=task["prompt"],
            response=self._codec.decode([token_ids])[0],
        )
        return [scored(sample, [trajectory], transcript.finish_reason) for sample in lease.samples]


def _answer(task: dict[str, object]) -> str:
    answer = task["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise InvalidArgumentError(f"task {task['id']}: answer: {answer!r}; a demonstration is text or a number")
    return str(answer)
