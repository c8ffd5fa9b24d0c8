"""The interface of environments, which users write to train an agent. Requires the extra `nexrl[rollout]`.

An `Environment` runs a whole episode: it sends any number of requests to an OpenAI-compatible endpoint and returns the
outcome. It never sees tokens; the endpoint records them. `ChatLoop` is an environment for a `Game` with `reset` and
`step`.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import aiohttp

from nexrl.code_reference import USER_CODE_ERRORS, has_method, load_reference
from nexrl.errors import InvalidArgumentError
from nexrl.exception_text import exception_text

Status = Literal["ok", "truncated", "env_error", "reward_error", "timeout"]
Message = Mapping[str, Any]
"""A chat message of the OpenAI API, for example {"role": "user", "content": "..."}."""

SCORED: tuple[Status, ...] = ("ok", "truncated")


@dataclass(frozen=True)
class Task:
    """One item of the data set."""

    id: str
    """Id of the item; the same in every epoch."""
    item: Mapping[str, Any]
    """`prompt`, `answer` and `metadata` (nexrl.datasets). An item that was added by RPC may have other keys."""
    purpose: Literal["training", "validation"] = "training"
    """What the episode is for."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible API for one episode. It records all that it generates as the trajectory of the episode.

    The experiment sets temperature, top_p, top_k and seeds: a client omits them, and is refused if it sends other
    values. It may lower max_tokens and add stop strings to a turn.
    """

    base_url: str
    """Base URL, which ends in /v1. It contains the session of this episode: do not use it for another one."""
    api_key: str
    """Any text is accepted; for clients that require a key."""
    model: str
    """The model tag."""
    max_new_tokens: int
    """Longest completion of one turn, in tokens."""
    temperature: float
    """Sampling temperature of the episode, for clients that always send one; 0 is greedy. Validation has its own."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. `reward` is set if and only if `status` is ok or truncated: a failure is not a reward of 0.

    Raises InvalidArgumentError otherwise, and for a reward, component or turn reward that is not finite.
    """

    status: Status
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward and other scores, for metrics."""
    error: str = ""
    """What failed, for the log."""
    turn_rewards: Sequence[float] = ()
    """The part of `reward` that belongs to each completion of the policy, in order; what they leave of it belongs to
    the last. Empty: all of it does. Advantages `return_to_go` and `turn_mean_std` use them."""

    def __post_init__(self) -> None:
        if (self.status in SCORED) != (self.reward is not None):
            raise InvalidArgumentError(
                f"outcome {self.status} with reward {self.reward}: ok and truncated require a reward, others have none"
            )
        numbers = [*self.components.values(), *self.turn_rewards, *([] if self.reward is None else [self.reward])]
        if not all(math.isfinite(number) for number in numbers):
            raise InvalidArgumentError(
                f"outcome: reward {self.reward}, components {dict(self.components)} and turn_rewards "
                f"{list(self.turn_rewards)} must be finite"
            )


class Environment(Protocol):
    """Runs episodes, many at a time. None of its code runs in the event loop that serves the endpoint."""

    def run(self, task: Task, endpoint: Endpoint) -> Outcome | Awaitable[Outcome]:
        """Run one episode. An exception counts as env_error.

        `async def run`: all episodes share one event loop, so it must not block. It is cancelled at its time limit, and
        when the worker stops.

        `def run`: each episode has a thread of its own, so it may block, and must lock what episodes share. At its time
        limit the endpoint begins to refuse its requests; it must return soon after.

        An environment may also have a method `close()`, plain or `async`: it is called once when the process stops.
        """
        ...


@dataclass(frozen=True)
class Turn:
    """The game's answer: messages for the policy, and the reward that the episode has if it ends here."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False


class Game(Protocol):
    """One episode, step by step."""

    async def reset(self, task: Task) -> Turn:
        """Start the episode. The messages open the conversation."""
        ...

    async def step(self, reply: str) -> Turn:
        """Return the answer to the policy's message."""
        ...

    async def close(self) -> None:
        """Release resources. Called once, however the episode ends."""
        ...


class ChatLoop:
    """An environment in which the policy and a game take turns. Each episode has a new game.

    The episode is truncated, with the reward so far, after `max_turns` messages of the policy or when the context is
    full. The part of the reward that belongs to a message is what the reward so far, at first 0, rose by after it.
    """

    def __init__(self, new_game: Callable[[], Game], *, max_turns: int) -> None:
        self._new_game = new_game
        self._max_turns = max_turns

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Play one game until it is over or truncated."""
        game = self._new_game()
        try:
            async with aiohttp.ClientSession() as http:
                return await self._play(game, task, _Chat(http, endpoint))
        finally:
            await game.close()

    async def _play(self, game: Game, task: Task, chat: "_Chat") -> Outcome:
        turn = await game.reset(task)
        rewards = [0.0]  # so far, after each message of the policy
        for _ in range(self._max_turns):
            chat.messages += turn.messages
            reply = await chat.reply()
            if reply is None:
                break
            turn = await game.step(reply)
            rewards.append(turn.reward)
            if turn.is_over:
                break
        rises = [after - before for before, after in pairwise(rewards)]
        return Outcome("ok" if turn.is_over else "truncated", turn.reward, turn.components, turn_rewards=rises)


def load_environment(reference: str, folder: Path) -> Environment:
    """Return the environment that `module:name` makes when it is called without arguments.

    The module is searched in `folder` first. Raises InvalidArgumentError.
    """
    factory = load_reference(reference, folder)
    if not callable(factory):
        raise InvalidArgumentError(f"{reference} is not a class or function but {type(factory).__name__}")
    try:
        environment = factory()
    except USER_CODE_ERRORS as error:
        raise InvalidArgumentError(f"rollout.environment {reference}: {exception_text(error)}") from error
    if not has_method(environment, "[async] def run"):
        raise InvalidArgumentError(
            f"{reference}() returned {type(environment).__name__}, which has no method "
            "`[async] def run(task, endpoint)`"
        )
    return cast(Environment, environment)


class _Chat:
    """A conversation with the endpoint."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self.messages: list[Message] = []
        self._http = http
        self._endpoint = endpoint

    async def reply(self) -> str | None:
        """Return the policy's next message; None if the context has no room for one."""
        body = {"model": self._endpoint.model, "messages": self.messages}
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        url = f"{self._endpoint.base_url}/chat/completions"
        # No timeout here: the time limit of the episode cancels this request.
        async with self._http.post(
            url, json=body, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        ) as response:
            answer = await response.json()
            if response.status == 400 and "maximum context length" in answer["error"]["message"]:
                return None
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status}: {answer}")
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        return str(message["content"] or "")
