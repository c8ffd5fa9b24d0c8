"""Answers in OpenAI's chat wire format, and errors."""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nexrl.stop_strings import text_before_stop
from nexrl.v1.inference_service_pb2 import GeneratedCompletion

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


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
    """Returns the response, without the tokens."""
    finish_reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(completion.token_ids),
            "total_tokens": len(prompt_ids) + len(completion.token_ids),
        },
    }


def add_token_ids(response: dict[str, Any], prompt_ids: Sequence[int], completion: GeneratedCompletion) -> None:
    """Add the tokens under vLLM's names, and to the message under those of NeMo Gym.

    Only for a client that asks: clients echo messages, and each would add the whole prompt to every later request.
    """
    choice = response["choices"][0]
    response["prompt_token_ids"] = list(prompt_ids)
    choice["token_ids"] = list(completion.token_ids)
    choice["message"] |= {
        "prompt_token_ids": list(prompt_ids),
        "generation_token_ids": list(completion.token_ids),
        "generation_log_probs": list(completion.logprobs),
    }


def add_logprobs(response: dict[str, Any], tokens: Sequence[str], completion: GeneratedCompletion) -> None:
    """Add the recorded log-probabilities; `tokens` are the names of the tokens."""
    content: list[dict[str, Any]] = [
        {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(tokens, completion.logprobs, strict=True)
    ]
    response["choices"][0]["logprobs"] = {"content": content, "refusal": None}


def stream_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the same response as server-sent events: the whole message in one chunk, then its end."""
    choice = response["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    head = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    tokens = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
    prompt = {key: response[key] for key in ("prompt_token_ids",) if key in response}
    for chunk in (
        {**prompt, "choices": [{"index": 0, "delta": delta, **tokens, "finish_reason": None}]},
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
