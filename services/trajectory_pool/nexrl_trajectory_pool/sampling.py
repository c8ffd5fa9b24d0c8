"""Checks how tokens were drawn: the recorded sampling parameters and the range of log-probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass

from nexrl.errors import Violation
from nexrl.v1 import trajectory_pb2 as pb

MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; the rest allows for rounding."""

MIN_LOGPROB = -104.0
"""The smallest float32 above 0 is exp(-103.3). An engine never draws a token whose probability is 0."""

RELATIVE_TOLERANCE = 1e-6
"""Engines may keep a parameter as float32."""


@dataclass(frozen=True)
class SamplingParameters:
    """The experiment's sampling parameters, spec.rollout.{temperature,topP,topK}."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def differences(self, temperature: float, top_p: float, top_k: int) -> Iterator[tuple[str, float, float]]:
        """Yield name, value and expected value of each parameter in which a draw differs from the experiment."""
        pairs = (
            ("temperature", temperature, self.temperature),
            ("top_p", top_p or 1.0, self.top_p),
            ("top_k", top_k, self.top_k),
        )
        return (pair for pair in pairs if abs(pair[1] - pair[2]) > RELATIVE_TOLERANCE * abs(pair[2]))

    def violations(self, path: str, trajectory: pb.Trajectory) -> Iterator[Violation]:
        """Yield what keeps `trajectory` from being trained: no trained token, or a trained token drawn otherwise.

        Tokens without a record of their draw are accepted.
        """
        if not any(trajectory.loss_mask):
            yield Violation(f"{path}.loss_mask", "trains nothing; at least one token must be true")
        for i, completion in enumerate(trajectory.completions):
            if completion.HasField("draw") and any(trajectory.loss_mask[completion.start : completion.end]):
                draw = completion.draw
                for name, value, expected in self.differences(draw.temperature, draw.top_p, draw.top_k):
                    where = f"{path}.completions[{i}].draw.{name}"
                    yield Violation(where, f"{value:g}; the experiment samples with {expected:g}")


def logprob_violations(path: str, trajectory: pb.Trajectory) -> Iterator[Violation]:
    """Yield log-probabilities that no engine can have produced; NaN and infinities are for others to refuse."""
    for value in (max(trajectory.logprobs, default=0.0), min(trajectory.logprobs, default=0.0)):
        if value > MAX_LOGPROB or value < MIN_LOGPROB:
            yield Violation(f"{path}.logprobs", f"{value:g}; must be from {MIN_LOGPROB:g} to 0")
