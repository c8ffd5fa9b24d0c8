"""Environments: what a user writes to train an agent. Needs the extra `nexrl[rollout]`.

An `Environment` owns the whole episode: it talks to an OpenAI-compatible endpoint as often as it likes and says how it
went. It never sees tokens; the endpoint records them. `ChatLoop` makes an environment of a `Game` with `reset` and
`step`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import aiohttp

from nexrl.errors import InvalidArgumentError
from nexrl.references import load_reference

Status = Literal["ok", "truncated", "env_error", "reward_error", "timeout"]
Message = Mapping[str, Any]
"""A chat message of the OpenAI API, as {"role": "user", "content": "..."}."""

SCORED: tuple[Status, ...] = ("ok", "truncated")


@dataclass(frozen=True)
class Task:
    """One item of the data set."""

    id: str
    """The same in every epoch."""
    item: Mapping[str, Any]
    """`prompt`, `answer` and `metadata` (nexrl.datasets); an item added by RPC may have more."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible API for one episode: whatever is generated there becomes its trajectory.

    Temperature, top_p and top_k are set by the experiment, whatever the client asks for.
    """

    base_url: str
    """Ends in /v1 and names the episode's session: give it to one episode only."""
    api_key: str
    """Any text will do; here for clients that insist on a key."""
    model: str
    """The model tag."""
    max_new_tokens: int
    """Longest completion of one turn, in tokens."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. A failure is never a reward of 0: `reward` is there exactly when `status` is ok or
    truncated.

    Raises InvalidArgumentError otherwise, and for a reward that is not finite.
    """

    status: Status
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward and other scores, for metrics."""
    error: str = ""
    """What failed, for people."""

    def __post_init__(self) -> None:
        if (self.status in SCORED) != (self.reward is not None):
            raise InvalidArgumentError(
                f"outcome {self.status} with reward {self.reward}: only ok and truncated have one"
            )
        numbers = [*self.components.values(), *([] if self.reward is None else [self.reward])]
        if not all(math.isfinite(number) for number in numbers):
            raise InvalidArgumentError(
                f"outcome: reward {self.reward} and components {dict(self.components)} must be finite"
            )


class Environment(Protocol):
    """Runs episodes, many at a time."""

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """One episode. An exception means env_error; cancellation means that its time is over or its worker stops."""
        ...


@dataclass(frozen=True)
class Turn:
    """What a game answers: messages for the policy, and the reward of the episode if it ended here."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False


class Game(Protocol):
    """One episode, step by step."""

    async def reset(self, task: Task) -> Turn:
        """Begin; the messages open the conversation."""
        ...

    async def step(self, reply: str) -> Turn:
        """Answer the policy's message."""
        ...

    async def close(self) -> None:
        """Free what the game holds; called once, however the episode ends."""
        ...


class ChatLoop:
    """The environment in which the policy and a game take turns, each episode with a fresh game.

    After `max_turns` messages of the policy, or when the context is full, the episode is truncated with the reward so
    far.
    """

    def __init__(self, new_game: Callable[[], Game], *, max_turns: int) -> None:
        self._new_game = new_game
        self._max_turns = max_turns

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Plays one game to its end, or to the limit."""
        game = self._new_game()
        try:
            async with aiohttp.ClientSession() as http:
                return await self._play(game, task, _Chat(http, endpoint))
        finally:
            await game.close()

    async def _play(self, game: Game, task: Task, chat: "_Chat") -> Outcome:
        turn = await game.reset(task)
        for _ in range(self._max_turns):
            chat.messages += turn.messages
            reply = await chat.reply()
            if reply is None:
                break
            turn = await game.step(reply)
            if turn.is_over:
                return Outcome("ok", turn.reward, turn.components)
        return Outcome("truncated", turn.reward, turn.components)


def load_environment(reference: str, folder: Path) -> Environment:
    """The environment that `module:name` makes when it is called without arguments, looked up in `folder` first.

    Raises InvalidArgumentError.
    """
    factory = load_reference(reference, folder)
    if not callable(factory):
        raise InvalidArgumentError(f"{reference} is not a class or function but {type(factory).__name__}")
    environment = factory()
    if not callable(getattr(environment, "run", None)):
        raise InvalidArgumentError(
            f"{reference}() gives {type(environment).__name__}, which has no method run(task, endpoint)"
        )
    return cast(Environment, environment)


class _Chat:
    """A conversation with the endpoint."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self.messages: list[Message] = []
        self._http = http
        self._endpoint = endpoint

    async def reply(self) -> str | None:
        """The policy's next message; None when the context has no room for one."""
        body = {"model": self._endpoint.model, "messages": self.messages}
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        url = f"{self._endpoint.base_url}/chat/completions"
        # The episode has a time limit of its own, which cancels this request.
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
