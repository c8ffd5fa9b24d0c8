"""The names that the ledger's Lua and Python code share: keys, counters and limits. Each is written once, here.

`lua_header` turns them into Lua. tests/unit/nexrl_trajectory_pool/test_lua.py finds each name that is not one of these.
"""

from types import MappingProxyType

REQUEST_SECONDS = 120
"""How long the answer to a request is kept, for its repetitions."""

HISTORY_TASKS = 256
"""Settled tasks in one history key. Redis packs small hashes: a tenth of the memory."""

MAX_BATCH_BYTES = 2**29
"""Most bytes of trajectories in a batch. Its train batch, at most 3.5 times as large, must fit a message of 2 GiB."""

MAX_TRAININGS = 2
"""A train batch whose training has failed this often is dropped."""

TRAINING_FAILED = "training_failed"
"""The drop reason of samples whose train batch was dropped."""

KEYS = MappingProxyType(
    {
        "meta": "meta",
        "task": "task:",
        "payloads": "payloads:",
        "history": "history:",
        "batch_sizes": "batch_sizes",
        "dropped_batches": "dropped_batches",
        "lives": "lives",
        "task_rewards": "task_rewards",
        "open": "open",
        "added": "added",
        "leases": "leases",
        "group": "group:",
        "groups": "groups",
        "ready": "ready",
        "batch": "batch:",
        "formed": "formed",
        "batch_leases": "batch_leases",
        "train_batch": "train_batch:",
        "train_batches": "train_batches",
        "request": "request:",
        "last_failure": "last_failure",
        "wake": "wake",
    }
)
"""Keys below the ledger's prefix; what ends in a colon is followed by an id. `store.lua` says what each holds."""

COUNTERS = frozenset(
    {
        # Samples by state, and since the start.
        *("granted", "open", "leased", "grouping", "ready", "batched", "trained", "durable"),
        *("refunded", "taken", "ready_credit"),
        # Groups that were dropped for their equal rewards since a batch was formed.
        "refilled",
        # Positions, numbers and versions.
        *(
            "cursor",
            "unused",
            "tasks_left_out",
            "next_task",
            "first_task",
            "next_batch",
            "asked",
            "start_steps",
            "trained_steps",
        ),
        *(
            "durable_steps",
            "most_trained_steps",
            "kept",
            "version",
            "incarnation",
            "next_incarnation",
            "hold",
            "hold_until",
            "round",
        ),
        # Attempts that were put, and those of them that failed.
        *("finished_attempts", "failed_attempts"),
        # Bytes, and events for metrics.
        *("payload_bytes", "lease_expired", "fenced_writes", "duplicates_rejected"),
    }
)
"""Fields of the key meta, besides `dropped:<reason>`."""

DROPPED = "dropped:"
"""Before the reason, in the name of the counter of dropped samples."""


def lua_header() -> str:
    """Return Lua code that declares these names. It expects the local variable `prefix`."""
    keys = ", ".join(f'{name} = prefix .. "{key}"' for name, key in KEYS.items())
    numbers = {
        "REQUEST_SECONDS": REQUEST_SECONDS,
        "HISTORY_TASKS": HISTORY_TASKS,
        "MAX_TRAININGS": MAX_TRAININGS,
    }
    return "\n".join(
        [
            f"local K = {{ {keys} }}",
            f'local DROPPED, TRAINING_FAILED = "{DROPPED}", "{TRAINING_FAILED}"',
            *(f"local {name} = {value}" for name, value in numbers.items()),
        ]
    )
