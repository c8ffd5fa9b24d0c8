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


Distribution: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Computes log-probabilities [R, V] from logits [R, V] and the tokens [R] that were drawn, row by row."""


def token_scores(
    head: Head, token_ids_P: Tensor, distribution: Distribution, *, entropy_has_gradient: bool = True
) -> TokenScores:
    """Return the scores of the tokens.

    Logits larger than a chunk are computed chunk by chunk, and again in the backward pass: at no time are more in
    memory than one chunk and a few blocks. Gradients are added up in float32, so the weight of the head has a float32
    gradient meanwhile. A 16-bit weight also has a float32 copy: two of its size in float32 in all. Logits of one block
    take the plain way, which has the fewest operations. So does a head that is not one linear layer, such as one with
    an adapter.
    """
    module = head.module
    if not isinstance(module, nn.Linear) or len(token_ids_P) <= _rows(BLOCK_BYTES, module.weight):
        logprobs_PV = distribution(head.logits(), token_ids_P)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_has_gradient):
            entropy_P = token_entropy(logprobs_PV)
        return TokenScores(chosen_logprobs(logprobs_PV, token_ids_P), entropy_P)

    def after_head(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
        return distribution(head.after(logits_RV), token_ids_R)

    logprobs_P, entropy_P = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
        head.hidden_PH, module.weight, module.bias, token_ids_P, after_head
    )
    return TokenScores(logprobs_P, entropy_P)


def chosen_logprobs(logprobs_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """Return the entry of each row that belongs to its token. Shape [R]."""
    return logprobs_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1)


class _ChunkedScores(torch.autograd.Function):
    """Scores of tokens from hidden states. Keeps logits for the backward pass only if they are all in one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_ids_P: Tensor,
        distribution: Distribution,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, token_ids_P)
        ctx.distribution = distribution
        ctx.kept_logits_CV = None
        ctx.set_materialize_grads(False)
        logprobs_P, entropy_P = torch.empty(2, len(hidden_PH), device=hidden_PH.device).unbind()
        weight_VH = weight_VH.float()
        for chunk in _cut(len(hidden_PH), _rows(CHUNK_BYTES, weight_VH)):
            logits_CV = linear(hidden_PH[chunk], weight_VH, bias_V)
            for block, rows in _blocks(chunk, weight_VH):
                logprobs_RV = distribution(logits_CV[block], token_ids_P[rows])
                logprobs_P[rows] = chosen_logprobs(logprobs_RV, token_ids_P[rows])
                entropy_P[rows] = token_entropy(logprobs_RV)
                del logprobs_RV
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
                logits_CV[block] = _logits_gradient(ctx.distribution, logits_CV[block], token_ids_P[rows], *given)
            of_hidden_PH[chunk] = logits_CV @ weight
            if of_weight_VH is not None:
                of_weight_VH.addmm_(logits_CV.T, hidden_PH[chunk].float())
            if of_bias_V is not None:
                of_bias_V += logits_CV.sum(0)
            del logits_CV
        return of_hidden_PH, _as(weight_VH, of_weight_VH), _as(bias_V, of_bias_V), None, None


def _logits_gradient(
    distribution: Distribution,
    logits_RV: Tensor,
    token_ids_R: Tensor,
    of_logprobs_R: Tensor | None,
    of_entropy_R: Tensor | None,
) -> Tensor:
    outputs, gradients = [], []
    with torch.enable_grad():
        logits_RV = logits_RV.detach().requires_grad_()
        logprobs_RV = distribution(logits_RV, token_ids_R)
        if of_logprobs_R is not None:
            outputs.append(chosen_logprobs(logprobs_RV, token_ids_R))
            gradients.append(of_logprobs_R)
        if of_entropy_R is not None:
            outputs.append(token_entropy(logprobs_RV))
            gradients.append(of_entropy_R)
    (of_logits_RV,) = torch.autograd.grad(outputs, logits_RV, gradients)
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
