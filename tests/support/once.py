"""Work that parallel test processes share: one of them does it, and all get its result or its failure."""

import fcntl
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class SharedFailureError(AssertionError):
    """The shared work has failed, in this test process or in another one. The message has the first cause."""


def once(file: Path, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which JSON can express and `file` keeps. It is called at most once.

    Raises SharedFailureError if it has failed: a second attempt would cost minutes, and hide the first cause.
    """
    failure = file.with_suffix(".failure")
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failure.exists():
            raise SharedFailureError(failure.read_text())
        if not file.exists():
            try:
                file.write_text(json.dumps(work()))
            except BaseException as error:
                file.unlink(missing_ok=True)
                failure.write_text("".join(traceback.format_exception(error)))
                raise
        return json.loads(file.read_text())
