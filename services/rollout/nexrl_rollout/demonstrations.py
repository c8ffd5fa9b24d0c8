"""rollout.type demonstrations: the answers of the tasks are trained, and only validation samples from the policy."""

from collections.abc import Mapping, Sequence
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl.policy import Policy
from nexrl.rewards import Reward
from nexrl.rollout_worker import NotAttemptedError
from nexrl.spec.experiment import Experiment
from nexrl.text import TextCodec
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION, TaskLease
from nexrl_rollout.single_turn import SingleTurnWorker
from nexrl_rollout.user_threads import UserThreads


class DemonstrationWorker(SingleTurnWorker):
    """Takes the answer of a task as the completion of its prompt, and scores it as if the policy had generated it.

    It ends with the model's end token. A longer one than `rollout.maxNewTokens`, or than the row has room for, is cut,
    as a generated one is. Its tokens have no log-probabilities, so they are 0, and name the committed policy version.
    """

    def __init__(
        self, policy: Policy, codec: TextCodec, reward: Reward, threads: UserThreads, experiment: Experiment
    ) -> None:
        super().__init__(policy, codec, reward, threads, experiment)
        self._max_sequence_tokens = experiment.spec.max_sequence_tokens

    async def _completions(
        self, lease: TaskLease, task: Mapping[str, Any], prompt_ids: Sequence[int]
    ) -> Sequence[GeneratedCompletion]:
        if lease.purpose == PURPOSE_VALIDATION:
            return await super()._completions(lease, task, prompt_ids)
        room = min(self._rollout.max_new_tokens, self._max_sequence_tokens - len(prompt_ids))
        if task["answer"] is None:
            raise InvalidArgumentError(f"task {task['id']}: answer: missing; a demonstration needs one")
        if room < 1:
            raise InvalidArgumentError(
                f"task {task['id']}: prompt: {len(prompt_ids)} tokens; at most {self._max_sequence_tokens - 1} "
                "(inference.maxTokensPerRow, or model.scratch.maxPositions)"
            )
        policy_version = await self._policy.newest_version()
        if policy_version < 0:
            raise NotAttemptedError("no policy version is committed")
        answer_ids = self._codec.encode_answer(str(task["answer"]))
        token_ids = answer_ids[:room]
        completion = GeneratedCompletion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            policy_versions=[policy_version] * len(token_ids),
            finish_reason="stop" if len(token_ids) == len(answer_ids) else "length",
        )
        return [completion] * len(lease.samples)
