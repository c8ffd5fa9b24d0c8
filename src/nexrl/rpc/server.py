"""The process of a service: gRPC server, health, reflection, /metrics, background tasks, bounded stop on SIGTERM."""

import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Gauge

from nexrl import __version__
from nexrl.activity import ActivityTracker
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, NexrlError
from nexrl.json_logging import configure_logging
from nexrl.log_files import log_path
from nexrl.malloc import keep_freed_memory
from nexrl.metrics_file import MetricsFile
from nexrl.rpc.admission import Admission, KubernetesApi, TokenReviews
from nexrl.rpc.client import connect
from nexrl.rpc.interceptor import EdgeInterceptor
from nexrl.rpc.limits import MAX_MESSAGE_BYTES, message_limit_bytes
from nexrl.rpc.metrics import MetricsServer
from nexrl.run_layout import METRICS_FILE
from nexrl.settings import ALIVE, Settings, load_settings
from nexrl.spec import Experiment, load_resolved
from nexrl.tls import CredentialFiles, Credentials, Tls, tls_from_environment
from nexrl.v1 import activity_service_pb2 as activity_pb

if TYPE_CHECKING:  # most services have no HTTP API, and start sooner without aiohttp
    from aiohttp import web

log = logging.getLogger(__name__)

BUILD_INFO = Gauge("nexrl_build_info", "1; the labels name version and role.", ["version", "role"])

CANCEL_AGAIN_SECONDS = 0.1

