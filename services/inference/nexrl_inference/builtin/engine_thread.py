"""Runs an engine in a thread of its own, for callers on an asyncio event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from nexrl.errors import NexrlError, UnavailableError
from nexrl.weights.receiver import StagedWeights
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.requests import GenerationRequest, GenerationResult

log = logging.getLogger(__name__)

Call = tuple[Callable[[], None], asyncio.Future[Any]]


class EngineThread:
    """Steps an engine while it has work and sleeps while it has none. Use as an async context manager, once.

    Every call reaches the engine between two of its steps. An exception in the loop ends the thread: waiting and later
    calls raise UnavailableError. Call the methods from the event loop that entered the context.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A daemon: if the event loop dies without `close`, an idle engine must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._wakeup = threading.Condition()
        self._calls: list[Call] = []  # with `_is_closing`, guarded by `_wakeup`
        self._is_closing = False
        self._generating: dict[str, asyncio.Future[GenerationResult]] = {}  # used by the engine's thread only
        self._unanswered: set[asyncio.Future[Any]] = set()  # with `_refusal`, used by the event loop only
        self._refusal: str | None = "the engine is not started"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str | None] = self._loop.create_future()
        self._refusal = None
        self._thread.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def policy_version(self) -> int | None:
        """The version of the live weights; None before the first `load_weights`."""
        return self._engine.policy_version

    @property
    def active_rows(self) -> int:
        return self._engine.active_rows

    @property
    def waiting_requests(self) -> int:
        return self._engine.waiting_requests

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate all completions of a request. Cancelling the awaiting task cancels its rows.

        Raises what `Engine.submit` raises, and UnavailableError when the engine ends first.
        """
        answer: asyncio.Future[GenerationResult] = self._loop.create_future()
        self._post(lambda: self._submit(request, answer), answer)
        try:
            return await answer
        except asyncio.CancelledError:
            with suppress(UnavailableError):  # an engine that has ended generates nothing
                self._post(lambda: self._abandon(request.request_id, answer), answer)
            raise

    async def cancel(self, request_id: str) -> None:
        """Make `generate` of that request return with what it has. Raises NotFoundError for an unknown request."""
        await self._ask(lambda: self._deliver(self._engine.cancel(request_id)))

    async def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """`Engine.load_weights`, between two steps. The tensors must not change until this returns."""
        await self._ask(lambda: self._engine.load_weights(state, version))

    async def load(self, weights: StagedWeights) -> None:
        """Serve a received version from the next step on."""
        await self.load_weights(weights.tensors(), weights.policy_version)

    async def wait_ended(self) -> None:
        """Return when the engine has been closed; raise UnavailableError when it has failed instead."""
        failure = await asyncio.shield(self._ended)
        if failure is not None:
            raise UnavailableError(failure)

    async def close(self) -> None:
        """End the thread after the step it is in; requests still in flight get UnavailableError."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        await asyncio.shield(self._ended)

    async def _ask(self, action: Callable[[], None]) -> None:
        """Run `action` in the engine's thread and wait for it."""
        answer: asyncio.Future[None] = self._loop.create_future()

        def act_and_answer() -> None:
            action()
            self._answer(answer, None)

        self._post(act_and_answer, answer)
        await answer

    def _post(self, action: Callable[[], None], answer: asyncio.Future[Any]) -> None:
        """Queue `action` for the engine's thread; a typed error that it raises becomes the answer."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        with self._wakeup:
            self._calls.append((action, answer))
            self._wakeup.notify()

    def _end(self, failure: str | None) -> None:
        """Fail all waiting calls, after the thread has ended. Runs on the event loop."""
        self._refusal = failure or "the engine is closed"
        for answer in list(self._unanswered):
            _set_exception(answer, UnavailableError(self._refusal))
        self._ended.set_result(failure)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        failure: str | None = None
        try:
            while (calls := self._next_calls()) is not None:
                self._act(calls)
                for result in self._engine.step():
                    self._deliver(result)
        except Exception as error:  # any error must end the waiting calls
            log.exception("the engine failed")
            failure = f"the engine failed: {error!r}"
        self._loop.call_soon_threadsafe(self._end, failure)

    def _next_calls(self) -> list[Call] | None:
        """Wait for calls, or for rows in flight. Returns the calls, which may be none, or None to end."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._calls or self._is_closing or not self._engine.is_idle)
            calls, self._calls = self._calls, []
            return None if self._is_closing else calls

    def _act(self, calls: list[Call]) -> None:
        for action, answer in calls:
            try:
                action()
            except NexrlError as error:
                self._loop.call_soon_threadsafe(_set_exception, answer, error)

    def _submit(self, request: GenerationRequest, answer: asyncio.Future[GenerationResult]) -> None:
        self._engine.submit(request)
        self._generating[request.request_id] = answer

    def _abandon(self, request_id: str, answer: asyncio.Future[GenerationResult]) -> None:
        # Not by id alone: this request may have been refused because another one of that id is in flight.
        if self._generating.get(request_id) is answer:
            self._engine.cancel(request_id)
            del self._generating[request_id]

    def _deliver(self, result: GenerationResult) -> None:
        self._answer(self._generating.pop(result.request_id), result)

    def _answer(self, answer: asyncio.Future[Any], value: object) -> None:
        self._loop.call_soon_threadsafe(_set_result, answer, value)


def _set_result(answer: asyncio.Future[Any], value: object) -> None:
    if not answer.done():  # it is done if its caller was cancelled
        answer.set_result(value)


def _set_exception(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
