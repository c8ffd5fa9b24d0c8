"""The part of OpenAI's chat wire format that the gateway supports."""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl.stop_strings import text_before_stop
from nexrl.v1.inference_service_pb2 import GeneratedCompletion

MAX_MESSAGES = 10_000
MAX_STOP = 4
"""Stop strings of one request, as in OpenAI's API."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ChatRequest:
    """The part of a request that the gateway reads. Temperature, top_p and top_k are the experiment's."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool


def parse_chat_request(body: object) -> ChatRequest:
    """Parse a request. Raises InvalidArgumentError for fields that are invalid or that the gateway cannot honour."""
    if not isinstance(body, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    if body.get("n") not in (None, 1):
        raise InvalidArgumentError("n: must be 1; a rollout has one completion for each turn")
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise InvalidArgumentError("max_tokens: must be an integer of at least 1")
    return ChatRequest(
        _messages(body.get("messages")),
        body.get("tools") or (),
        max_tokens,
        _stop(body.get("stop")),
        bool(body.get("stream")),
    )


def reply_message(text: str, stop: Sequence[str], parse_tool_calls: bool) -> dict[str, Any]:
    """Returns the assistant message for the text of the policy, up to a stop string.

    Tool calls are those of Hermes and Qwen: <tool_call>{...}</tool_call>. A stop string may be the end of one.
    """
    calls = _tool_calls(text) if parse_tool_calls else []
    if not calls:
        return {"role": "assistant", "content": text_before_stop(text, stop)}
    return {"role": "assistant", "content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": calls}


def chat_completion(
    model: str, message: Mapping[str, Any], prompt_ids: Sequence[int], completion: GeneratedCompletion
) -> dict[str, Any]:
    """Returns the response. The message carries the tokens under NeMo Gym's names: prompt_token_ids,
    generation_token_ids, generation_log_probs."""
    tokens = {
        "prompt_token_ids": list(prompt_ids),
        "generation_token_ids": list(completion.token_ids),
        "generation_log_probs": list(completion.logprobs),
    }
    finish_reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {**message, **tokens}, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(completion.token_ids),
            "total_tokens": len(prompt_ids) + len(completion.token_ids),
        },
    }


def stream_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the same response as server-sent events: the whole message in one chunk, then its end."""
    choice = response["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    head = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for chunk in (
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}], "usage": response["usage"]},
    ):
        yield b"data: " + json.dumps(head | chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def error_body(message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """Returns an error in OpenAI's format."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def context_overflow(prompt_tokens: int, max_tokens: int) -> str:
    """Returns the error text for a prompt that leaves no room. Agents search it for "maximum context length"."""
    return (
        f"This model's maximum context length is {max_tokens} tokens. "
        f"However, your messages resulted in {prompt_tokens} tokens."
    )


def _stop(stop: object) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or len(texts) > MAX_STOP or not all(map(_is_text, texts)):
        raise InvalidArgumentError(f"stop: must be a text or a list of at most {MAX_STOP} texts, none empty")
    return tuple(texts)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidArgumentError(f"messages: must be a list of 1 to {MAX_MESSAGES} messages")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidArgumentError(f"messages[{index}]: must be an object with a role")
    return {**message, "content": _text(message.get("content"), index)}


def _text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise InvalidArgumentError(f"messages[{index}].content: must be text, or parts of type text")


def _tool_calls(text: str) -> list[dict[str, Any]]:
    """Returns the calls in `text`; none if one of them is invalid, so that the agent sees the text of the policy."""
    calls = []
    for written in _TOOL_CALL.findall(text):
        try:
            call = json.loads(written)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError):
            return []
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return calls
