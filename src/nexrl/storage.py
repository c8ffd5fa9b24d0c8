"""The copy of a run's folder in object storage: `<storage.uri>/<namespace, if any>/<experiment>/`.

    run.json               the run that the copy belongs to (Owner), so that no other run is mixed with it
    checkpoints/           of all runs that continued each other (nexrl_trainer.stored_checkpoints)
    records/<run id>/      logs, metrics, trajectories and the rest (nexrl.mirror); no run writes over those of another

All calls block, and end: each request has a time limit and is repeated a few times. Credentials come from the
environment (AWS_ACCESS_KEY_ID, ...) and are never part of an error.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nexrl.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.kept_log import open_regular
from nexrl.run_layout import CHECKPOINTS_FOLDER, RUN_ID_FILE
from nexrl.spec import Experiment
from nexrl.spec.experiment import LEDGER_ANNOTATION

RUN_FILE = "run.json"
RECORDS_FOLDER = "records"
LIMITS: dict[str, Any] = {
    "client_options": {"connect_timeout": "5s", "read_timeout": "60s"},
    "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
}
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_REFUSING_CODES = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "NoSuchBucket")
_STATUS = "non-2xx status code:"
_OF_BODY = (r"<Code>(\w+)</Code>", r"<Message>([^<]*)</Message>")


class RunStorage:
    """The files of one run in object storage. Names are relative paths such as `logs/trainer.log`.

    Methods raise UnavailableError if the storage does not answer, and InvalidArgumentError if it refuses: the bucket
    does not exist, or the credentials are wrong.
    """

    def __init__(self, address: str, endpoint: str | None = None, request_seconds: int = 3600) -> None:
        """`address` is the URI of the folder, `endpoint` the URL of a server that is not the provider's.

        A request may take `request_seconds`: one reads a whole file, or writes at most 10 MB.
        """
        self.address = address
        self.copied_files = 0
        """Files that were copied to the storage so far."""
        with self._naming():
            self._store = _open_store(address, endpoint, request_seconds)

    @classmethod
    def of(cls, experiment: Experiment, request_seconds: int = 3600) -> "RunStorage | None":
        """Return the storage of an experiment; None if it has no `storage.uri`."""
        storage, metadata = experiment.spec.storage, experiment.metadata
        if storage.uri is None:
            return None
        parts = filter(None, (storage.uri.rstrip("/"), metadata.namespace, metadata.name))
        return cls("/".join(parts), storage.endpoint, request_seconds)

    def claim(self, experiment: Experiment, run: str, *, at_start: bool = False) -> None:
        """Make this the storage of the run with this id. Raises AlreadyExistsError if it has another run.

        With `at_start`, a run takes the storage over from the one that its experiment resumes. The other run finds
        another id, and copies no more.
        """
        owner = self.owner()
        if owner is None or (at_start and owner.run != run and owner.is_resumed_by(experiment)):
            content = asdict(Owner(run, _unique_ledger(experiment), tuple(self.names(CHECKPOINTS_FOLDER))))
            self._call("put", RUN_FILE, json.dumps(content).encode())
        elif owner.run != run:
            raise AlreadyExistsError(self._refusal())

    def owner(self) -> "Owner | None":
        """Return the run that the storage belongs to. Raises InvalidArgumentError if RUN_FILE is damaged."""
        if (content := self.read(RUN_FILE)) is None:
            return None
        try:
            found = json.loads(content)
            return Owner(found["run"], found["ledger"], tuple(found["earlier"]))
        except (ValueError, LookupError, TypeError):
            raise InvalidArgumentError(
                f"storage.uri: {self.address}/{RUN_FILE} is damaged; choose another storage.uri, or delete the folder"
            ) from None

    def refuse_another_run(self, experiment: Experiment) -> None:
        """Raise AlreadyExistsError if the storage has a run, and the experiment does not resume it."""
        if experiment.spec.resume.mode != "auto" and self.owner() is not None:
            raise AlreadyExistsError(self._refusal())

    def _refusal(self) -> str:
        return (
            f"storage.uri: {self.address} has the results of an earlier run, or of one that runs now; choose another "
            "metadata.name or storage.uri, delete the earlier results, or start with resume.mode auto to continue it"
        )

    def put(self, name: str, path: Path) -> None:
        """Copy a file to the storage; it appears there only when it is complete. Raises OSError if it is unreadable.

        User code can write to the folder of a run, so links are refused: the file that they name may be secret.
        """
        with open(path, "rb", opener=open_regular) as file:
            self._call("put", name, file)
        self.copied_files += 1

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

    def stamps(self, folder: str) -> dict[str, tuple[int, float]]:
        """Return size in bytes and time of change (Unix seconds) of all files below a folder, by name."""
        import obstore

        with self._naming():
            found = [item for page in obstore.list(self._store, folder or None) for item in page]
        return {item["path"]: (item["size"], item["last_modified"].timestamp()) for item in found}

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all files below a folder."""
        return list(self.stamps(folder))

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
        except (BaseError, FileNotFoundError, ValueError) as error:
            said, is_refused = _explain(error)
            if is_refused:
                todo = "check that the bucket exists, and the credentials in the environment"
                raise InvalidArgumentError(f"storage.uri: {self.address}: {said}; {todo}") from None
            raise UnavailableError(f"storage.uri: {self.address}: {said}") from None


