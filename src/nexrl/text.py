"""Text <-> token ids with the model's own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from nexrl.errors import InvalidArgumentError


class TextCodec:
    """Encodes prompts and decodes completions. Calls the Rust tokenizer directly: its wrapper costs ten times as
    much."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False, system_prompt: str | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise InvalidArgumentError(f"model: {type(tokenizer).__name__} is no fast tokenizer (tokenizer.json)")
        self._tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer
        self._chat = chat
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return int(self._rust.get_vocab_size(with_added_tokens=True))

    @cached_property
    def renders_tools(self) -> bool:
        """True if the chat template writes tools: otherwise `render` drops them."""
        probe = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
        conversation = [{"role": "user", "content": "x"}]
        return self.render(conversation, [probe]) != self.render(conversation)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a task's prompt: as a user message where the experiment says chat, else as it is."""
        if self._chat:
            return self.encode(self.render([*self._opening, {"role": "user", "content": prompt}]))
        ids: list[int] = self._rust.encode(prompt).ids
        return ids

    def encode_answer(self, answer: str) -> list[int]:
        """Token ids of `answer` as a completion that the policy ends itself: the model's end token is the last one.

        It is added unless the answer spells it out.

        Raises InvalidArgumentError if the tokenizer has no end token.
        """
        end: int | None = self._tokenizer.eos_token_id
        if end is None:
            raise InvalidArgumentError("model: its tokenizer has no end token (eos_token), which ends a completion")
        ids = self.encode(answer)
        return ids if ids[-1:] == [end] else [*ids, end]

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which special tokens are spelled out; none are added."""
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Texts of several completions, without special tokens."""
        # Not decode_batch: its threads cost more than they save at these lengths.
        texts = [self._rust.decode(list(token_ids), skip_special_tokens=True) for token_ids in completions]
        return texts

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return a conversation as the model's chat template writes it, up to where the policy's next message begins.

        Raises InvalidArgumentError when the template refuses the conversation.
        """
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates are programs of the model's author
            raise InvalidArgumentError(f"the chat template refused the messages: {error}") from error
        return str(rendered)
