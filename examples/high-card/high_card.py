"""The task of this example: six hands of two cards, digits. The policy takes one by naming it. The larger is better.

A sample is one conversation, such as `13=3 42=4 ...` (without the spaces): the cards of each hand are context, what
follows `=` is the policy's. The reward, 0 to 1, is the sum of the cards taken. A card that was not dealt counts 0.
The task gives the first hand. The others are luck: they differ between the samples of a task, and so do their rewards,
however well the policy plays.
"""

import random
from collections.abc import Sequence
from typing import ClassVar

from nexrl.rollout_worker import RolloutWorker, WorkerContext, scored
from nexrl.transcript import Transcript
from nexrl.v1.trajectory_pb2 import SampleResult, TaskLease

HANDS, HIGHEST_CARD = 6, 4
CARDS = [f"{first}{second}" for first in range(HIGHEST_CARD + 1) for second in range(HIGHEST_CARD + 1)]


class CountedAtTheEnd(RolloutWorker):
    """Plays a game, and tells the reward at its end."""

    samples_together = False
    tells_each_hand: ClassVar[bool] = False

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def rollout(self, lease: TaskLease) -> Sequence[SampleResult]:
        """Play one game."""
        text, task = self._context.text, self._context.task(lease)
        (sample,) = lease.samples
        luck = random.Random(f"{self._context.experiment.spec.data.seed} {sample.sample_id}")
        hands = [task["prompt"], *(luck.choice(CARDS) for _ in range(HANDS - 1))]
        transcript, points, larger = Transcript(text.encode_prompt("")), [], 0
        for turn, cards in enumerate(hands):
            transcript.add_context(text.encode(f"{cards}="))
            [completion] = await self._context.generate(lease, transcript.token_ids, turn)
            transcript.add_completion(completion)
            taken = text.decode([completion.token_ids])[0]
            points.append(int(taken) if taken and taken in cards else 0)
            larger += taken == max(cards)
        parts = [each / (HIGHEST_CARD * HANDS) for each in points]
        trajectory = transcript.trajectory(
            sum(parts),
            turn_rewards=parts if self.tells_each_hand else (),
            reward_components={"larger": larger / HANDS},
            metadata=self._context.metadata(task),
        )
        # A completion is one token, so each ends at the limit, as it should: no sample counts as truncated.
        return [scored(sample, [trajectory], "stop")]


class CountedAfterEachHand(CountedAtTheEnd):
    """Tells which part of the reward belongs to which hand."""

    tells_each_hand = True


def games(split: str) -> list[dict[str, str]]:
    """A game for each first hand."""
    return [{"prompt": cards, "answer": max(cards)} for cards in CARDS]
