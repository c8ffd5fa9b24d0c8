"""The ledger's Lua code as one script, and the call that runs one of its moves."""

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

from nexrl.errors import error_class
from nexrl.store import Redis, run_script
from nexrl_trajectory_pool.ledger import names
from nexrl_trajectory_pool.ledger.records import LedgerRules

PARTS = (
    "store",
    "rows",
    "credit",
    "groups",
    "tasks",
    "trajectories",
    "batches",
    "train_batches",
    "versions",
    "reading",
    "dispatch",
)
"""The Lua files in the order in which they are joined: each uses only functions of earlier files."""


def joined_script() -> str:
    """Return the whole script: the shared names, then the parts in their order.

    All parts after the store are the body of one function. For each function that is made, Lua searches every local
    variable of its caller that another function uses: without this, the search is a third of an empty move.
    """
    folder = resources.files(__package__)
    store, *nouns = [folder.joinpath(f"{part}.lua").read_text() for part in PARTS]
    header = ["local prefix = KEYS[1]", names.lua_header()]
    return "\n".join([*header, store, "return (function()", *nouns, "end)()"])


SCRIPT = joined_script()


class Moves:
    """Runs moves of one ledger. `prefix` begins the names of its keys; `clock` replaces Redis's own in tests."""

    def __init__(self, redis: Redis, prefix: str, rules: LedgerRules, clock: Callable[[], float] | None = None) -> None:
        self.rules = rules
        self._redis = redis
        self._prefix = prefix
        self._clock = clock
        self._script = redis.register_script(SCRIPT)
        self._constant = json.dumps(asdict(rules) | {"max_batch_bytes": names.MAX_BATCH_BYTES})[:-1]

    def _key(self, name: str, suffix: object = "") -> str:
        return f"{self._prefix}{names.KEYS[name]}{suffix}"

    async def _move(self, name: str, request_id: str = "", *payloads: bytes, **arguments: Any) -> dict[str, Any]:
        now = "" if self._clock is None else repr(self._clock())
        encoded = f"{self._constant}, {json.dumps(arguments)[1:]}" if arguments else self._constant + "}"
        # The second key exists, the first never does. While a slot moves to another node of a Redis Cluster, both nodes
        # refuse a script that names both keys, and it is sent again. With the first key alone, the other node would
        # find an empty ledger and begin another.
        keys = [self._prefix, self._key("meta")]
        raw = await run_script(self._script, keys, [name, now, request_id, encoded, *payloads])
        answer: dict[str, Any] = json.loads(raw)
        if "error" in answer:
            raise error_class(answer["status"])(answer["error"], retry_after_seconds=answer.get("retry_after"))
        return answer
