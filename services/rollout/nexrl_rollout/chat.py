"""OpenAI's chat wire format, as far as the gateway speaks it."""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl.v1.inference_service_pb2 import GeneratedCompletion

MAX_MESSAGES = 10_000

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ChatRequest:
    """The part of a request that the gateway heeds. Sampling is the experiment's, whatever the client asks for."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stream: bool


def parse_chat_request(body: object) -> ChatRequest:
    """Reads a request. Raises InvalidArgumentError for what is wrong, and for what would silently mean something else
    here."""
    if not isinstance(body, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    if body.get("n") not in (None, 1):
        raise InvalidArgumentError("n: must be 1; a rollout has one completion for each turn")
    if body.get("stop"):
        raise InvalidArgumentError("stop: not supported; the policy ends its turns itself")
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise InvalidArgumentError("max_tokens: must be an integer of at least 1")
    return ChatRequest(_messages(body.get("messages")), body.get("tools") or (), max_tokens, bool(body.get("stream")))


def reply_message(text: str, parse_tool_calls: bool) -> dict[str, Any]:
    """The assistant message for what the policy wrote. Tool calls are those of Hermes and Qwen:
    <tool_call>{...}</tool_call>."""
    calls = _tool_calls(text) if parse_tool_calls else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": calls}


def chat_completion(
    model: str, message: Mapping[str, Any], prompt_ids: Sequence[int], completion: GeneratedCompletion
) -> dict[str, Any]:
    """The response, with the tokens on the message: NeMo Gym's prompt_token_ids, generation_token_ids,
    generation_log_probs."""
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
    """The same response as server-sent events: the whole message in one chunk, then its end."""
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
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def context_overflow(prompt_tokens: int, max_tokens: int) -> str:
    """The message for a prompt that leaves no room. Agents look for the words "maximum context length"."""
    return (
        f"This model's maximum context length is {max_tokens} tokens. "
        f"However, your messages resulted in {prompt_tokens} tokens."
    )


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
    """The calls in `text`; none when one of them is not valid, so that the agent sees what the policy wrote."""
    calls = []
    for written in _TOOL_CALL.findall(text):
        try:
            call = json.loads(written)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError):
            return []
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return calls