MAX_CONNECTIONS = 5000
"""At each port. A connection without a call holds about 50 KiB. The largest experiment has 2100 processes, each with an
old and a new connection while certificates are renewed."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    (
        "grpc.max_connection_age_ms",
        600_000,
    ),  # clients then resolve the name again, and find new pods of a headless Service
    ("grpc.max_connection_age_grace_ms", 60_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; one that waits keeps its connection
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 20_000),
    # A call that waits for its admission holds 64 KiB of its message. With this probe, gRPC lets it send 8 MB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
]

TRAINER_CHANGES = {
    # Between the replicas of a trainer, a call lasts as long as both. By its end, one notices that the other has ended.
    "grpc.max_connection_age_ms": 2**31 - 1,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 10_000,
}
# Everybody may call the health port. Each probe of the kubelet opens a connection of its own.
HEALTH_CHANGES = {
    "grpc.max_receive_message_length": 4096,
    "grpc.max_connection_idle_ms": 5_000,
    "grpc.max_connection_age_ms": 30_000,
    "grpc.max_connection_age_grace_ms": 1_000,
}


class ServiceProcess:
    """The process of a service without its servicers. It is not ready until `set_ready`."""

    def __init__(self, role: str, settings: Settings, experiment: Experiment) -> None:
        self.role = role
        self.settings = settings
        self.experiment = experiment
        self.stopping = asyncio.Event()
        self._is_ready = False
        self._names: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stoppers: list[Callable[[], Awaitable[Any]]] = []
        self._closers: list[Callable[[], Awaitable[Any]]] = []
        self._failure: BaseException | None = None
        self._health = health.aio.HealthServicer()
        tls = tls_from_environment()
        self.credentials = CredentialFiles(tls) if tls else None
        self.admission = self._build_admission(tls) if tls else None
        self.server = grpc.aio.server(
            interceptors=[EdgeInterceptor(self.admission)],
            options=_options(role),
        )
        self._health_server = grpc.aio.server(options=[*(dict(SERVER_OPTIONS) | HEALTH_CHANGES).items()])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
        self.port, self.token_port, self.health_port = self._bind_all()
        self._metrics_server = self._serve_metrics()
        self.metrics_port = self._metrics_server.server_port
        BUILD_INFO.labels(__version__, role).set(1)
        self.activity = self._connect_activity()

    @property
    def address(self) -> str:
        """host:port that serves gRPC."""
        return f"{self.settings.advertised}:{self.port}"

    @property
    def token_address(self) -> str:
        """host:port that serves gRPC to clients with a token instead of a certificate; "" if there is none."""
        return f"{self.settings.advertised}:{self.token_port}" if self.token_port else ""

    def connect(self, address: str) -> grpc.aio.Channel:
        """Return a channel that is closed when the process ends."""
        channel = connect(address)
        self.on_close(channel.close)
        return channel

    def add(self, register: Callable[[Any, Any], None], servicer: object, service_name: str) -> None:
        """Serve `servicer`. `service_name` is its full name, for example 'nexrl.v1.ValidatorService'."""
        register(servicer, self.server)
        self._names.append(service_name)

    def secure_http(self, application: "web.Application") -> ssl.SSLContext | None:
        """Guard `application` like the RPCs, and return the TLS context to serve it with; None without TLS."""
        from nexrl.rpc.http import guard

        if self.credentials is None or self.admission is None:
            return None
        guard(application, self.admission)
        return self.credentials.server_context()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. If it raises, the process stops with that error."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def on_stop(self, stopper: Callable[[], Awaitable[Any]]) -> None:
        """Call `stopper` before background work is cancelled. It has `stop_seconds` to finish work in progress."""
        self._stoppers.append(stopper)

    def on_close(self, closer: Callable[[], Awaitable[Any]]) -> None:
        """Call `closer` when the process ends, in reverse order of registration."""
        self._closers.append(closer)

    async def set_ready(self, is_ready: bool = True) -> None:
        """Answer health checks with SERVING or NOT_SERVING."""
        self._is_ready = is_ready
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, serving if is_ready else not_serving)

    async def run(self, start: Callable[["ServiceProcess"], Awaitable[None]]) -> None:
        """Serve until `stopping` is set or background work fails, then drain. Raises the error of that work."""
        await self.set_ready(False)
        await self._health.set(ALIVE, health_pb2.HealthCheckResponse.SERVING)
        try:
            await self._health_server.start()
            if await self._is_started(start):
                await self._serve()
                await self.stopping.wait()
        finally:
            await self._close()
        if self._failure is not None:
            raise self._failure

    async def _is_started(self, start: Callable[["ServiceProcess"], Awaitable[None]]) -> bool:
        """Wait for `start`, which may itself wait for peers or user code. Return False if the process must stop."""
        starting = asyncio.ensure_future(start(self))
        stopping = asyncio.create_task(self.stopping.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            await starting
            return True
        starting.cancel()
        await asyncio.wait((starting,), timeout=self.settings.drain_seconds)
        return False

    async def _serve(self) -> None:
        await self.set_ready(self._is_ready)  # `start` may have added services
        if self.settings.reflection:
            reflection.enable_server_reflection([*self._names, reflection.SERVICE_NAME], self.server)
        await self.server.start()
        self.spawn(self.activity.send_heartbeats())
        log.info("listening", extra={"address": self.address, "metrics_port": self.metrics_port})

    async def _close(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(self.settings.drain_seconds)
        for stopper in self._stoppers:
            try:
                await asyncio.wait_for(stopper(), self.settings.stop_seconds)
            except Exception:
                log.exception("work in progress could not be finished")
        await self._end_tasks()
        await self.activity.send_last_heartbeat()
        await self._health_server.stop(None)
        for closer in reversed(self._closers):
            try:
                await closer()
            except Exception:
                # The other closers must still run, and the error that stopped the process must not be replaced.
                log.exception("closing failed")
        # Not in a thread: user code that does not return may have taken all of the default executor's.
        self._metrics_server.close()

    async def _end_tasks(self) -> None:
        deadline = time.monotonic() + self.settings.drain_seconds
        while self._tasks and time.monotonic() < deadline:
            for task in self._tasks:
                task.cancel()
            # Cancel repeatedly: before Python 3.12, asyncio.wait_for, which redis-py uses, may lose a cancellation
            # (https://github.com/python/cpython/issues/81839).
            await asyncio.wait(self._tasks, timeout=CANCEL_AGAIN_SECONDS)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self.stopping.set()

    def _build_admission(self, tls: Tls) -> Admission:
        if tls.certificate is None:
            raise InvalidArgumentError(
                "settings: NEXRL_TLS_CERT: missing; a service needs a certificate, a token is only for clients"
            )
        if not self.settings.token_port:
            return Admission(tls)
        return Admission(tls, TokenReviews(tls.name, KubernetesApi.from_environment(os.environ)))

    def _bind_all(self) -> tuple[int, int, int]:
        """Bind and return the ports for gRPC, for clients with a token, and for health only; 0 if not served."""
        settings, files = self.settings, self.credentials
        token_port = health_port = 0
        port = _bind(
            self.server, "listen", settings.listen, _server_credentials(files, asks_certificate=True) if files else None
        )
        if settings.token_port:
            if files is None:
                raise InvalidArgumentError("settings: NEXRL_TOKEN_PORT: tokens require TLS (NEXRL_TLS_CERT)")
            without = _server_credentials(files, asks_certificate=False)
            token_port = _bind(self.server, "token_port", f"{settings.host}:{settings.token_port}", without)
        if settings.health_port:
            health_port = _bind(self._health_server, "health_port", f"{settings.host}:{settings.health_port}", None)
        return port, token_port, health_port

    def _serve_metrics(self) -> MetricsServer:
        try:
            return MetricsServer(self.settings.host, self.settings.metrics_port)
        except OSError as error:
            raise FailedPreconditionError(
                f"metrics_port: cannot bind {self.settings.host}:{self.settings.metrics_port}: {error.strerror}; "
                "choose another (NEXRL_METRICS_PORT)"
            ) from None

    def _connect_activity(self) -> ActivityTracker:
        module = activity_pb.Module(
            name=self.settings.instance,
            role=self.role,
            address=self.address,
            metrics_url=f"http://{self.settings.advertised}:{self.metrics_port}/metrics",
        )
        channel = self.connect(self.settings.controller) if self.settings.controller else None
        file = MetricsFile(self.settings.run_dir / METRICS_FILE) if self.settings.keeps_metrics else None
        activity = ActivityTracker(module, channel, file)
        self.on_close(activity.reports_sent)
        return activity


def _options(role: str) -> list[tuple[str, int]]:
    changes = {
        "grpc.max_receive_message_length": message_limit_bytes(role),
        **(TRAINER_CHANGES if role == "trainer" else {}),
    }
    return [*(dict(SERVER_OPTIONS) | changes).items()]


def _bind(server: grpc.aio.Server, setting: str, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise FailedPreconditionError(
            f"{setting}: cannot bind {address}: the port is in use, or the address is not of this machine; "
            f"choose another (NEXRL_{setting.upper()})"
        ) from None


def _server_credentials(files: CredentialFiles, *, asks_certificate: bool) -> grpc.ServerCredentials:
    """Return credentials that follow the files. With gRPC for Python, a client certificate cannot be optional."""
    shown = files.newest()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration if the files have changed. A thread of gRPC calls this in each handshake."""
        nonlocal shown
        if (newest := files.newest()) is shown:
            return None
        shown = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        changed,  # type: ignore[arg-type]  # None: nothing has changed
        asks_certificate,
    )


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(credentials.key, credentials.certificate)], credentials.ca)


