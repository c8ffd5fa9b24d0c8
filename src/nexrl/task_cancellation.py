"""Tells whose cancellation a CancelledError reports."""

import asyncio


def is_current_task_cancelled() -> bool:
    """Return whether the running task itself was cancelled, and not only something that it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
