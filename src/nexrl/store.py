"""The connection to Redis, the names of its keys, and how long they stay. How to deploy it: docs/how-to/redis.md."""

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
PATIENCE_SECONDS = 15.0
START_SECONDS = 60.0
"""Longest time for which a service that starts waits for Redis: both may be starting again, Redis with much to load."""
MAX_BACKOFF_SECONDS = 0.5
MAX_CONNECTIONS = 64
"""Of one process to one server; more calls than that wait for their turn."""
KEYS_AT_ONCE = 500
SCRIPT_TRIES = 5

SCHEMES = "redis://, rediss://, unix://, redis+cluster://, rediss+cluster://"
CLUSTER_SCHEME = re.compile(r"^(rediss?)\+cluster(?=://)")
PASSING = re.compile(r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOREPLICAS|OOM|READONLY|TRYAGAIN)\b")
"""Replies that may be another one soon, also inside the error of a script: of a server that loads its data, is full, or
has handed over to its replica."""

Redis = redis.asyncio.Redis
ResultT = TypeVar("ResultT")


class StoreUnavailableError(UnavailableError, RedisConnectionError):
    """Redis could not be reached or could not answer, for longer than a call is patient."""


async def run_script(script: AsyncScript, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
    """Run a script, and load it where Redis does not know it. Raises StoreUnavailableError.

    A Redis that is replaced between the loading and the run knows it no more.
    """
    for _ in range(SCRIPT_TRIES):
        with suppress(NoScriptError):
            return await script(keys=keys, args=args)
    raise StoreUnavailableError(
        "redis.url: Redis forgets scripts as soon as they are loaded: it restarts again and again"
    )


def key_prefix(experiment: str, part: str) -> str:
    """Prefix of all keys of one part of an experiment (a model tag, or 'controller'): one Redis Cluster hash slot."""
    return f"nexrl:{{{experiment}/{part}}}:"


def owner_key(experiment: str) -> str:
    """The key that names the launcher of an experiment. It ends with the launcher, not with the experiment's keys."""
    return f"nexrl:owner:{experiment}"


async def connect_redis(url: str, *, wait_seconds: float = 0.0) -> Redis:
    """Open and check a connection; NEXRL_REDIS_PASSWORD is its password. A `+cluster` URL is that of any node.

    A server that restarts or fails over later is waited for, 15 s a call; then it raises StoreUnavailableError. Raises
    InvalidArgumentError for a URL that is none, FailedPreconditionError when the server does not let us in,
    UnavailableError when nothing answers within 3 s and `wait_seconds`.
    """
    try:
        await _check(url, wait_seconds)
        return await _client(url, PATIENCE_SECONDS).initialize()
    except (ValueError, TypeError) as error:  # TypeError: a query with a name that redis-py does not know
        raise InvalidArgumentError(f"redis.url: {_shown(url)}: {error}; allowed: {SCHEMES}") from None
    except (RedisError, RedisClusterException, OSError) as error:
        raise _refusal(url, error) from None


async def room_bytes(connection: Redis) -> int:
    """Bytes that the server has room for: two thirds of its maxmemory, as the rest is overhead and the copies that a
    rewrite of its file makes; sys.maxsize where it has none. Raises StoreUnavailableError."""
    found = await connection.info("memory")
    return 2 * int(found.get("maxmemory") or 0) // 3 or sys.maxsize


async def expire_experiment(connection: Redis, experiment: str, seconds: int) -> None:
    """Let the keys of an experiment end in `seconds`; those that have an end keep it. Raises StoreUnavailableError."""
    async for keys in _keys(connection, experiment):
        asked, given = connection.pipeline(transaction=False), connection.pipeline(transaction=False)
        for key in keys:
            asked.ttl(key)
        for key, ttl in zip(keys, await asked.execute(), strict=True):
            if ttl == -1:  # no end
                given.expire(key, seconds)
        await given.execute()


async def keep_experiment(connection: Redis, experiment: str) -> None:
    """Let no key of an experiment end: it goes on. Raises StoreUnavailableError.

    That includes the few answers to requests that were to end within minutes; they end with the experiment.
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


def _client(url: str, patience_seconds: float) -> Redis:
    password = redis_password()
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": CALL_SECONDS,
        "protocol": 2,  # begins with AUTH or nothing: no greeting that an older server or a limited user would refuse
        "driver_info": None,
        **({"password": password} if password else {}),
    }
    cluster_url, is_cluster = CLUSTER_SCHEME.subn(r"\1", url)
    if is_cluster:
        try:
            return cast(Redis, _Cluster.from_url(cluster_url, patience=_Patience(patience_seconds), **options))
        except RedisClusterException as error:
            raise ValueError(str(error)) from None
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, retry=_Patience(patience_seconds), max_connections=MAX_CONNECTIONS, timeout=PATIENCE_SECONDS, **options
    )
    if issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = _TlsConnection
    return Redis.from_pool(pool)


async def _check(url: str, wait_seconds: float) -> None:
    """Whether somebody is there, lets us in, and is what the URL says."""
    async with aclosing(_client(url, wait_seconds)) as probe, asyncio.timeout(CONNECT_SECONDS + wait_seconds):
        found = await probe.info("server") | await probe.info("memory")
    if "cluster" in (found.get("redis_mode"), found.get("server_mode")) and not CLUSTER_SCHEME.match(url):
        raise ValueError("a node of a Redis Cluster, so that the URL begins with redis+cluster or rediss+cluster")
    if found.get("maxmemory") and str(found.get("maxmemory_policy")).startswith("allkeys"):
        raise FailedPreconditionError(
            f"redis.url: {_shown(url)}: its maxmemory-policy {found['maxmemory_policy']} deletes what must be kept; "
            "set noeviction there"
        )


def _refusal(url: str, error: BaseException) -> NexrlError:
    while error.__cause__ is not None:
        error = error.__cause__
    where = f"redis.url: {_shown(url)}: {str(error) or type(error).__name__}"
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return FailedPreconditionError(f"{where}; the user belongs in redis.url, its password in NEXRL_REDIS_PASSWORD")
    if isinstance(error, NoPermissionError):
        return FailedPreconditionError(f"{where}; docs/how-to/redis.md has the rights that the user needs")
    if "Cluster mode is not enabled" in where:
        return InvalidArgumentError(f"{where}; a URL of a single server begins with redis:// or rediss://")
    # A server that asks for a certificate may cut the connection before the alert that says so is read (TLS 1.3).
    if "certificate" in where or (url.startswith("rediss") and "Connection reset" in where):
        return FailedPreconditionError(
            f"{where}; the authority's file is named by rediss://...?ssl_ca_certs=FILE, a certificate of ours by "
            "&ssl_certfile=FILE&ssl_keyfile=FILE"
        )
    return UnavailableError(f"{where}: no Redis answers; start one there, or leave redis.url out for a private one")


def _shown(url: str) -> str:
    """The URL without what may be secret."""
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]


class _TlsConnection(SSLConnection):
    """Reads the files of its URL again whenever it connects: certificates and authorities are replaced in time."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


# patience ------------------------------------------------------------------------------------------------------------


class _Patience(Retry):
    """Repeats a call while Redis restarts, loads its data or hands over to a replica, on a new connection each time.

    Every script is idempotent (request ids, attempts), so one that may or may not have run can be sent again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(NoBackoff(), 0)
        self._seconds = seconds
        self._pauses = ExponentialWithJitterBackoff(cap=MAX_BACKOFF_SECONDS, base=0.02)

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[ResultT]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> ResultT:
        """Call `do` until it succeeds or has failed for too long; `fail` closes its connection in between."""
        deadline, failures = time.monotonic() + self._seconds, 0
        while True:
            try:
                return await do()
            except (RedisError, RedisClusterException, OSError) as error:
                if not _is_passing(error):
                    raise
                failures += 1
                await (fail(error, failures) if with_failure_count else fail(error))
                if time.monotonic() >= deadline:
                    raise StoreUnavailableError(f"redis.url: Redis is not available: {error}") from error
            await asyncio.sleep(self._pauses.compute(failures))


def _is_passing(error: Exception) -> bool:
    # A connection that could not be opened in time was repeated already, by the same patience.
    if isinstance(error, (AuthenticationError, AuthorizationError, StoreUnavailableError)):
        return False
    lost = (RedisConnectionError, RedisTimeoutError, RedisClusterException, ClusterError, OSError)
    return isinstance(error, lost) or PASSING.search(f"{getattr(error, 'status_code', '')} {error}") is not None


class _Cluster(RedisCluster):
    """A cluster's client that has the patience of a single server's connections."""

    def __init__(self, *, patience: _Patience, **options: Any) -> None:
        super().__init__(retry=Retry(NoBackoff(), 2), **options)
        self._patience = patience
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)

    async def initialize(self, *args: Any, **kwargs: Any) -> "_Cluster":
        """Ask one of the nodes that are known for all."""
        try:
            await super().initialize(*args, **kwargs)
        except RedisClusterException:
            # Those that were known may have been replaced; the name that was given may be that of newer ones.
            for given in self.startup_nodes:
                self.nodes_manager.startup_nodes.setdefault(given.name, given)
            raise
        return self

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Send one command."""
        send = super().execute_command
        return await self.patiently(lambda: send(*args, **kwargs))

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> "_ClusterPipeline":
        """Commands to send together, to each node its own."""
        return _ClusterPipeline(self)  # type: ignore[abstract]  # as redis-py's own is to mypy

    def pubsub(self, *args: Any, **kwargs: Any) -> "_ClusterPubSub":
        """A subscription at one node: what is published reaches all."""
        return _ClusterPubSub(self, *args, **kwargs)

    async def patiently(self, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Attempt until it succeeds or has failed for too long, when it is this call's turn."""
        async with self._turns:
            return await self._patience.call_with_retry(attempt, _nothing)


class _ClusterPipeline(ClusterPipeline):
    """Queues its commands anew for each attempt."""

    def __init__(self, cluster: _Cluster) -> None:
        super().__init__(cluster)
        self._cluster = cluster
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **kwargs: Any) -> "_ClusterPipeline":
        """Queue a command."""
        self._commands.append((args, kwargs))
        return self

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        """Send what is queued; gives the answers in its order."""
        queue, send = super().execute_command, super().execute
        commands, self._commands = self._commands, []

        async def attempt() -> list[Any]:
            for args, kwargs in commands:
                queue(*args, **kwargs)
            return await send(raise_on_error, allow_redirections)

        return await self._cluster.patiently(attempt)


class _ClusterPubSub(ClusterPubSub):
    """Fails as a single server's does, so that whoever listens subscribes again."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Send one command."""
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error


async def _nothing(_: Exception) -> None:
    """A cluster's client closes its connections by itself."""
