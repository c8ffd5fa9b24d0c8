"""Leased tasks as rewards and environments see them, and what a trajectory remembers of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nexrl.errors import InvalidArgumentError
from nexrl.v1.trajectory_pb2 import Task


def parse_task(task: Task) -> dict[str, Any]:
    """`id`, `prompt`, `answer`, `metadata` and whatever else the item has. Raises InvalidArgumentError without a
    prompt."""
    try:
        item = json.loads(task.item_json)
    except ValueError as error:
        raise InvalidArgumentError(f"task {task.task_id}: item_json is not JSON: {error}") from error
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str) or not item["prompt"]:
        raise InvalidArgumentError(f"task {task.task_id}: an object with the text 'prompt' is needed")
    return {"answer": None, "metadata": {}, **item, "id": task.task_id}


def trajectory_metadata(task: Mapping[str, Any], key_list: Sequence[str]) -> dict[str, str]:
    """Return the task's id, and its values of the pool's grouping keys."""
    known = {**task["metadata"], **task}
    return {"task_id": str(task["id"])} | {key: str(known[key]) for key in key_list if key in known}
