"""One rollout's conversations with the policy, token by token. Pure: no HTTP, no engine.

A turn's prompt is the ids that the session has been served, plus the ids of what the client added since. What was
served is never made from text again: decoding and encoding again changes tokens, and with them what the
log-probabilities belong to (design: environments.md, section 8). Where the client's history is not what it was served,
a new chain begins.

Invariants, tests in tests/unit/nexrl_rollout/test_session.py:
- the prompt of a turn that continues a chain begins with all tokens of that chain;
- a generated token is trained in exactly one chain.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl.policy import Sampling
from nexrl.transcript import Transcript
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import Trajectory
from nexrl_rollout.text import TextCodec

Message = Mapping[str, Any]

# Stands for an assistant message in the chat template; no template and no model has it in its vocabulary.
_SENTINEL = "\x00nexrl\x00"
_IDENTIFYING_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls")


@dataclass
class Chain:
    """One conversation without a break: the tokens of all turns, each prompt an extension of the turn before."""

    transcript: Transcript
    prompt: str
    responses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServedTurn:
    """A completion as it was served, with all tokens up to its end."""

    chain: Chain
    token_ids: Sequence[int]
    finish_reason: str

    @property
    def is_newest(self) -> bool:
        """True while nothing has been appended to its chain since."""
        return len(self.chain.transcript.token_ids) == len(self.token_ids)


@dataclass(frozen=True)
class SessionPrompt:
    """The token ids to generate from, and the turn that they continue; None where they begin a chain."""

    token_ids: Sequence[int]
    continues: ServedTurn | None
    is_break: bool = False
    """True when the history holds a reply that this session was not served, though it was served others."""


class Session:
    """What one rollout was served. Its id is a secret of 256 bits: who knows it may generate in its name."""

    def __init__(self, sampling: Sampling, seeds: Iterator[int]) -> None:
        self.id = secrets.token_urlsafe(32)
        self.sampling = sampling
        self.seeds = seeds
        """One for each turn, without end."""
        self.breaks = 0
        """Requests with a history that had been edited."""
        self.finish_reason = ""
        """How the newest completion ended."""
        self._chains: list[Chain] = []
        self._turns: dict[str, ServedTurn] = {}

    def prompt(self, codec: TextCodec, messages: Sequence[Message], tools: Sequence[Message] = ()) -> SessionPrompt:
        """Token ids for the next turn. Raises InvalidArgumentError when the chat template refuses the messages."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        turn = self._turns.get(_fingerprint(messages[: last + 1], tools)) if last >= 0 else None
        if turn is None:
            token_ids = codec.encode(codec.render(messages, tools))
            return SessionPrompt(token_ids, None, is_break=last >= 0 and bool(self._chains))
        return SessionPrompt([*turn.token_ids, *_added_ids(codec, messages, tools, last, turn)], turn)

    def record(
        self,
        prompt: SessionPrompt,
        completion: GeneratedCompletion,
        served: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        text: str = "",
        prompt_text: str = "",
    ) -> None:
        """Keep a turn. `served` are the request's messages and the reply; `text` is the reply as the policy wrote
        it."""
        turn = prompt.continues
        if turn is not None and turn.is_newest:
            chain = turn.chain
            chain.transcript.add_context(prompt.token_ids[len(turn.token_ids) :])
        else:  # also a second continuation of one turn: what the first chain trains is only context here
            chain = Chain(Transcript(prompt.token_ids), prompt_text)
            self._chains.append(chain)
        chain.transcript.add_completion(completion)
        chain.responses.append(text)
        self.breaks += prompt.is_break
        self.finish_reason = completion.finish_reason
        token_ids = list(chain.transcript.token_ids)
        self._turns[_fingerprint(served, tools)] = ServedTurn(chain, token_ids, completion.finish_reason)

    def trajectories(
        self, reward: float, components: Mapping[str, float], metadata: Mapping[str, str]
    ) -> list[Trajectory]:
        """One trajectory for each chain; more than one are marked with `chain`, an edited history with `breaks`."""
        marks = {"breaks": str(self.breaks)} if self.breaks else {}
        return [
            chain.transcript.trajectory(
                reward,
                reward_components=components,
                metadata={**metadata, **marks, **({"chain": str(index)} if len(self._chains) > 1 else {})},
                prompt=chain.prompt,
                response="\n".join(chain.responses),
            )
            for index, chain in enumerate(self._chains)
        ]


def _added_ids(
    codec: TextCodec, messages: Sequence[Message], tools: Sequence[Message], last: int, turn: ServedTurn
) -> Sequence[int]:
    """Token ids of everything after the reply at `last`: the end of its turn, the messages since, the opening of the
    next turn.

    The template is rendered with a sentinel in place of the reply, so that the reply's own text does not matter.
    """
    stand_in = {"role": "assistant", "content": _SENTINEL}
    rendered = codec.render([*messages[:last], stand_in, *messages[last + 1 :]], tools)
    _, found, added = rendered.rpartition(_SENTINEL)
    if not found:
        raise InvalidArgumentError("the chat template drops assistant messages: it cannot be used over several turns")
    added_ids = codec.encode(added)
    # The policy has written the end of the turn itself, unless a limit cut it off.
    if turn.finish_reason == "stop" and added_ids[:1] == list(turn.token_ids[-1:]):
        return added_ids[1:]
    return added_ids


def _fingerprint(messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """Names a history; what clients add to messages or leave out without changing them does not count."""
    plain = [
        {key: message[key] for key in _IDENTIFYING_KEYS if message.get(key) not in (None, "", [])}
        for message in messages
    ]
    return json.dumps([plain, tools], sort_keys=True)
