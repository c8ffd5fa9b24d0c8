"""One rollout's conversations with the policy, token by token. Pure: no HTTP, no engine.

The prompt of a turn is the token ids of the turns before, plus the ids of the messages that the client added since.
Generated tokens are never encoded from text again: decoding and encoding can change tokens, and the recorded
log-probabilities would then belong to other tokens. If the client's history differs from the recorded one, a new chain
begins.

Invariants, tests in tests/unit/nexrl_rollout/test_session.py:
- the prompt of a turn that continues a chain begins with all tokens of that chain;
- a generated token is trained in exactly one chain.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl.policy import Sampling
from nexrl.text import TextCodec
from nexrl.transcript import Transcript
from nexrl.v1.inference_service_pb2 import GeneratedCompletion
from nexrl.v1.trajectory_pb2 import Trajectory
from nexrl_rollout.history import exact_key, first_difference, substance_key

Message = Mapping[str, Any]

# Stands for an assistant message in the chat template; no template and no model has it in its vocabulary.
_SENTINEL = "\x00nexrl\x00"


@dataclass
class Chain:
    """A conversation without a break: each prompt extends the tokens of the turn before."""

    transcript: Transcript
    prompt: str
    break_reason: str
    """Where the history of its first request left what had been served; "" if it did not."""
    responses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServedTurn:
    """A completion that was served, with all tokens up to its end."""

    chain: Chain
    token_ids: Sequence[int]
    finish_reason: str

    @property
    def is_newest(self) -> bool:
        """True if nothing was appended to its chain since."""
        return len(self.chain.transcript.token_ids) == len(self.token_ids)


@dataclass(frozen=True)
class SessionPrompt:
    """The token ids to generate from, and the turn that they continue; None if they begin a chain."""

    token_ids: Sequence[int]
    continues: ServedTurn | None
    break_reason: str = ""
    """Where the history leaves what was served, if it has a reply that this session did not serve, although it served
    others."""

    @property
    def is_break(self) -> bool:
        """True if the client edited its history."""
        return bool(self.break_reason)


class Session:
    """Records what one rollout was served. Its id is a secret of 256 bits: clients that know it may use the session."""

    def __init__(self, sampling: Sampling, seeds: Iterator[int]) -> None:
        self.id = secrets.token_urlsafe(32)
        self.sampling = sampling
        self.seeds = seeds
        """One for each turn; endless."""
        self.breaks = 0
        """Requests whose history was edited."""
        self.finish_reason = ""
        """Finish reason of the newest completion."""
        self._chains: list[Chain] = []
        self._chain_of_turns: list[Chain] = []
        self._turns: dict[str, ServedTurn] = {}
        self._newest_served: Sequence[Message] = ()

    def prompt(self, codec: TextCodec, messages: Sequence[Message], tools: Sequence[Message] = ()) -> SessionPrompt:
        """Returns the prompt of the next turn. Raises InvalidArgumentError if the chat template refuses them."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        history = messages[: last + 1]
        # Exact first: two replies to one prompt may differ only in what libraries rewrite.
        turn = self._turns.get(exact_key(history, tools)) or self._turns.get(substance_key(history, tools))
        if turn is None:
            token_ids = codec.encode(codec.render(messages, tools))
            is_break = bool(history and self._chains)
            return SessionPrompt(token_ids, None, first_difference(self._newest_served, history) if is_break else "")
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
        """Record a turn. `served`: the request's messages and the reply; `text`: the reply as the policy wrote it."""
        turn = prompt.continues
        if turn is not None and turn.is_newest:
            chain = turn.chain
            chain.transcript.add_context(prompt.token_ids[len(turn.token_ids) :])
        else:  # also for a second continuation of one turn: the tokens of the first chain are only context here
            chain = Chain(Transcript(prompt.token_ids), prompt_text, prompt.break_reason)
            self._chains.append(chain)
        chain.transcript.add_completion(completion)
        self._chain_of_turns.append(chain)
        chain.responses.append(text)
        self.breaks += prompt.is_break
        self.finish_reason = completion.finish_reason
        token_ids = list(chain.transcript.token_ids)
        served_turn = ServedTurn(chain, token_ids, completion.finish_reason)
        self._turns[exact_key(served, tools)] = self._turns[substance_key(served, tools)] = served_turn
        self._newest_served = served

    def trajectories(
        self,
        reward: float,
        components: Mapping[str, float],
        metadata: Mapping[str, str],
        turn_rewards: Sequence[float] = (),
    ) -> list[Trajectory]:
        """Returns one trajectory per chain. Metadata: `chain` if there are several, `breaks` if history was edited, and
        `break_reason` in the chain that began there.

        Raises InvalidArgumentError if there are `turn_rewards`, but not one for each completion that was served.
        """
        turns = len(self._chain_of_turns)
        if turn_rewards and len(turn_rewards) != turns:
            served = f"must be one for each completion that the policy was asked for, {turns}"
            raise InvalidArgumentError(f"outcome: turn_rewards: {len(turn_rewards)}; {served}")
        # A reward belongs to the last turn unless a column says otherwise.
        is_split = any(turn_rewards[:-1])
        marks = {"breaks": str(self.breaks)} if self.breaks else {}
        return [
            chain.transcript.trajectory(
                reward,
                turn_rewards=[part for part, of in zip(turn_rewards, self._chain_of_turns, strict=True) if of is chain]
                if is_split
                else (),
                reward_components=components,
                metadata={**metadata, **marks, **self._chain_marks(index, chain)},
                prompt=chain.prompt,
                response="\n".join(chain.responses),
            )
            for index, chain in enumerate(self._chains)
        ]

    def _chain_marks(self, index: int, chain: Chain) -> dict[str, str]:
        number = {"chain": str(index)} if len(self._chains) > 1 else {}
        return number | ({"break_reason": chain.break_reason} if chain.break_reason else {})


def _added_ids(
    codec: TextCodec, messages: Sequence[Message], tools: Sequence[Message], last: int, turn: ServedTurn
) -> Sequence[int]:
    """Returns the token ids after the reply at `last`: end of its turn, later messages, opening of the next turn.

    The template is rendered with a sentinel in place of the reply, so that the text of the reply does not matter.
    """
    stand_in = {"role": "assistant", "content": _SENTINEL}
    rendered = codec.render([*messages[:last], stand_in, *messages[last + 1 :]], tools)
    _, found, added = rendered.rpartition(_SENTINEL)
    if not found:
        raise InvalidArgumentError("the chat template drops assistant messages: it cannot be used over several turns")
    added_ids = codec.encode(added)
    # The policy wrote the end of the turn itself, unless a limit or a stop string ended the completion.
    if turn.finish_reason == "stop" and added_ids[:1] == list(turn.token_ids[-1:]):
        return added_ids[1:]
    return added_ids
