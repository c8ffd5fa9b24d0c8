"""Records the tokens of one conversation in the order in which the policy saw them."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from nexrl.column_proto import encode_columns
from nexrl.columns import TOKEN_REWARDS
from nexrl.errors import InvalidArgumentError
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import Trajectory


class Transcript:
    """Context that the policy was shown, and completions that it generated; only appended to.

    Token ids are stored as the engine returned them and never made from text again. So the trainer computes with the
    exact tokens whose log-probabilities were recorded.
    """

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        self._record = Trajectory()
        self.add_context(prompt_token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, shape [T]."""
        return self._record.token_ids

    @property
    def finish_reason(self) -> str:
        """How the newest completion ended; empty without a completion."""
        return self._record.finish_reason

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy was shown. The loss mask excludes them."""
        record = self._record
        record.token_ids.extend(token_ids)
        record.loss_mask.extend([False] * len(token_ids))
        record.logprobs.extend([0.0] * len(token_ids))

    def add_completion(self, completion: GeneratedCompletion) -> None:
        """Append tokens that the policy generated. Raises InvalidArgumentError (`check_completion`)."""
        check_completion(completion)
        record = self._record
        start = len(record.token_ids)
        record.token_ids.MergeFrom(completion.token_ids)
        record.loss_mask.extend([True] * len(completion.token_ids))
        record.logprobs.MergeFrom(completion.logprobs)
        record.finish_reason = completion.finish_reason
        record.completions.add(
            start=start,
            end=start + len(completion.token_ids),
            draw=completion.draw if completion.HasField("draw") else None,
        )
        for policy_version, run in groupby(completion.policy_versions):
            end = start + sum(1 for _ in run)
            record.spans.add(start=start, end=end, policy_version=policy_version)
            start = end

    def trajectory(
        self,
        reward: float,
        *,
        turn_rewards: Sequence[float] = (),
        reward_components: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        prompt: str = "",
        response: str = "",
    ) -> Trajectory:
        """Return a copy with its reward, for SampleResult.trajectories. The transcript can still be appended to.

        `turn_rewards` are the parts of the reward that belong to each completion, in order. Raises InvalidArgumentError
        if there are some, but not one for each completion.
        """
        trajectory = Trajectory(
            reward=reward, reward_components=reward_components, metadata=metadata, prompt=prompt, response=response
        )
        trajectory.MergeFrom(self._record)
        if turn_rewards:
            column = encode_columns({TOKEN_REWARDS: self._token_rewards(turn_rewards)})
            trajectory.columns[TOKEN_REWARDS].CopyFrom(column[TOKEN_REWARDS])
        return trajectory

    def _token_rewards(self, turn_rewards: Sequence[float]) -> list[float]:
        """Return each completion's reward at its last token, 0 elsewhere. Shape [T]."""
        completions = self._record.completions
        if len(turn_rewards) != len(completions):
            raise InvalidArgumentError(
                f"turn_rewards: {len(turn_rewards)}; must be one for each completion, {len(completions)}"
            )
        rewards = [0.0] * len(self.token_ids)
        for completion, reward in zip(completions, turn_rewards, strict=True):
            rewards[completion.end - 1] += reward
        return rewards


def check_completion(completion: GeneratedCompletion) -> None:
    """Raise InvalidArgumentError unless each token has one policy version and one finite log-probability."""
    tokens, logprobs, versions = len(completion.token_ids), len(completion.logprobs), len(completion.policy_versions)
    if not tokens == logprobs == versions:
        raise InvalidArgumentError(
            f"completion: {tokens} tokens, {logprobs} log-probabilities, {versions} policy versions"
        )
    # Engines mark a missing log-probability with -9999 (vLLM) or NaN. `sum` and `min` find both without a Python loop.
    if tokens and not (math.isfinite(sum(completion.logprobs)) and min(completion.logprobs) > -9000.0):
        raise InvalidArgumentError(
            "completion: a log-probability is not finite, or is the engine's mark for a missing one (-9999)"
        )
