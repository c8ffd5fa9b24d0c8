"""Digest of a data set: shows whether the same tasks are read again in the same order, and where they differ."""

import hashlib
import json
import math

from nexrl.datasets import TaskSource

MAX_RANGES = 64
RANGE_BYTES = 8
"""Enough to notice a mistake. This is no protection against data that is made to have the same digest."""


def digest_of(source: TaskSource) -> bytes:
    """Return the digests of up to MAX_RANGES equal ranges of the source, end to end, RANGE_BYTES each.

    They depend on the tasks, their order in the source, and the order in which they are granted. 100,000 short tasks
    take half a second on an idle core, less than reading them.
    """
    tasks_per_range = math.ceil(len(source) / MAX_RANGES)
    granted_in = json.dumps({"seed": source.seed} if source.shuffle else None).encode()
    digests = []
    for begin in range(0, len(source), tasks_per_range):
        digest = hashlib.blake2b(granted_in, digest_size=RANGE_BYTES)
        for task in source.tasks[begin : begin + tasks_per_range]:
            digest.update(json.dumps(task, sort_keys=True).encode())
        digests.append(digest.digest())
    return b"".join(digests)
