"""The tokens of one conversation, in the order in which the policy saw them."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from nexrl.errors import InvalidArgumentError
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import Trajectory


class Transcript:
    """Grows at its end only: context that the policy was shown, and completions that it generated.

    Token ids are stored as the engine gave them and are never made from text again, so that the trainer computes with
    the very tokens whose log-probabilities were recorded.
    """

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        self._record = Trajectory()
        self.add_context(prompt_token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, shape [T]."""
        return self._record.token_ids

    @property
    def is_trainable(self) -> bool:
        """True when the policy generated at least one of the tokens."""
        return bool(self._record.spans)

    @property
    def finish_reason(self) -> str:
        """How the newest completion ended; empty when there is none."""
        return self._record.finish_reason

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy was shown: masked out of the loss."""
        record = self._record
        record.token_ids.extend(token_ids)
        record.loss_mask.extend([False] * len(token_ids))
        record.logprobs.extend([0.0] * len(token_ids))

    def add_completion(self, completion: GeneratedCompletion) -> None:
        """Append tokens that the policy generated. Raises InvalidArgumentError when the three arrays do not fit each
        other."""
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
        reward_components: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        prompt: str = "",
        response: str = "",
    ) -> Trajectory:
        """The transcript with its reward, for SampleResult.trajectories; the transcript itself may go on."""
        trajectory = Trajectory(
            reward=reward, reward_components=reward_components, metadata=metadata, prompt=prompt, response=response
        )
        trajectory.MergeFrom(self._record)
        return trajectory


def check_completion(completion: GeneratedCompletion) -> None:
    """Raises InvalidArgumentError unless there is one finite log-probability (at most 0) and one version for each
    token."""
    tokens, logprobs, versions = len(completion.token_ids), len(completion.logprobs), len(completion.policy_versions)
    if not tokens == logprobs == versions:
        raise InvalidArgumentError(
            f"completion: {tokens} tokens, {logprobs} log-probabilities, {versions} policy versions"
        )
    # Engines mark a missing log-probability with -9999 (vLLM) or with NaN; the sum of a list shows both at C speed.
    if tokens and not (math.isfinite(sum(completion.logprobs)) and min(completion.logprobs) > -9000.0):
        raise InvalidArgumentError(
            "completion: a log-probability is not finite, or is the engine's mark for a missing one"
        )
