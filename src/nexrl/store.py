"""Connects to Redis and retries calls; names its keys and sets when they expire (docs/how-to/redis.md)."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

import redis.asyncio
from redis.asyncio import SSLConnection
from redis.asyncio.cluster import ClusterPipeline, ClusterPubSub, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NexrlError, UnavailableError
from nexrl.settings import redis_password

CONNECT_SECONDS = 3.0
CALL_SECONDS = 10.0
RETRY_SECONDS = 15.0
START_SECONDS = 60.0
"""Longest time that a starting service waits for Redis, which may be starting, too, and have much data to load."""
MAX_BACKOFF_SECONDS = 0.5
MAX_CONNECTIONS = 64
"""Limit of connections from one process to one server. Further calls wait for a free one."""
KEYS_AT_ONCE = 500
SCRIPT_TRIES = 5

SCHEMES = "redis://, rediss://, unix://, redis+cluster://, rediss+cluster://"
CLUSTER_SCHEME = re.compile(r"^(rediss?)\+cluster(?=://)")
PASSING = re.compile(r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOREPLICAS|OOM|READONLY|TRYAGAIN)\b")
"""Error replies after which a retry may succeed, also inside the error of a script: the server loads its data, is full,
or has become a replica."""
REFUSED_USER = (AuthenticationError, AuthorizationError)
SET_USER = "set the user in redis.url and the password in NEXRL_REDIS_PASSWORD"

Redis = redis.asyncio.Redis
ResultT = TypeVar("ResultT")


class StoreUnavailableError(UnavailableError, RedisConnectionError):
    """Redis could not be reached, or could not answer, during all retries of a call."""


async def run_script(script: AsyncScript, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
    """Run a script, and load it first if Redis does not have it. Raises StoreUnavailableError.

    Redis may restart between loading and running the script, and then no longer has it. Hence the loop.
    """
    for _ in range(SCRIPT_TRIES):
        with suppress(NoScriptError):
            return await script(keys=keys, args=args)
    raise StoreUnavailableError("redis.url: Redis lost a script each time it was loaded; does it restart repeatedly?")


def key_prefix(experiment: str, part: str) -> str:
    """Return the prefix of all keys of one part of an experiment: a model tag, or 'controller'. One hash slot each."""
    return f"nexrl:{{{experiment}/{part}}}:"


def owner_key(experiment: str) -> str:
    """Return the key that names the launcher of an experiment. It expires with the launcher only."""
    return f"nexrl:owner:{experiment}"


async def connect_redis(url: str, *, wait_seconds: float = 0.0) -> Redis:
    """Open and check a connection. The password is NEXRL_REDIS_PASSWORD. A `+cluster` URL may name any node.

    Each later call is retried for 15 s while the server restarts or fails over; then it raises StoreUnavailableError.
    Raises InvalidArgumentError for an invalid URL, FailedPreconditionError if the server refuses the user, and
    UnavailableError if nothing answers within 3 s plus `wait_seconds`.
    """
    try:
        await _check(url, wait_seconds)
        return await _client(url, _RetryForSeconds(RETRY_SECONDS, is_admitted=True)).initialize()
    except (ValueError, TypeError) as error:  # TypeError: a query parameter that redis-py does not know
        raise InvalidArgumentError(f"redis.url: {_shown(url)}: {error}; allowed: {SCHEMES}") from None
    except (RedisError, RedisClusterException, OSError) as error:
        raise _refusal(url, error) from None


async def room_bytes(connection: Redis) -> int:
    """Return how many bytes of data fit into the server: two thirds of its maxmemory, or sys.maxsize without a limit.

    The rest is for overhead, and for the copies made while Redis rewrites its file. Raises StoreUnavailableError.
    """
    found = await connection.info("memory")
    return 2 * int(found.get("maxmemory") or 0) // 3 or sys.maxsize


async def expire_experiment(connection: Redis, experiment: str, seconds: int) -> None:
    """Let the keys of an experiment expire in `seconds`. Keys with an expiry keep it. Raises StoreUnavailableError."""
    async for keys in _keys(connection, experiment):
        reads, writes = connection.pipeline(transaction=False), connection.pipeline(transaction=False)
        for key in keys:
            reads.ttl(key)
        for key, ttl in zip(keys, await reads.execute(), strict=True):
            if ttl == -1:  # no expiry
                writes.expire(key, seconds)
        await writes.execute()


async def keep_experiment(connection: Redis, experiment: str) -> None:
    """Remove the expiry of all keys of an experiment that continues. Raises StoreUnavailableError.

    This includes the few stored responses, which would have expired within minutes and now expire with the experiment.
    """
    async for keys in _keys(connection, experiment):
        pipeline = connection.pipeline(transaction=False)
        for key in keys:
            pipeline.persist(key)
        await pipeline.execute()


async def _keys(connection: Redis, experiment: str) -> AsyncIterator[list[Any]]:
    keys = []
    async for key in connection.scan_iter(match=f"nexrl:{{{experiment}/*", count=KEYS_AT_ONCE):
        keys.append(key)
        if len(keys) == KEYS_AT_ONCE:
            yield keys
            keys = []
    if keys:
        yield keys


# connecting ----------------------------------------------------------------------------------------------------------


def _client(url: str, retry: "_RetryForSeconds") -> Redis:
    password = redis_password()
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": CALL_SECONDS,
        "protocol": 2,  # RESP2 needs no HELLO, which older servers and limited users refuse
        "driver_info": None,
        **({"password": password} if password else {}),
    }
    cluster_url, is_cluster = CLUSTER_SCHEME.subn(r"\1", url)
    if is_cluster:
        try:
            return cast(Redis, _Cluster.from_url(cluster_url, retry_policy=retry, **options))
        except RedisClusterException as error:
            raise ValueError(str(error)) from None
    pool = _Pool.from_url(url, retry=retry, max_connections=MAX_CONNECTIONS, timeout=RETRY_SECONDS, **options)
    if issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = _TlsConnection
    return Redis.from_pool(pool)


async def _check(url: str, wait_seconds: float) -> None:
    """Raise unless a server answers, admits the user, and is of the kind that the URL says."""
    retry = _RetryForSeconds(wait_seconds, is_admitted=wait_seconds > 0)
    async with aclosing(_client(url, retry)) as probe, asyncio.timeout(CONNECT_SECONDS + wait_seconds):
        found = await probe.info("server") | await probe.info("memory")
    if "cluster" in (found.get("redis_mode"), found.get("server_mode")) and not CLUSTER_SCHEME.match(url):
        raise ValueError("is a node of a Redis Cluster; use redis+cluster:// or rediss+cluster://")
    if found.get("maxmemory") and str(found.get("maxmemory_policy")).startswith("allkeys"):
        raise FailedPreconditionError(
            f"redis.url: {_shown(url)}: its maxmemory-policy {found['maxmemory_policy']} evicts keys that must be "
            "kept; set it to noeviction"
        )


def _refusal(url: str, error: BaseException) -> NexrlError:
    error = _root(error)
    where = f"redis.url: {_shown(url)}: {str(error) or type(error).__name__}"
    if isinstance(error, REFUSED_USER):
        return FailedPreconditionError(f"{where}; {SET_USER}")
    if isinstance(error, NoPermissionError):
        return FailedPreconditionError(f"{where}; docs/how-to/redis.md lists the rights that the user needs")
    if "Cluster mode is not enabled" in where:
        return InvalidArgumentError(f"{where}; use redis:// or rediss:// for a single server")
    # With TLS 1.3, a server that requires a certificate may close the connection before its alert is read.
    if "certificate" in where or (url.startswith("rediss") and "Connection reset" in where):
        return FailedPreconditionError(
            f"{where}; set the CA file with rediss://...?ssl_ca_certs=FILE, and a client certificate with "
            "&ssl_certfile=FILE&ssl_keyfile=FILE"
        )
    return UnavailableError(f"{where}: no Redis answers; start one there, or remove redis.url to use a private one")


def _root(error: BaseException) -> BaseException:
    """Return the first cause of an error: redis-py wraps what the server answers to the first command."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _shown(url: str) -> str:
    """Return the URL without user, password and query."""
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]


