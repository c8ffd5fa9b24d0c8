"""Requests to an engine and their results, without wire types and without torch."""

from dataclasses import dataclass
from typing import Literal

from nexrl.errors import InvalidArgumentError, Violation

MAX_STOP_STRINGS = 32

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class GenerationRequest:
    """`n` samples of one prompt.

    `temperature` 0 means greedy (`top_p` and `top_k` then have no effect); `top_p` 1 and `top_k` 0 keep every token.
    Each sample has a seed, from `seeds` or else drawn by the engine. It alone decides the sample's random numbers,
    independent of the rest of the request and of the batch. The last `drawn_tokens` of the prompt were drawn with these
    seeds before: the samples continue after them. Generation stops after an end-of-sequence token, after one of
    `stop_token_ids`, after the token that completes a text of `stop` (all three are part of the completion), after
    `max_new_tokens`, or at the engine's row length.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seeds: tuple[int, ...] = ()
    drawn_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = [
            ("prompt_ids", len(self.prompt_ids) >= 1, "at least one token"),
            ("max_new_tokens", self.max_new_tokens >= 1, f"at least 1, got {self.max_new_tokens}"),
            ("n", self.n >= 1, f"at least 1, got {self.n}"),
            ("temperature", 0.0 <= self.temperature < float("inf"), f"finite, at least 0, got {self.temperature}"),
            ("top_p", 0.0 < self.top_p <= 1.0, f"in (0, 1], got {self.top_p}"),
            ("top_k", self.top_k >= 0, f"at least 0, got {self.top_k}"),
            ("seeds", len(self.seeds) in (0, self.n), f"one for each of n = {self.n} samples, got {len(self.seeds)}"),
            ("seeds", all(0 <= seed < 2**63 for seed in self.seeds), f"in [0, 2**63), got {self.seeds}"),
            ("drawn_tokens", 0 <= self.drawn_tokens <= len(self.prompt_ids), f"in the prompt, got {self.drawn_tokens}"),
        ]
        is_stop_valid = len(self.stop) <= MAX_STOP_STRINGS and all(self.stop)
        rules.append(("stop", is_stop_valid, f"at most {MAX_STOP_STRINGS} texts, none empty, got {self.stop}"))
        violations = [Violation(field, text) for field, is_met, text in rules if not is_met]
        if violations:
            raise InvalidArgumentError("; ".join(map(str, violations)), violations=violations)


@dataclass(frozen=True)
class Completion:
    """One sample. The three tuples have one entry per generated token.

    `logprobs` are natural logarithms, under the distribution that the token was drawn from: after temperature, top-k
    and top-p, renormalised. Greedy tokens carry the model's own log-softmax. `policy_versions` names the weights
    that produced each token. `seed` is None where nothing was drawn yet.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    seed: int | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The `n` completions of one request, in sample order."""

    request_id: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
