"""Compares a client's history with the messages that a session served.

Client libraries rewrite a reply without changing what it says: they strip its text, print the arguments of its tool
calls anew, or move its `<think>` block to `reasoning_content`. Such a reply is the same. Its recorded tokens stay what
the engine generated. Every other difference is an edit.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

Message = Mapping[str, Any]

_IDENTIFYING_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls")
_THINK = re.compile(r"\s*<(think|thinking)>(.*?)</\1>(.*)", re.DOTALL)


def exact_key(messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """Returns a key for a history. Fields that clients add or drop without changing a message do not count."""
    return _digest([[_without_empty(message) for message in messages], tools])


def substance_key(messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """Returns a key that is equal for histories whose replies are the same in substance."""
    return _digest([[_substance(message) for message in messages], tools])


def first_difference(served: Sequence[Message], history: Sequence[Message]) -> str:
    """Returns where a history up to its last reply leaves what was served, for people."""
    for index, (ours, theirs) in enumerate(zip_longest(served, history)):
        if theirs is None:
            return f"messages[{index}]: left out, although the session served it"
        if ours is None:
            return f"messages[{index}]: added, although the session did not serve it"
        expected, found = _substance(ours), _substance(theirs)
        for key in sorted({*expected, *found}):
            if expected.get(key) != found.get(key):
                return f"messages[{index}].{key}: not what was served"
    return "tools: not those of the turn before"


def _substance(message: Message) -> dict[str, Any]:
    plain = _without_empty(message)
    if message["role"] != "assistant":
        return plain
    text = str(message.get("content") or "")
    thought = str(message.get("reasoning_content") or message.get("reasoning") or "")
    if not thought and (found := _THINK.match(text)):
        thought, text = found[2], found[3]
    calls = [_call(call) for call in message.get("tool_calls") or []]
    return {**plain, "content": text.strip(), "reasoning_content": thought.strip(), "tool_calls": calls}


def _call(call: object) -> object:
    """Returns a tool call with its arguments parsed; as it is if it is not one."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments")
    with suppress(ValueError):  # not JSON: compared as text
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call.get("id"), function.get("name"), arguments]


def _without_empty(message: Message) -> dict[str, Any]:
    return {key: message[key] for key in _IDENTIFYING_KEYS if message.get(key) not in (None, "", [])}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
