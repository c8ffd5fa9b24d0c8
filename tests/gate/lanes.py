"""Runs the parts of the gate: one lane beside the other, each part to its end, with all its failures."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.gate.parts import Part
from tests.gate.results import Result, Verdict

HEARTBEAT_SECONDS = 60.0
STOP_SECONDS = 15.0  # speed: of a part that is ended because it hangs
"""Between the signals that end a part. At the first one pytest still writes its report."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SHOWN_BYTES = 60_000
"""Of the output of a part that failed; all of it is in its log."""
LOST = b"maximum crashed workers reached"
"""What pytest-xdist prints when it gives up. The report then has no trace of the tests that were left."""
Say = Callable[[str], None]


class Lanes:
    """Runs parts. `folder` gets the log and the report of each; `say` prints a line with the time."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._running: dict[str, float] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_ending = False
        self._reports = 0
        self._done: dict[str, threading.Event] = {}
        self._results: dict[str, Result] = {}

    def run(self, parts: Sequence[Part]) -> list[Result]:
        """Run all parts, and return their results in the same order. An interrupt ends those that run."""
        self._done = {part.name: threading.Event() for part in parts}
        lanes = sorted({part.lane for part in parts})
        with self._heartbeat(), ThreadPoolExecutor(max(1, len(lanes))) as threads:
            running = [threads.submit(self._run_lane, [part for part in parts if part.lane == lane]) for lane in lanes]
            try:
                for lane_run in running:
                    lane_run.result()
            except BaseException:
                self._end()
                raise
        return [self._results[part.name] for part in parts]

    def _end(self) -> None:
        self._is_ending = True
        for process in list(self._processes):
            _stop(process)

    def run_one(self, part: Part) -> Result:
        """Run a part, print how it ended, and return the result."""
        if part.missing:
            self._say(f"{part.name} is skipped: {part.missing}")
            return Result(part.name, Verdict.SKIPPED, why=part.missing)
        self._reports += 1
        name = f"{self._reports:02}-{part.name.replace(' ', '-')}"
        log, xml = self._folder / f"{name}.log", self._folder / f"{name}.xml"
        self._say(f"{part.name} begins")
        self._running[part.name] = began = time.monotonic()
        why = self._ended(part, log, xml)
        del self._running[part.name]
        seconds = time.monotonic() - began
        result = Result(part.name, Verdict.FAILED if why else Verdict.PASSED, seconds, why).with_tests_of(xml)
        if part.tests and not why and not result.passed:
            result = replace(result, verdict=Verdict.SKIPPED, why="each of its tests was skipped")
        self._say(
            f"{part.name} {result.verdict.value} after {seconds:.0f} s{f': {why}' if why else ''}; {last_line(log)}"
        )
        if why:
            self._say(f"what {part.name} printed:\n{tail(log)}")
        return result

    def _run_lane(self, parts: Sequence[Part]) -> None:
        for part in parts:
            try:
                self._results[part.name] = self._result(part)
            except Exception as error:  # noqa: BLE001  # a fault of the gate is red, and hides no other result
                self._results[part.name] = Result(part.name, Verdict.FAILED, why=f"the gate itself: {error!r}")
            finally:
                self._done[part.name].set()

    def _result(self, part: Part) -> Result:
        for name in part.after:
            if name in self._done:
                self._done[name].wait()
        for before in [self._results[name] for name in part.after if name in self._results]:
            if before.verdict in (Verdict.FAILED, Verdict.NOT_RUN):
                return Result(part.name, Verdict.NOT_RUN, why=f"{before.part}: {before.verdict.value}")
        if self._is_ending:
            return Result(part.name, Verdict.NOT_RUN, why="interrupted")
        return self.run_one(part)

    def _ended(self, part: Part, log: Path, xml: Path) -> str:
        """Run the command. Returns "" if it succeeds, otherwise how it ended."""
        environment = {**os.environ, **part.environment}
        if "KUBECONFIG" not in part.needs:
            environment.pop("KUBECONFIG", None)
        with log.open("wb") as output:
            process = subprocess.Popen(
                part.arguments(xml),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            self._processes.add(process)
            try:
                code = process.wait(part.limit_seconds)
            except subprocess.TimeoutExpired:
                return f"not at its end after {part.limit_seconds:.0f} s"
            finally:
                _stop(process)
                self._processes.discard(process)
        if LOST in log.read_bytes():
            return "processes crashed, and tests were lost"
        return f"exit code {code}" if code else ""

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        end = threading.Event()

        def beat() -> None:
            while not end.wait(HEARTBEAT_SECONDS):
                now = time.monotonic()
                running = [f"{name} for {now - began:.0f} s" for name, began in list(self._running.items())]
                self._say(f"running: {', '.join(running)}; load {os.getloadavg()[0]:.1f}")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


def rerun(part: Part, tests: Sequence[str], limit_seconds: float) -> Part:
    """Return the part that runs only these tests, one after the other."""
    return replace(part, tests=tests, workers=0, limit_seconds=limit_seconds, after=())


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty; of pytest's that is the summary."""
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("make")]
    return lines[-1].strip(" =") if lines else "no output"


def tail(log: Path) -> str:
    """Return the end of a log."""
    text = log.read_bytes()
    cut = f"... {len(text) - SHOWN_BYTES} bytes before, in {log}\n" if len(text) > SHOWN_BYTES else ""
    return cut + text[-SHOWN_BYTES:].decode(errors="replace")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a part that still runs, with all processes of its group."""
    for number in STOP_SIGNALS:
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
