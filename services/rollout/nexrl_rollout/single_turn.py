"""rollout.type simple and single_turn_math: one prompt, one completion, a reward function."""

from collections.abc import Mapping, Sequence
from typing import Any

from nexrl.policy import Policy, Sampling, draw_seed
from nexrl.rewards import Reward, RewardFailedError, Score, score
from nexrl.rollout_worker import RolloutWorker, failed, scored
from nexrl.spec.experiment import Experiment
from nexrl.stop_strings import text_before_stop
from nexrl.tasks import parse_task, trajectory_metadata
from nexrl.text import TextCodec
from nexrl.transcript import Transcript
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import VERDICT_REWARD_ERROR, SampleResult, TaskLease
from nexrl_rollout.user_threads import UserThreads


class SingleTurnWorker(RolloutWorker):
    """Draws all samples of a lease in one call of the policy. The prompt is tokenized once for the group."""

    def __init__(
        self, policy: Policy, codec: TextCodec, reward: Reward, threads: UserThreads, experiment: Experiment
    ) -> None:
        self._policy = policy
        self._codec = codec
        self._reward = reward
        self._threads = threads
        self._rollout = experiment.spec.rollout
        self._seed = experiment.spec.inference.seed
        self._key_list = experiment.spec.trajectory_pool.key_list

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """Draw completions and score them. A failing reward fails only its own sample."""
        task = parse_task(lease.task)
        prompt_ids = self._codec.encode_prompt(task["prompt"])
        completions = await self._policy.generate(
            prompt_ids,
            len(lease.samples),
            Sampling.of(lease, max_new_tokens=self._rollout.max_new_tokens),
            seeds=[draw_seed(self._seed, sample.sample_id, sample.attempt) for sample in lease.samples],
            timeout_seconds=self._rollout.timeout_seconds,
        )
        decoded = self._codec.decode([completion.token_ids for completion in completions])
        texts = [text_before_stop(text, lease.stop) for text in decoded]
        # A slow reward must delay neither the renewal of leases nor other groups.
        scores = await self._threads.run(self._score, (task, texts, completions), "the reward")
        metadata = trajectory_metadata(task, self._key_list)
        results = []
        for sample, completion, text, given in zip(lease.samples, completions, texts, scores, strict=True):
            if isinstance(given, RewardFailedError):
                results.append(failed(sample, VERDICT_REWARD_ERROR, given))
                continue
            transcript = Transcript(prompt_ids)
            transcript.add_completion(completion)
            trajectory = transcript.trajectory(
                given.reward,
                reward_components=given.components,
                metadata=metadata,
                prompt=task["prompt"],
                response=text,
            )
            results.append(scored(sample, [trajectory], completion.finish_reason))
        return results

    def _score(
        self, task: Mapping[str, Any], texts: Sequence[str], completions: Sequence[GeneratedCompletion]
    ) -> list[Score | RewardFailedError]:
        return [
            self._score_one(task, text, completion.finish_reason == "stop")
            for text, completion in zip(texts, completions, strict=True)
        ]

    def _score_one(self, task: Mapping[str, Any], text: str, is_finished: bool) -> Score | RewardFailedError:
        try:
            return score(self._reward, task, text, is_finished)
        except RewardFailedError as error:
            return error