class _Pool(redis.asyncio.BlockingConnectionPool):
    _is_closed = False

    async def aclose(self) -> None:
        """Close the connections. Those that calls in flight open again are closed when these calls end."""
        self._is_closed = True
        await super().aclose()

    async def release(self, connection: Any) -> None:
        """Take a connection back."""
        await super().release(connection)
        if self._is_closed:
            await connection.disconnect()

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections, also if the task is cancelled meanwhile: redis-py then leaves them open."""
        try:
            await super().disconnect(inuse_connections)
        except asyncio.CancelledError:
            await super().disconnect(inuse_connections)
            raise


class _TlsConnection(SSLConnection):
    """Reloads certificate and CA files for each new connection, because they may have been replaced."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


# retries -------------------------------------------------------------------------------------------------------------


class _RetryForSeconds(Retry):
    """Retries a call while Redis restarts, loads its data or fails over. Each attempt uses a new connection.

    All scripts are idempotent (request ids, attempts), so a script that may already have run can be sent again.
    """

    def __init__(self, seconds: float, *, is_admitted: bool) -> None:
        """`is_admitted`: a server that refuses the user has only forgotten it. The operator makes the user again."""
        super().__init__(NoBackoff(), 0)
        self._seconds = seconds
        self._is_admitted = is_admitted
        self._pauses = ExponentialWithJitterBackoff(cap=MAX_BACKOFF_SECONDS, base=0.02)

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[ResultT]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> ResultT:
        """Call `do` until it succeeds or the time is over. `fail` closes the connection after each failure."""
        deadline, failures = time.monotonic() + self._seconds, 0
        while True:
            try:
                return await do()
            except (RedisError, RedisClusterException, OSError) as error:
                if not self._is_passing(error):
                    raise
                failures += 1
                await (fail(error, failures) if with_failure_count else fail(error))
                if time.monotonic() >= deadline:
                    remedy = f"; {SET_USER}, then start again" if isinstance(_root(error), REFUSED_USER) else ""
                    raise StoreUnavailableError(f"redis.url: Redis is not available: {error}{remedy}") from error
            await asyncio.sleep(self._pauses.compute(failures))

    def _is_passing(self, error: Exception) -> bool:
        # StoreUnavailableError: opening the connection was already retried for the whole time.
        if isinstance(error, StoreUnavailableError):
            return False
        if isinstance(_root(error), REFUSED_USER):
            return self._is_admitted
        lost = (RedisConnectionError, RedisTimeoutError, RedisClusterException, ClusterError, OSError)
        return isinstance(error, lost) or PASSING.search(f"{getattr(error, 'status_code', '')} {error}") is not None


