"""The built-in inference engine: continuous batching; weights change between two decode steps."""

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.stop_strings import Decode, ends_with_stop
from nexrl_inference.builtin.model_runner import ModelRunner
from nexrl_inference.builtin.sampling import SamplingBatch, sample_tokens, uniforms
from nexrl_inference.builtin.scheduler import Limits, Retirement, Row, Scheduler
from nexrl_inference.requests import FinishReason, GenerationRequest, GenerationResult


class Engine:
    """Generates with one model and modifies it (see ModelRunner). Not thread-safe.

    `eos_token_ids` end every completion. `decode` finds stop strings; without it, requests with stop strings are
    refused. `seed` decides the seeds of requests that have none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        decode: Decode | None = None,
        limits: Limits | None = None,
        seed: int = 0,
    ) -> None:
        self._limits = limits or Limits()
        self._runner = ModelRunner(model, self._limits)
        self._scheduler = Scheduler(self._limits)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode
        self._seeds = random.Random(seed)
        self._policy_version: int | None = None

    @property
    def policy_version(self) -> int | None:
        """The version of the live weights; None before the first `load_weights`."""
        return self._policy_version

    @property
    def is_idle(self) -> bool:
        return self.active_rows == 0 and self.waiting_requests == 0

    @property
    def active_rows(self) -> int:
        return len(self._scheduler.rows)

    @property
    def waiting_requests(self) -> int:
        return self._scheduler.waiting_requests

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; the `step` that completes it returns its result.

        Raises FailedPreconditionError before weights are loaded, InvalidArgumentError if the request can never fit,
        AlreadyExistsError if its id is in flight, ResourceExhaustedError if the queue is full.
        """
        if self._policy_version is None:
            raise FailedPreconditionError("no weights are loaded yet: there is no policy to generate with")
        outside = [token for token in request.prompt_ids if not 0 <= token < self._runner.vocabulary]
        if outside:
            raise InvalidArgumentError(
                f"prompt_token_ids: token {outside[0]} is outside the vocabulary of {self._runner.vocabulary}"
            )
        if request.stop and self._decode is None:
            raise InvalidArgumentError("stop: this engine has no tokenizer, so it cannot find texts")
        self._scheduler.submit(request)

    def cancel(self, request_id: str) -> GenerationResult:
        """Cancel a request and return its tokens so far; unfinished completions have finish reason "abort".

        Raises NotFoundError if the request is neither waiting nor in flight.
        """
        (result,) = self._settle(self._scheduler.cancel(request_id))
        return result

    def step(self) -> list[GenerationResult]:
        """Admit and prefill what fits, then decode one token of every row. Returns the requests that are complete."""
        results: list[GenerationResult] = []
        admitted = self._scheduler.admit()
        if admitted:
            results += self._start(admitted)
        if self._scheduler.rows:
            results += self._advance()
        return results

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy `state` (Hugging Face state_dict names; a tied tensor under any of its names) over the live weights.

        Rows in flight continue with the new weights. Their keys and values are computed again, so that the next tokens
        have the log-probabilities of a full forward pass of the new weights. Raises InvalidArgumentError, with the live
        weights untouched, when names are missing or unexpected or shapes differ.
        """
        self._runner.load_weights(state)
        self._policy_version = version
        self._recompute_slots()

    def _start(self, admitted: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Prefill each prompt once, expand it into the rows of its samples, and draw their first tokens."""
        first_row = self.active_rows
        for request in admitted:
            self._scheduler.occupy(request, request.seeds or [self._seeds.getrandbits(63) for _ in range(request.n)])
        prompt_of_row = [prompt for prompt, request in enumerate(admitted) for _ in range(request.n)]
        logits_PV = self._runner.prefill([request.prompt_ids for request in admitted], first_row, prompt_of_row)
        return self._append_tokens(first_row, logits_PV[prompt_of_row])

    def _advance(self) -> list[GenerationResult]:
        rows = self._scheduler.rows
        logits_BV = self._runner.decode([row.token_ids[-1] for row in rows], [row.cached_tokens for row in rows])
        return self._append_tokens(0, logits_BV)

    @torch.inference_mode()
    def _append_tokens(self, first_row: int, logits_BV: Tensor) -> list[GenerationResult]:
        """Draw the next token of rows `first_row`..., one per row of logits, and retire the finished rows."""
        assert self._policy_version is not None, "submit refuses until weights are loaded"
        rows = self._scheduler.rows[first_row:]
        tokens_B, logprobs_B = sample_tokens(logits_BV, _sampling_batch(rows, logits_BV.device))
        finished: dict[int, FinishReason] = {}
        drawn = zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        for index, (row, token, logprob) in enumerate(drawn, start=first_row):
            row.append(token, logprob, self._policy_version)
            if self._is_stopped(row):
                finished[index] = "stop"
            elif len(row.token_ids) == row.max_new_tokens:
                finished[index] = "length"
        return self._settle(self._scheduler.retire(finished))

    def _is_stopped(self, row: Row) -> bool:
        """Return True if the newest token ends the completion."""
        token, request = row.token_ids[-1], row.request
        if token in self._eos_token_ids or token in request.stop_token_ids:
            return True
        if not request.stop or self._decode is None:
            return False
        drawn_before = request.prompt_ids[len(request.prompt_ids) - request.drawn_tokens :]
        return ends_with_stop([*drawn_before, *row.token_ids], request.stop, self._decode)

    def _settle(self, retirement: Retirement) -> list[GenerationResult]:
        """Move the cache slots of the rows that moved. Returns the complete results."""
        if retirement.targets:
            longest = max(self._scheduler.rows[target].cached_tokens for target in retirement.targets)
            self._runner.move_rows(retirement.sources, retirement.targets, longest)
        return retirement.results

    def _recompute_slots(self) -> None:
        """Prefill every row again with all but its last token, as many rows at a time as one prefill may hold."""
        sequences = [[*row.request.prompt_ids, *row.token_ids[:-1]] for row in self._scheduler.rows]
        if not sequences:
            return
        chunk = max(1, self._limits.max_prefill_tokens // max(map(len, sequences)))
        for first_row in range(0, len(sequences), chunk):
            part = sequences[first_row : first_row + chunk]
            self._runner.prefill(part, first_row, range(len(part)))


def _sampling_batch(rows: Sequence[Row], device: torch.device) -> SamplingBatch:
    requests = [row.request for row in rows]
    return SamplingBatch(
        temperature_B=torch.tensor([request.temperature for request in requests], device=device),
        top_p_B=torch.tensor([request.top_p for request in requests], device=device),
        top_k_B=torch.tensor([request.top_k for request in requests], device=device),
        uniforms_B=torch.from_numpy(uniforms([row.seed for row in rows], [row.draws for row in rows])).to(device),
    )
