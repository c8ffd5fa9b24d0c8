"""The HTTP server of /metrics. Unlike that of prometheus_client, it bounds its threads and the time of a connection."""

import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

MAX_CONNECTIONS = 16
"""Each has a thread."""
CONNECTION_SECONDS = 10.0
"""A connection is closed after this time, also if its client sends or reads a byte now and then."""
POLL_SECONDS = 0.05
"""`close` blocks for up to this time. With the default, half a second, it would be most of a stop."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves the metrics of this process until `close`. Closes connections beyond MAX_CONNECTIONS at once."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Bind and serve. Raises OSError if the port cannot be bound."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._accepted_at: dict[socket.socket, float] = {}
        super().__init__((host, port), MetricsRequest)
        self.set_app(make_wsgi_app())
        threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See ThreadingMixIn."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._accepted_at[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._end(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ThreadingMixIn."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def service_actions(self) -> None:
        """Shut down the connections that last too long. See BaseServer, which calls this every POLL_SECONDS."""
        for request, accepted_at in list(self._accepted_at.items()):
            if time.monotonic() - accepted_at > CONNECTION_SECONDS:
                with suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)

    def _end(self, request: socket.socket) -> None:
        del self._accepted_at[request]
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the failure of one connection, as that it lasted too long."""


class MetricsRequest(WSGIRequestHandler):
    """One request for the metrics."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
