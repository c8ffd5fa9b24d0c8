"""The copy of a run's folder in object storage: `<storage.uri>/<namespace, if any>/<experiment>/`, same names inside.

    run.json      the run that the copy belongs to, so that no other run is mixed with it

All calls block, and end: each request has a time limit and is repeated a few times. Credentials come from the
environment (AWS_ACCESS_KEY_ID, ...) and are never part of an error.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nexrl.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.kept_log import open_regular
from nexrl.spec import Experiment

RUN_FILE = "run.json"
LIMITS: dict[str, Any] = {
    "client_options": {"connect_timeout": "5s", "read_timeout": "60s", "timeout": "1h"},
    "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
}
DENIED = ("PermissionDeniedError", "UnauthenticatedError")


class RunStorage:
    """The files of one run in object storage. Names are relative paths such as `logs/trainer.log`.

    Methods raise UnavailableError if the storage does not answer, and InvalidArgumentError if it refuses: the bucket
    does not exist, or the credentials are wrong.
    """

    def __init__(self, address: str, endpoint: str | None = None) -> None:
        """`address` is the URI of the folder, `endpoint` the URL of a server that is not the provider's."""
        self.address = address
        with self._naming():
            self._store = _open_store(address, endpoint)

    @classmethod
    def of(cls, experiment: Experiment) -> "RunStorage | None":
        """Return the storage of an experiment; None if it has no `storage.uri`."""
        storage, metadata = experiment.spec.storage, experiment.metadata
        if storage.uri is None:
            return None
        parts = filter(None, (storage.uri.rstrip("/"), metadata.namespace, metadata.name))
        return cls("/".join(parts), storage.endpoint)

    def claim(self, experiment: Experiment) -> None:
        """Write RUN_FILE. Raises AlreadyExistsError if another run wrote it and the experiment does not resume it."""
        content = json.dumps({"ledger": experiment.ledger}).encode()
        if (found := self.read(RUN_FILE)) != content:
            if found is not None:
                self.refuse_another_run(experiment)
            self._call("put", RUN_FILE, content)

    def refuse_another_run(self, experiment: Experiment) -> None:
        """Raise AlreadyExistsError if the storage has a run, and the experiment does not resume it."""
        if experiment.spec.resume.mode != "auto" and self.read(RUN_FILE) is not None:
            raise AlreadyExistsError(
                f"storage.uri: {self.address} has the results of an earlier run; choose another metadata.name or "
                "storage.uri, delete the earlier results, or set resume.mode to auto to continue that run"
            )

    def put(self, name: str, path: Path) -> None:
        """Copy a file to the storage; it appears there only when it is complete. Raises OSError if it is unreadable.

        User code can write to the folder of a run, so links are refused: the file that they name may be secret.
        """
        with open(path, "rb", opener=open_regular) as file:
            self._call("put", name, file)

    def get(self, name: str, path: Path) -> None:
        """Copy a file of the storage to `path`. Raises FailedPreconditionError if the storage does not have it."""
        import obstore

        with path.open("wb") as file, self._naming():
            try:
                for block in obstore.get(self._store, name).stream():
                    file.write(block)
            except FileNotFoundError:
                raise FailedPreconditionError(f"{self.address}/{name} does not exist") from None

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        import obstore

        with self._naming():
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all files below a folder."""
        import obstore

        with self._naming():
            return [item["path"] for page in obstore.list(self._store, folder or None) for item in page]

    def delete(self, names: Sequence[str]) -> None:
        """Delete files. Those that do not exist are ignored."""
        if names:
            self._call("delete", list(names))

    def _call(self, function: str, *arguments: Any) -> None:
        import obstore

        with self._naming():
            getattr(obstore, function)(self._store, *arguments)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raise errors of the library as our own, with the address and without its debug output."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            said = " ".join(str(error).partition("\n\nDebug source")[0].split())[:400]
            is_refused = isinstance(error, FileNotFoundError) or type(error).__name__ in DENIED
            kind, todo = (
                (InvalidArgumentError, "; check that the bucket exists, and the credentials in the environment")
                if is_refused
                else (UnavailableError, "")
            )
            raise kind(f"storage.uri: {self.address}: {said}{todo}") from None


def _open_store(address: str, endpoint: str | None) -> Any:
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise InvalidArgumentError(
            f"storage.uri: {address}: the package obstore is not installed; run `pip install 'nexrl[storage]'`"
        ) from None
    if address.startswith("file://"):
        return LocalStore(urlsplit(address).path, mkdir=True)
    options = dict(LIMITS["client_options"])
    if (endpoint or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
        options["allow_http"] = True
    build: Any = from_url  # its types allow a key only beside a literal scheme
    given = {"endpoint": endpoint} if endpoint else {}
    return build(address, client_options=options, retry_config=LIMITS["retry_config"], **given)
