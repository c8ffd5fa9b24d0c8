"""Rewards for tasks of the reasoning-gym package (data.type reasoning_gym).

Its scorers give partial credit for length and for some empty answers (design: environments.md, section 4), which a
policy can learn instead of the task; `nexrl.rewards:last_number` and `nexrl.rewards:exact_match` do not, where the
answer is a number or one text.
"""

from collections.abc import Mapping
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer


def native_score(task: Mapping[str, Any], text: str, is_finished: bool) -> float:
    """Score, 0 to 1, that the task's own generator gives to what is inside <answer>, or to the whole text without that
    tag.

    For `rollout.reward: nexrl_rollout.environments.reasoning_gym:native_score`. Some scorers raise on a malformed
    answer: the verdict is then REWARD_ERROR.
    """
    metadata = task["metadata"]
    entry = {"question": task["prompt"], "answer": task["answer"], "metadata": metadata}
    answer = extract_answer(text) or text.strip()
    return float(get_score_answer_fn(metadata["source_dataset"])(answer=answer, entry=entry))