def run_service(role: str, start: Callable[[ServiceProcess], Awaitable[None]]) -> None:
    """Run a service: settings, experiment, logging, signals. Exits with the exit code of the error."""
    keep_freed_memory()
    try:
        settings = load_settings()
        experiment = load_resolved(settings.experiment_file)
        kept_in = log_path(settings.run_dir, settings.instance) if settings.keeps_log else None
        configure_logging(experiment.metadata.name, settings.instance, settings.log_level, kept_in)
        # It is never closed: that would wait for threads of the user, such as a reward that does not return.
        asyncio.Runner().run(_run(role, settings, experiment, start))
    except Exception as raised:
        error = _first(raised)
        if isinstance(error, NexrlError):
            log.critical("%s", error)
            sys.stdout.write(f"{role}: {error}\n")
            _exit(error.exit_code)
        log.critical("crashed", exc_info=error)
        _exit(1)
    _exit(0)


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group: the others of a TaskGroup were cancelled, or came later."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(
    role: str, settings: Settings, experiment: Experiment, start: Callable[[ServiceProcess], Awaitable[None]]
) -> None:
    process = ServiceProcess(role, settings, experiment)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stopping.set)
    await process.run(start)


def _exit(code: int) -> None:
    """Exit at once: threads of torch and Gloo must not delay the end of a drained process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
