"""Log-probability and entropy of each trained token, without the logits of all tokens in memory at once.

Own code and not Liger's kernels: those are Triton, so they need a GPU, and know neither entropy nor top-p.

Suffixes: _P trained tokens, _C rows of a chunk, _R any rows, _H hidden size, _V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from nexrl_trainer.head import Head, linear
from nexrl_trainer.losses import token_entropy

CHUNK_BYTES = 128 * 2**20
"""Logits of one product of hidden states and head. Memory grows with it; too few rows make the product slow."""

BLOCK_BYTES = 4 * 2**20
"""Logits that are normalised together: about five temporaries of that size fit into the caches of a core."""


class TokenScores(NamedTuple):
    """Log-probability and entropy (nats) of each token. Both float32, shape [P]."""

    logprobs_P: Tensor
    entropy_P: Tensor


Score: TypeAlias = Callable[[Tensor, Tensor], TokenScores]
"""Computes the scores of tokens [R] from their logits [R, V], row by row."""


def token_scores(head: Head, token_ids_P: Tensor, distribution: Callable[[Tensor, Tensor], Tensor]) -> TokenScores:
    """Return the scores of the tokens. `distribution` makes log-probabilities [R, V] of logits [R, V] and tokens [R].

    Logits larger than a chunk are computed chunk by chunk, and again in the backward pass: at no time is more in memory
    than one chunk and a few blocks. Gradients are added up in float32. Logits of one block take the plain way, which
    has the fewest operations. So does a head that is not one linear layer, such as one with an adapter.
    """

    def score(logits_RV: Tensor, token_ids_R: Tensor) -> TokenScores:
        logprobs_RV = distribution(logits_RV, token_ids_R)
        return TokenScores(chosen_logprobs(logprobs_RV, token_ids_R), token_entropy(logprobs_RV))

    module = head.module
    if not isinstance(module, nn.Linear) or len(token_ids_P) <= _rows(BLOCK_BYTES, module.weight):
        return score(head.logits(), token_ids_P)

    def score_after_head(logits_RV: Tensor, token_ids_R: Tensor) -> TokenScores:
        return score(head.after(logits_RV), token_ids_R)

    logprobs_P, entropy_P = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
        head.hidden_PH, module.weight, module.bias, token_ids_P, score_after_head
    )
    return TokenScores(logprobs_P, entropy_P)


def chosen_logprobs(logprobs_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """Return the entry of each row that belongs to its token. Shape [R]."""
    return logprobs_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1)


class _ChunkedScores(torch.autograd.Function):
    """Scores of tokens from hidden states. Keeps logits for the backward pass only if they are all in one chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_ids_P: Tensor, score: Score
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, token_ids_P)
        ctx.score = score
        ctx.kept_logits_CV = None
        ctx.set_materialize_grads(False)
        logprobs_P, entropy_P = torch.empty(2, len(hidden_PH), device=hidden_PH.device).unbind()
        weight_VH = weight_VH.float()
        for chunk in _cut(len(hidden_PH), _rows(CHUNK_BYTES, weight_VH)):
            logits_CV = linear(hidden_PH[chunk], weight_VH, bias_V)
            for block, rows in _blocks(chunk, weight_VH):
                logprobs_P[rows], entropy_P[rows] = score(logits_CV[block], token_ids_P[rows])
            if len(logits_CV) == len(hidden_PH):
                ctx.kept_logits_CV = logits_CV
            del logits_CV  # or it would live until the next chunk is there
        return logprobs_P, entropy_P

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients_P: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, bias_V, token_ids_P = ctx.saved_tensors
        weight = weight_VH.float()
        of_hidden_PH = torch.empty_like(hidden_PH)
        of_weight_VH = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for chunk in _cut(len(hidden_PH), _rows(CHUNK_BYTES, weight)):
            logits_CV, ctx.kept_logits_CV = ctx.kept_logits_CV, None
            if logits_CV is None:
                logits_CV = linear(hidden_PH[chunk], weight, bias_V)
            for block, rows in _blocks(chunk, weight):
                given = [None if gradient_P is None else gradient_P[rows] for gradient_P in gradients_P]
                # In place: the logits of these rows are not needed again.
                logits_CV[block] = _logits_gradient(ctx.score, logits_CV[block], token_ids_P[rows], given)
            of_hidden_PH[chunk] = logits_CV @ weight
            if of_weight_VH is not None:
                of_weight_VH.addmm_(logits_CV.T, hidden_PH[chunk].float())
            if of_bias_V is not None:
                of_bias_V += logits_CV.sum(0)
            del logits_CV
        return of_hidden_PH, _as(weight_VH, of_weight_VH), _as(bias_V, of_bias_V), None, None


def _logits_gradient(score: Score, logits_RV: Tensor, token_ids_R: Tensor, given: list[Tensor | None]) -> Tensor:
    with torch.enable_grad():
        logits_RV = logits_RV.detach().requires_grad_()
        scores = score(logits_RV, token_ids_R)
    wanted = [pair for pair in zip(scores, given, strict=True) if pair[1] is not None]
    found, gradients = zip(*wanted, strict=True)
    (of_logits_RV,) = torch.autograd.grad(found, logits_RV, gradients)
    return of_logits_RV


def _blocks(chunk: slice, weight_VH: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield each block's rows of the chunk and its rows of all tokens."""
    for block in _cut(chunk.stop - chunk.start, _rows(BLOCK_BYTES, weight_VH)):
        yield block, slice(chunk.start + block.start, chunk.start + block.stop)


def _cut(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _rows(limit_bytes: int, weight_VH: Tensor) -> int:
    """Return how many rows of float32 logits fit into so many bytes, at least one."""
    return max(1, limit_bytes // (4 * len(weight_VH)))


def _as(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or parameter is None else gradient.to(parameter.dtype)
