"""Whose end a CancelledError tells of."""

import asyncio


def is_called_off() -> bool:
    """Whether the running task itself was cancelled; else it was something that the task awaits (`Task.cancelling`)."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
