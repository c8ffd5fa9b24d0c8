"""The connection to Redis, and the names of its keys."""

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from nexrl.errors import InvalidArgumentError, UnavailableError

CONNECT_SECONDS = 3.0
CALL_SECONDS = 10.0
RETRIES = 40
MAX_BACKOFF_SECONDS = 0.5

Redis = redis.asyncio.Redis


def key_prefix(experiment: str, part: str) -> str:
    """Prefix of all keys of one part of an experiment (a model tag, or 'controller'): one Redis Cluster hash slot."""
    return f"nexrl:{{{experiment}/{part}}}:"


async def connect_redis(url: str) -> Redis:
    """Open and check a connection. A server that restarts later is waited for, about 15 s a call.

    Raises InvalidArgumentError for a URL that is none, UnavailableError when nothing answers within 3 s.
    """
    try:
        probe = redis.asyncio.Redis.from_url(
            url, socket_connect_timeout=CONNECT_SECONDS, socket_timeout=CONNECT_SECONDS
        )
    except ValueError as error:
        raise InvalidArgumentError(f"redis.url: {url!r}: {error}; allowed: redis://, rediss://, unix://") from None
    try:
        await probe.ping()
    except (RedisError, OSError) as error:
        raise UnavailableError(
            f"redis.url: no Redis answers at {url}: {error}; start one there, or leave redis.url out for a private one"
        ) from None
    finally:
        await probe.aclose()
    return redis.asyncio.Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=CALL_SECONDS,
        # Every script is idempotent (request ids, attempts), so one that may or may not have run can be sent again.
        retry=Retry(ExponentialWithJitterBackoff(cap=MAX_BACKOFF_SECONDS, base=0.02), RETRIES),
        retry_on_error=[RedisConnectionError, RedisTimeoutError, OSError],
    )
