"""The HTTP server of /metrics. Unlike that of prometheus_client, it bounds its threads and its idle connections."""

import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

MAX_CONNECTIONS = 16
"""Each has a thread."""
SILENCE_SECONDS = 10.0
"""A connection that sends nothing for this long is closed."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves the metrics of this process until `close`. Closes connections beyond MAX_CONNECTIONS at once."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Bind and serve. Raises OSError if the port cannot be bound."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__((host, port), MetricsRequest)
        self.set_app(make_wsgi_app())
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See ThreadingMixIn."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ThreadingMixIn."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the failure of one connection, as that it was silent for too long."""


class MetricsRequest(WSGIRequestHandler):
    """One request for the metrics."""

    timeout = SILENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
