"""Tracks which requests are in flight and which rows they hold. It has no tensors.

Invariants: rows 0..len(rows)-1 are in use and no others; a request holds all its `n` rows from admission on (so it
never waits half-admitted); requests are admitted in the order of submission.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nexrl.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from nexrl_inference.requests import Completion, FinishReason, GenerationRequest, GenerationResult


@dataclass(frozen=True)
class Limits:
    """What the engine holds at most.

    `max_rows` samples decode together, each of `max_tokens_per_row` tokens (prompt + completion).
    `max_prefill_tokens` bounds one prefill forward, and so the pause of rows that are decoding; a longer prompt is
    prefilled alone. `max_waiting_requests` bounds the queue.
    """

    max_rows: int = 256
    max_tokens_per_row: int = 1024
    max_prefill_tokens: int = 4096
    max_waiting_requests: int = 4096

    def __post_init__(self) -> None:
        wrong = {name: limit for name, limit in vars(self).items() if limit < 1}
        if wrong:
            raise InvalidArgumentError(f"limits must be at least 1: {wrong}")


@dataclass
class Row:
    """One sample in flight."""

    request: GenerationRequest
    sample: int
    seed: int
    max_new_tokens: int  # what the row length leaves of the request's
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are stored between two steps: all but the one sampled last."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def draws(self) -> int:
        """Random numbers of its seed that are used up."""
        return self.request.drawn_tokens + len(self.token_ids)

    def append(self, token_id: int, logprob: float, policy_version: int) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(policy_version)

    def completion(self, finish_reason: FinishReason) -> Completion:
        return Completion(
            tuple(self.token_ids), tuple(self.logprobs), tuple(self.policy_versions), finish_reason, self.seed
        )


@dataclass(frozen=True)
class Retirement:
    """The results that are now complete, and the row moves (source -> target) that keep the rows compact: state that is
    kept by row must move with them."""

    results: list[GenerationResult]
    sources: list[int]
    targets: list[int]


class Scheduler:
    """The queue and the rows. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[GenerationRequest] = deque()
        self._completions: dict[str, list[Completion | None]] = {}
        self.rows: list[Row] = []

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises InvalidArgumentError when it can never fit, AlreadyExistsError when its id is in flight, and
        ResourceExhaustedError when the queue is full.
        """
        self._check_fits(request)
        if request.request_id in self._completions:
            raise AlreadyExistsError(f"request {request.request_id!r} is in flight")
        if len(self._waiting) >= self._limits.max_waiting_requests:
            raise ResourceExhaustedError(f"{len(self._waiting)} requests are waiting, the limit")
        self._waiting.append(request)
        self._completions[request.request_id] = [None] * request.n

    def admit(self) -> list[GenerationRequest]:
        """Take from the queue, in order, what fits the free rows and one prefill. The caller then calls `occupy`."""
        admitted: list[GenerationRequest] = []
        free_rows = self._limits.max_rows - len(self.rows)
        longest = 0
        while self._waiting and self._waiting[0].n <= free_rows:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if admitted and longest * (len(admitted) + 1) > self._limits.max_prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
            free_rows -= admitted[-1].n
        return admitted

    def occupy(self, request: GenerationRequest, seeds: Sequence[int]) -> None:
        """Assign the next `n` rows to an admitted request; `seeds` has one per sample."""
        room = min(request.max_new_tokens, self._limits.max_tokens_per_row - len(request.prompt_ids))
        self.rows.extend(Row(request, sample, seed, room) for sample, seed in enumerate(seeds))

    def retire(self, finished: dict[int, FinishReason]) -> Retirement:
        """Remove the finished rows (index -> reason); the last rows move into the holes."""
        results = [result for row, reason in finished.items() if (result := self._complete(self.rows[row], reason))]
        kept = len(self.rows) - len(finished)
        targets = [row for row in finished if row < kept]
        sources = [row for row in range(kept, len(self.rows)) if row not in finished]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[kept:]
        return Retirement(results, sources, targets)

    def cancel(self, request_id: str) -> Retirement:
        """Abort a request, waiting or in flight; raises NotFoundError for an unknown one."""
        if request_id not in self._completions:
            raise NotFoundError(f"request {request_id!r} is not in flight")
        waiting = next((request for request in self._waiting if request.request_id == request_id), None)
        if waiting is None:
            rows = [index for index, row in enumerate(self.rows) if row.request.request_id == request_id]
            return self.retire(dict.fromkeys(rows, "abort"))
        self._waiting.remove(waiting)
        del self._completions[request_id]
        aborted = Completion((), (), (), "abort")
        return Retirement([GenerationResult(request_id, waiting.prompt_ids, (aborted,) * waiting.n)], [], [])

    def _complete(self, row: Row, reason: FinishReason) -> GenerationResult | None:
        """Store the row's completion. Returns the request's result if that was its last."""
        request = row.request
        completions = self._completions[request.request_id]
        completions[row.sample] = row.completion(reason)
        done = tuple(completion for completion in completions if completion is not None)
        if len(done) < request.n:
            return None
        del self._completions[request.request_id]
        return GenerationResult(request.request_id, request.prompt_ids, done)

    def _check_fits(self, request: GenerationRequest) -> None:
        limits = self._limits
        if request.n > limits.max_rows:
            raise InvalidArgumentError(f"n: {request.n}; the engine has {limits.max_rows} rows")
        if len(request.prompt_ids) >= limits.max_tokens_per_row:
            raise InvalidArgumentError(
                f"prompt_token_ids: {len(request.prompt_ids)} tokens; with one generated token it must fit "
                f"max_tokens_per_row = {limits.max_tokens_per_row}"
            )
