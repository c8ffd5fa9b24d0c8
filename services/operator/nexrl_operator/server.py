"""The operator's process: caches, leader election, workers, and HTTP for metrics and probes."""

import asyncio
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass

import aiohttp
import grpc
from aiohttp import web
from prometheus_client import Gauge, generate_latest

from nexrl import __version__
from nexrl.errors import NexrlError
from nexrl.json_logging import configure_logging
from nexrl.k8s.api import Api, connect_cluster
from nexrl.rpc.client import connect
from nexrl.rpc.server import BUILD_INFO
from nexrl_operator.cache import SILENCE_SECONDS
from nexrl_operator.credentials import RENEW_SECONDS, Credentials
from nexrl_operator.election import Election
from nexrl_operator.experiment_clients import Connect, ExperimentClients
from nexrl_operator.objects import GRPC_PORT
from nexrl_operator.reconciler import Reconciler
from nexrl_operator.settings import OperatorSettings, load_operator_settings
from nexrl_operator.status import PROGRESS_SECONDS
from nexrl_operator.work_queue import Key, WorkQueue

log = logging.getLogger(__name__)

WORKERS = 16
BEAT_SECONDS = 1.0
MAX_BEAT_AGE_SECONDS = 30.0
MAX_WATCH_AGE_SECONDS = 3 * SILENCE_SECONDS

LEADER = Gauge("nexrl_operator_leader", "1 for the operator that leads.")
DEPTH = Gauge("nexrl_operator_workqueue_depth", "Experiments that wait for a worker.")
LAST_EVENT = Gauge(
    "nexrl_operator_last_event_timestamp_seconds", "When the last message of the API server arrived.", ["kind"]
)


@dataclass
class Operator:
    """One operator. `run` ends when it loses the leadership or is cancelled."""

    api: Api
    settings: OperatorSettings
    connect: Connect | None = None
    """Opens a channel to a component; None for the component's Service. Tests set it."""

    def __post_init__(self) -> None:
        settings, self.queue = self.settings, WorkQueue()
        self.credentials = Credentials(self.api, settings)
        self.clients = ExperimentClients(self.connect or self._connect, self.queue.add, self._later)
        self.reconciler = Reconciler(self.api, settings, self.queue, self.clients, self.credentials)
        self.election = Election(
            self.api, settings.release_namespace, settings.lease_name, settings.pod_name, settings.deployment
        )
        self._beat_seconds = time.monotonic()

    async def run(self) -> None:
        """Fill the caches, wait for leadership, then work. Raises the first error of any task."""
        try:
            async with asyncio.TaskGroup() as tasks:
                caches = self.reconciler.caches
                for cache in (*caches.all, caches.warnings):
                    tasks.create_task(cache.run(self.api))
                tasks.create_task(self._beat())
                for cache in caches.all:
                    await cache.synced.wait()
                await self.election.win()
                LEADER.set(1)
                # A crashed worker or a lost Lease ends the process, so a broken leader never stays.
                tasks.create_task(self.election.keep())
                await self.credentials.begin()
                tasks.create_task(self._renew_certificate())
                tasks.create_task(self.credentials.redis_logins.keep())
                for item in self.reconciler.caches.experiments:
                    self.queue.add((item["metadata"]["namespace"], item["metadata"]["name"]))
                for _ in range(WORKERS):
                    tasks.create_task(self.queue.work(self.reconciler.reconcile))
        finally:
            self.reconciler.close()
            await self.clients.close()
            await self.election.release()

    def is_alive(self) -> bool:
        """Return whether the event loop and the watches work."""
        now = time.monotonic()
        oldest = min(cache.heard_seconds for cache in self.reconciler.caches.all)
        return now - self._beat_seconds < MAX_BEAT_AGE_SECONDS and now - oldest < MAX_WATCH_AGE_SECONDS

    def is_ready(self) -> bool:
        """Return whether the caches are filled, whether it leads or not."""
        return all(cache.synced.is_set() for cache in self.reconciler.caches.all)

    def _later(self, key: Key) -> None:
        self.queue.add_after(key, PROGRESS_SECONDS)

    def _connect(self, key: Key, component: str) -> grpc.aio.Channel:
        namespace, name = key
        return connect(f"dns:///{name}-{component}.{namespace}.svc:{GRPC_PORT}", self.credentials.tls(namespace, name))

    async def _renew_certificate(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self.credentials.begin()
            except (NexrlError, aiohttp.ClientError, OSError) as error:
                log.warning("cannot renew the operator's certificate: %s", str(error) or type(error).__name__)

    async def _beat(self) -> None:
        while True:
            self._beat_seconds = time.monotonic()
            DEPTH.set(self.queue.depth)
            for cache in self.reconciler.caches.all:
                age = time.monotonic() - cache.heard_seconds
                LAST_EVENT.labels(cache.kind.plural).set(time.time() - age)
            await asyncio.sleep(BEAT_SECONDS)


def main() -> None:
    """Entry point of `nexrl serve operator`."""
    try:
        settings = load_operator_settings()
        configure_logging("", settings.pod_name, os.environ.get("NEXRL_LOG_LEVEL", "INFO"))
        code = asyncio.run(_run(settings))
    except NexrlError as error:
        sys.stdout.write(f"operator: {error}\n")
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # an operator that has lost the Lease must end at once


async def _run(settings: OperatorSettings) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with connect_cluster() as api:
        settings = settings.model_copy(update={"release_namespace": settings.release_namespace or api.namespace})
        operator = Operator(api, settings)
        runner = await _serve(operator)
        running = asyncio.create_task(operator.run())
        await asyncio.wait([running, asyncio.create_task(stopping.wait())], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await runner.cleanup()
            return 0
        log.critical("ended", exc_info=running.exception())
        return 1


async def _serve(operator: Operator) -> web.AppRunner:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), content_type="text/plain", charset="utf-8")

    def answer(is_good: bool) -> web.Response:
        return web.Response(text="ok" if is_good else "not ok", status=200 if is_good else 503)

    async def healthy(_: web.Request) -> web.Response:
        return answer(operator.is_alive())

    async def ready(_: web.Request) -> web.Response:
        return answer(operator.is_ready())

    BUILD_INFO.labels(__version__, "operator").set(1)
    application = web.Application()
    application.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthy), web.get("/readyz", ready)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", operator.settings.health_port).start()
    return runner