@dataclass(frozen=True)
class Owner:
    """Content of RUN_FILE."""

    run: str
    """Id of the run, as in its folder."""
    ledger: str | None
    """Name of its ledger, if no other run can have that: on a cluster."""
    earlier: tuple[str, ...]
    """Names of the checkpoint files that were in the storage already when the run took it over."""

    def is_resumed_by(self, experiment: Experiment) -> bool:
        """Return whether the experiment continues the run: it says so, or has its ledger, and has lost its volume."""
        has_its_ledger = self.ledger is not None and self.ledger == _unique_ledger(experiment)
        return experiment.spec.resume.mode == "auto" or has_its_ledger


def run_id(run: Path) -> str:
    """Return the id of the run in folder `run`. The first call chooses it. The name of an experiment is no such id."""
    path = run / RUN_ID_FILE
    if not path.exists():
        partial = path.with_name(f"{RUN_ID_FILE}.tmp")
        partial.write_text(f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}")
        partial.replace(path)
    return path.read_text()


def _unique_ledger(experiment: Experiment) -> str | None:
    return experiment.metadata.annotations.get(LEDGER_ANNOTATION)


def _explain(error: Exception) -> tuple[str, bool]:
    """Return what an error of the library says, and whether the storage refuses: a retry cannot help.

    Of the body of an answer, only code and message: AWS repeats the key and the session token in it.
    """
    said, _, answer = str(error).partition("\n\nDebug source")[0].partition(_STATUS)
    status, _, body = answer.partition(":")
    code, message = (match[1] if (match := re.search(pattern, body)) else "" for pattern in _OF_BODY)
    told = " ".join(f"{said}{_STATUS if answer else ''}{status} {code} {message}".split())[:400]
    is_refused = (
        isinstance(error, FileNotFoundError | ValueError)
        or type(error).__name__ in _DENIED
        or status.strip()[:3] in ("401", "403")
        or code in _REFUSING_CODES
    )
    return told, is_refused


def _open_store(address: str, endpoint: str | None, request_seconds: int) -> Any:
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise InvalidArgumentError(
            f"storage.uri: {address}: the package obstore is not installed; run `pip install 'nexrl[storage]'`"
        ) from None
    if address.startswith("file://"):
        return LocalStore(urlsplit(address).path, mkdir=True)
    options = LIMITS["client_options"] | {"timeout": f"{request_seconds}s"}
    if (endpoint or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
        options["allow_http"] = True
    build: Any = from_url  # its types allow a key only beside a literal scheme
    given = {"endpoint": endpoint} if endpoint else {}
    return build(address, client_options=options, retry_config=LIMITS["retry_config"], **given)
