"""`spec.rollout`: how samples are produced."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec.cluster import Template
from nexrl.spec.section import LIVE, ROLLING, Count, Reference, Seconds, Text, code, refuse, written_out
from nexrl.spec.variants import VariantSection

REWARD = code("a function", "task", "text", "is_finished")


class RolloutSpec(VariantSection):
    """How samples are produced: the kind of rollout worker, the sampling, and how failures are retried."""

    TAGS: ClassVar = ("type",)

    type: str = Field(description="Kind of rollout worker.")
    replicas: Annotated[int, LIVE] = Field(
        default=1,
        ge=0,
        le=1024,
        description="Rollout processes (pods); 0 if only workers outside of the run feed the experiment.",
    )
    workers: int = Field(default=32, ge=1, le=4096, description="Samples that each process produces at the same time.")
    chat: bool = Field(
        default=False, description="Whether prompts go through the model's chat template as user messages."
    )
    system_prompt: Text | None = Field(
        default=None, description="System message before each prompt; requires chat: true."
    )
    max_new_tokens: Count = Field(
        default=256, description="Longest completion (tokens) per turn. A longer one is cut and its verdict TRUNCATED."
    )
    temperature: float = Field(default=1.0, gt=0, le=10, description="Sampling temperature of training rollouts.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Tokens are drawn from the smallest set of the most likely ones that has this probability; 1 = all "
        "tokens. The trainer truncates its own distribution in the same way.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Tokens are drawn from this many of the most likely ones; 0 = all tokens. Applied before topP.",
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(),
        max_length=16,
        description="Texts that end a completion, as `['</answer>']`. Their tokens are part of the completion and are "
        "trained; rewards and agents get the text before them.",
    )
    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts at a sample before it is given up.")
    max_failure_ratio: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of attempts with verdict ENV_ERROR, REWARD_ERROR or TIMEOUT at which the experiment fails. "
        "It is taken over at least the last 4 trajectoryPool.batchSize finished attempts, at least 128, and at least "
        "twice replicas times workers. 1: all of them failed. `monitor.errors.policy: continue` means no limit.",
    )
    lease_seconds: Seconds = Field(
        default=60.0, description="Time without a renewal after which a worker's samples go to another worker."
    )
    timeout_seconds: Seconds = Field(
        default=300.0, description="Longest time for one attempt at a sample; after it the verdict is TIMEOUT."
    )
    template: Annotated[Template, ROLLING] = None

    @field_validator("system_prompt")
    @classmethod
    def _requires_chat(cls, system_prompt: str | None, info: ValidationInfo) -> str | None:
        if system_prompt is not None and info.data.get("chat") is False:
            raise refuse("requires rollout.chat: true")
        return system_prompt


class MockRollout(RolloutSpec):
    """Random trajectories, made without an inference engine."""

    type: Literal["mock"] = Field(description="Random trajectories.")


class ScoredRollout(RolloutSpec):
    """Rollouts with one prompt, one completion and a reward function."""

    reward: Annotated[Reference, REWARD] = Field(
        description="`module:function` that returns the reward, see nexrl.rewards."
    )


class SimpleRollout(ScoredRollout):
    """One prompt, one completion, a reward function."""

    type: Literal["simple"] = Field(default="simple", description="One turn.")
    reward: Annotated[Reference, REWARD, written_out(None)] = Field(
        default="nexrl.rewards:exact_match", description="`module:function` that returns the reward, see nexrl.rewards."
    )


class DemonstrationRollout(ScoredRollout):
    """The answers of the tasks are trained as completions of their prompts (supervised fine-tuning).

    The policy is sampled for validation only.
    """

    type: Literal["demonstrations"] = Field(description="Supervised fine-tuning.")
    reward: Annotated[Reference, REWARD] = Field(
        default="nexrl.rewards:exact_match",
        description="`module:function` that returns the reward of a completion in a validation.",
    )


class AgentRollout(RolloutSpec):
    """An environment owns the conversation and the reward."""

    type: Literal["agent"] = Field(description="A conversation with an environment.")
    environment: Annotated[Reference, code("a function or class", method="[async] def run"), written_out(None)] = Field(
        description="`module:Class` of the environment."
    )


class ExternalRollout(RolloutSpec):
    """Agents of other processes, in any language, open a session for each episode and close it with the reward."""

    type: Literal["external"] = Field(description="Agents elsewhere.")


class SingleTurnMathRollout(ScoredRollout):
    """One prompt, one completion, graded as mathematics."""

    type: Literal["single_turn_math"] = Field(description="One turn, graded as mathematics.")
    reward: Annotated[Reference, REWARD] = Field(
        default="nexrl.rewards:math_answer", description="`module:function` that returns the reward, see nexrl.rewards."
    )


class WorkerRollout(RolloutSpec):
    """A rollout worker of yours."""

    type: Literal["worker"] = Field(description="A rollout worker of yours.")
    worker: Annotated[
        Reference, code("a subclass of nexrl.rollout_worker.RolloutWorker", "context", method="async def rollout")
    ] = Field(description="`module:Class` of the rollout worker, see nexrl.rollout_worker.")
