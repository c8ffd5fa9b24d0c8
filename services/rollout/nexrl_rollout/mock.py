"""rollout.type mock: made-up trajectories without an engine, for trying the machinery."""

import random
from collections.abc import Sequence

from nexrl.policy import Policy
from nexrl.rollout_worker import RolloutWorker, committed_version, scored
from nexrl.spec.experiment import Experiment
from nexrl.tasks import parse_task, trajectory_metadata
from nexrl.text import TextCodec
from nexrl.transcript import Transcript
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import Draw, SampleLease, SampleResult, TaskLease

MAX_TOKENS = 8


class MockWorker(RolloutWorker):
    """Produces random tokens and a random reward of 0 or 1, which depend only on the sample's id. They name the
    committed policy version."""

    def __init__(self, policy: Policy, codec: TextCodec, experiment: Experiment) -> None:
        self._policy = policy
        self._codec = codec
        self._max_tokens = min(MAX_TOKENS, experiment.spec.rollout.max_new_tokens)
        self._key_list = experiment.spec.trajectory_pool.key_list

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """One made-up trajectory for each sample."""
        policy_version = await committed_version(self._policy)
        return [self._result(lease, sample, policy_version) for sample in lease.samples]

    def _result(self, lease: TaskLease, sample: SampleLease, policy_version: int) -> SampleResult:
        draw = random.Random(sample.sample_id)
        task = parse_task(lease.task)
        length = draw.randint(1, self._max_tokens)
        completion = GeneratedCompletion(
            token_ids=[draw.randrange(self._codec.vocabulary_size) for _ in range(length)],
            logprobs=[-draw.random() for _ in range(length)],
            policy_versions=[policy_version] * length,
            finish_reason="stop",
            # The pool refuses tokens that were drawn otherwise than the experiment asks for.
            draw=Draw(
                temperature=lease.temperature,
                top_p=lease.top_p,
                top_k=lease.top_k,
                max_new_tokens=self._max_tokens,
            ),
        )
        transcript = Transcript(self._codec.encode_prompt(task["prompt"]))
        transcript.add_completion(completion)
        trajectory = transcript.trajectory(
            float(draw.random() < 0.5),
            metadata=trajectory_metadata(task, self._key_list),
            prompt=task["prompt"],
            response=self._codec.decode([completion.token_ids])[0],
        )
        return scored(sample, [trajectory], completion.finish_reason)
