"""Object storage: what its errors say, and which of them are refusals."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nexrl.errors import InvalidArgumentError, NexrlError, UnavailableError
from nexrl.storage import RunStorage

SECRETS = {"AWS_ACCESS_KEY_ID": "THE-KEY", "AWS_SECRET_ACCESS_KEY": "THE-SECRET", "AWS_SESSION_TOKEN": "THE-TOKEN"}


def in_form_of_aws(code: str) -> str:
    hidden = "<Token-0>THE-TOKEN</Token-0><AWSAccessKeyId>THE-KEY</AWSAccessKeyId>"
    return f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>This is why.</Message>{hidden}</Error>'


@contextmanager
def answering(status: int, body: str) -> Iterator[RunStorage]:
    """Serve the same answer to each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield RunStorage("s3://bucket/run", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("call", ["get", "put", "names", "delete"])
@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (
            (400, in_form_of_aws("ExpiredToken")),
            InvalidArgumentError,
            "400 Bad Request ExpiredToken This is why.",
        ),
        ((403, in_form_of_aws("InvalidAccessKeyId")), InvalidArgumentError, "InvalidAccessKeyId This is why.; check"),
        ((403, in_form_of_aws("AccessDenied")), InvalidArgumentError, "AccessDenied This is why.; check"),
        ((400, in_form_of_aws("RequestTimeout")), UnavailableError, "RequestTimeout This is why."),
        ((400, "bad token: THE-TOKEN"), UnavailableError, "400 Bad Request"),
    ],
)
def test_an_error_of_the_storage_says_why_and_no_credentials(
    tmp_path: Path, call: str, answer: tuple[int, str], kind: type[NexrlError], said: str
) -> None:
    (tmp_path / "file").write_text("content")
    arguments = {"get": ("name", tmp_path / "copy"), "put": ("name", tmp_path / "file"), "delete": (["name"],)}
    with answering(*answer) as storage, pytest.raises(kind) as refused:
        getattr(storage, call)(*arguments.get(call, ()))
    assert said in str(refused.value)
    assert not any(secret in str(refused.value) for secret in SECRETS.values())
