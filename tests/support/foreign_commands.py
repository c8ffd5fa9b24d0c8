"""Commands to Redis that the user of an experiment may not send. Runs in a test, and as a program in a pod."""

import asyncio
import json
import os
import sys
from contextlib import aclosing
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from nexrl.errors import NexrlError
from nexrl.store import connect_redis, key_prefix


def refused(own: str, other: str, tag: str) -> tuple[str, ...]:
    """Return what the user of the experiment `own` may not send. `other` is another one, with the model tag `tag`."""
    key, channel = key_prefix(other, tag) + "meta", key_prefix(other, tag) + "wake"
    return (
        f"HGETALL {key}",
        f"HSET {key} granted 1",
        f"DEL {key}",
        f"RENAME {key} {key_prefix(own, tag)}meta",
        "EVAL return 0",
        f"SUBSCRIBE {channel}",
        "PSUBSCRIBE *",
        f"PUBLISH {channel} batch",
        "SCAN 0",
        "KEYS *",
        f"KEYS {key_prefix(other, tag)}*",
        "RANDOMKEY",
        "DBSIZE",
        "MONITOR",
        "CONFIG GET requirepass",
        "CONFIG SET maxmemory 1",
        "FLUSHALL",
        "FLUSHDB",
        "SWAPDB 0 1",
        "ACL WHOAMI",
        "ACL LIST",
        f"ACL SETUSER {own} ~*",
        "CLIENT LIST",
        "CLIENT KILL TYPE normal",
        "SLOWLOG GET",
        "SCRIPT FLUSH",
        "SHUTDOWN NOSAVE",
        "REPLICAOF NO ONE",
        "SAVE",
    )


OTHERS_KEY = key_prefix("other", "model") + "meta"
OTHERS_CHANNEL = key_prefix("other", "model") + "wake"
REFUSED = refused("own", "other", "model")


async def accepted(url: str, commands: list[str]) -> list[str]:
    """Return the commands that Redis does not refuse to the user of `url`; or why it does not let that user in."""
    try:
        connection: Any = await connect_redis(url)
    except NexrlError as error:
        return [str(error)]
    found = []
    async with aclosing(connection):
        for command in commands:
            try:
                await connection.execute_command(*command.split())
            except NoPermissionError:
                continue
            except ResponseError:
                pass  # it was allowed, and failed for another reason
            found.append(command)
    return found


def main() -> None:
    """Send `commands` to the Redis at `url`, by default that of this process. Print those that it accepts."""
    asked = json.load(sys.stdin)
    found = asyncio.run(accepted(asked["url"] or os.environ["NEXRL_REDIS_URL"], asked["commands"]))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
