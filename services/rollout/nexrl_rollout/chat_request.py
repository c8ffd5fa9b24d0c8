"""Reads a chat request of OpenAI's API. Each parameter is honoured, or refused by its name: none is ignored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.errors import InvalidArgumentError, Violation
from nexrl.policy import Sampling

MAX_MESSAGES = 10_000
MAX_STOP = 4
"""Stop strings of one request, as in OpenAI's API."""

HONOURED = (
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
LABELS = ("model", "user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt")
"""Fields that name a caller, a cache or the only model: no value of them changes a completion."""
SAMPLING = ("temperature", "top_p", "top_k")
"""The experiment's: the trainer computes with the distribution that tokens were drawn from."""
ONLY: Mapping[str, Sequence[object]] = {
    "n": [1],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}],
    "parallel_tool_calls": [True],
    "modalities": [["text"]],
    "stream_options": [{}, {"include_usage": True}, {"include_usage": False}],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "min_p": [0],
    "logit_bias": [{}],
    "store": [False],
    "chat_template_kwargs": [{}],
    "add_generation_prompt": [True],
}
"""Fields of which only these values describe what the gateway does."""


@dataclass(frozen=True)
class ChatRequest:
    """The part of a request that the gateway reads."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    parse_tool_calls: bool = False
    """True if there are tools and `tool_choice` is not none."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """The answer carries the ids of the prompt and of the completion."""
    ids_as_tokens: bool = False
    """`logprobs` names tokens as "token_id:N" instead of by their text, as vLLM does."""


def parse_chat_request(body: object, sampling: Sampling) -> ChatRequest:
    """Parse a request to a session that samples with `sampling`. A field that is null counts as absent.

    Raises InvalidArgumentError, whose violation names the field, for what is invalid or cannot be honoured.
    """
    if not isinstance(body, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_is_honoured(name, value, sampling)
    tools = _tools(given.get("tools", []))
    ids_as_tokens = _flag(given, "return_tokens_as_token_ids")
    return ChatRequest(
        _messages(given.get("messages")),
        tools,
        parse_tool_calls=_tool_choice(given) == "auto" and bool(tools),
        max_tokens=_max_tokens(given),
        stop=_stop(given.get("stop", [])),
        stream=_flag(given, "stream"),
        logprobs=_flag(given, "logprobs"),
        token_ids=_flag(given, "return_token_ids") or ids_as_tokens,
        ids_as_tokens=ids_as_tokens,
    )


def refused(field: str, description: str) -> InvalidArgumentError:
    """Returns the error for a field of a request."""
    return InvalidArgumentError(f"{field}: {description}", violations=[Violation(field, description)])


def _check_is_honoured(name: str, value: object, sampling: Sampling) -> None:
    if name in HONOURED or name in LABELS:
        return
    if name in SAMPLING:
        set_to = getattr(sampling, name)
        # vLLM's clients write -1 for a top_k that keeps every token.
        if value != set_to and not (name == "top_k" and set_to == 0 and value == -1):
            raise refused(name, f"is {set_to:g} in this episode, set by the experiment; omit it, or send that value")
    elif name == "seed":
        raise refused(name, "cannot be chosen: inference.seed of the experiment determines it; omit it")
    elif name in ONLY:
        if value not in ONLY[name]:
            raise refused(name, f"must be {' or '.join(map(str, ONLY[name]))}, or absent")
    else:
        known = ", ".join([*HONOURED, *LABELS, *SAMPLING, *ONLY])
        raise refused(name, f"is not supported; omit it. Supported: {known}")


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise refused(name, "must be true or false")
    return value


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    limits = {name: given[name] for name in ("max_completion_tokens", "max_tokens") if name in given}
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refused(name, "must be an integer of at least 1")
    return min(limits.values(), default=None)


def _tool_choice(given: Mapping[str, Any]) -> str:
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise refused("tool_choice", "must be auto or none: the policy cannot be forced to call a tool")
    return str(choice)


def _tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise refused("tools", 'must be a list of {"type": "function", "function": {"name": ...}}')
    return tools


def _is_function(tool: object) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and _is_text(function.get("name"))


def _stop(stop: object) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > MAX_STOP or not all(map(_is_text, texts)):
        raise refused("stop", f"must be a text or a list of at most {MAX_STOP} texts, none empty")
    return tuple(texts)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise refused("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refused(f"messages[{index}]", "must be an object with a role")
    return {**message, "content": _text(message.get("content"), index)}


def _text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise refused(f"messages[{index}].content", "must be text, or parts of type text")