class _Cluster(RedisCluster):
    """A client of a cluster that retries calls as the client of a single server does."""

    def __init__(self, *, retry_policy: _RetryForSeconds, **options: Any) -> None:
        super().__init__(retry=Retry(NoBackoff(), 2), **options)
        self._retry_policy = retry_policy
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)

    async def initialize(self, *args: Any, **kwargs: Any) -> "_Cluster":
        """Ask one of the known nodes for all nodes."""
        try:
            await super().initialize(*args, **kwargs)
        except RedisClusterException:
            # The known nodes may have been replaced. Try the given name again, which may resolve to new nodes.
            for given in self.startup_nodes:
                self.nodes_manager.startup_nodes.setdefault(given.name, given)
            raise
        return self

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Send one command."""
        send = super().execute_command
        return await self.with_retries(lambda: send(*args, **kwargs))

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> "_ClusterPipeline":
        """Return a pipeline, which sends each command to its node."""
        return _ClusterPipeline(self)  # type: ignore[abstract]  # as redis-py's own is to mypy

    def pubsub(self, *args: Any, **kwargs: Any) -> "_ClusterPubSub":
        """Return a subscription at one node, which receives what any node publishes."""
        return _ClusterPubSub(self, *args, **kwargs)

    async def with_retries(self, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Wait for a free connection, then call `attempt` with retries."""
        async with self._turns:
            return await self._retry_policy.call_with_retry(attempt, _nothing)


class _ClusterPipeline(ClusterPipeline):
    """A pipeline that queues its commands again for each attempt."""

    def __init__(self, cluster: _Cluster) -> None:
        super().__init__(cluster)
        self._cluster = cluster
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **kwargs: Any) -> "_ClusterPipeline":
        """Queue a command."""
        self._commands.append((args, kwargs))
        return self

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        """Send the queued commands, and return their responses in the same order."""
        queue, send = super().execute_command, super().execute
        commands, self._commands = self._commands, []

        async def attempt() -> list[Any]:
            for args, kwargs in commands:
                queue(*args, **kwargs)
            return await send(raise_on_error, allow_redirections)

        return await self._cluster.with_retries(attempt)


class _ClusterPubSub(ClusterPubSub):
    """A subscription that fails like that of a single server, so that its listener subscribes again."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Send one command."""
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error


async def _nothing(_: Exception) -> None:
    """Do nothing: the client of a cluster closes its connections by itself."""
