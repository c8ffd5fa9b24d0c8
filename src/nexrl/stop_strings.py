"""Stop strings: texts that end a completion. The tokens of such a text are part of the completion."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids, without special tokens."""

MARGIN_TOKENS = 8
"""Tokens that are decoded before those that can hold a stop string: the first ones may be the end of a character, or be
without text."""


def ends_with_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Return True if the newest token completes a stop string. Call it after each token: it decodes the newest only.

    A token has at least one byte of text, unless it is special, so that a stop string of N bytes is within N tokens.
    """
    if not stop:
        return False
    window = max(len(text.encode()) for text in stop) + MARGIN_TOKENS
    newest = decode(token_ids[-window:])
    return any(text in newest for text in stop)


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop string; all of it if it contains none."""
    return text[: min((text.find(end) for end in stop if end in text), default=len(text))]
