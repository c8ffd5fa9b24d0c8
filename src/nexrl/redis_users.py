"""Users of a Redis that experiments share: each may touch its own keys and channels, with the commands we use."""

from typing import Any, cast

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError
from redis.utils import str_if_bytes

from nexrl.errors import FailedPreconditionError
from nexrl.store import Redis

COMMANDS = (
    *("del", "expire", "get", "persist", "rename", "set"),
    *("hdel", "hexists", "hget", "hgetall", "hkeys", "hlen", "hmget", "hset", "hstrlen", "hvals"),
    *("llen", "lpush", "lrange", "lrem", "ltrim", "rpush"),
    *("sadd", "smembers", "srem"),
    *("zadd", "zcard", "zrange", "zrangebyscore", "zrem"),
    *("evalsha", "script|load", "publish", "subscribe", "unsubscribe", "info", "ping", "select", "time"),
)
"""All that the services send, also in scripts. Not SCAN: it tells the names of all keys, whoever owns them."""
CLUSTER_COMMANDS = ("cluster|slots", "command")
"""What the client of a cluster sends besides."""


async def put_user(connection: Redis, name: str, password: str) -> None:
    """Let the user `name` in with `password`, to the keys and channels of the experiment of that name and no others.

    Passwords of before stay valid: processes that still run may know no other. In a cluster each node has its own
    users. Raises FailedPreconditionError if `connection` may not, StoreUnavailableError.
    """
    more = CLUSTER_COMMANDS if _is_cluster(connection) else ()
    own = f"nexrl:{{{name}/*"
    rules = ("on", f">{password}", "resetkeys", f"~{own}", "resetchannels", f"&{own}", "-@all")
    await _send(connection, "ACL SETUSER", name, *rules, *(f"+{command}" for command in (*COMMANDS, *more)))


async def delete_user(connection: Redis, name: str) -> None:
    """Delete a user, and close its connections; no error if there is none. Raises as `put_user`."""
    await _send(connection, "ACL DELUSER", name)


async def known_users(connection: Redis) -> set[str]:
    """Return the names of the users that every node knows. Raises as `put_user`."""
    answers = [set(map(str_if_bytes, names)) for names in await _send(connection, "ACL USERS")]
    return set.intersection(*answers)


async def _send(connection: Redis, *command: str) -> list[Any]:
    """Return the answer of each node."""
    try:
        if not _is_cluster(connection):
            return [await connection.execute_command(*command)]  # type: ignore[no-untyped-call]
        answers = await cast(RedisCluster, connection).execute_command(*command, target_nodes=RedisCluster.ALL_NODES)
        return list(answers.values())
    except ResponseError as error:
        raise FailedPreconditionError(
            f"Redis: {error}: experiments get users of their own; let the operator's user run +acl|setuser "
            "+acl|deluser +acl|users, or give the experiment a Redis of its own in spec.redis.url"
        ) from None


def _is_cluster(connection: object) -> bool:
    return isinstance(connection, RedisCluster)
