"""Top-k and top-p truncation: which tokens a policy may draw. Engine and trainer share this definition.

A token is drawn from the model's distribution at the sampling temperature, restricted to the `top_k` most likely tokens
and then to the smallest set of these that has mass `top_p`, renormalised. The recorded log-probability is the one under
this truncated distribution. The trainer must truncate its own logits in the same way, otherwise the ratio of the two
probabilities is not 1 for equal weights. Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

CHUNK_ROWS = 256
"""Rows that are sorted together: sorting takes several times the memory of the logits."""


def kept_tokens(logits_RV: Tensor, top_p_R: Tensor, top_k_R: Tensor) -> Tensor:
    """Return True for the tokens that remain. bool [R, V]

    `top_p_R` in (0, 1], 1 keeps every token; `top_k_R` 0 keeps every token. Of equally likely tokens at the border,
    those with the lower ids remain.
    """
    sorted_RV, order_RV = logits_RV.sort(descending=True, stable=True)
    vocabulary = logits_RV.shape[1]
    top_k_R = torch.where(top_k_R == 0, vocabulary, top_k_R)
    ranks_V = torch.arange(vocabulary, device=logits_RV.device)
    is_kept_RV = ranks_V < top_k_R[:, None]
    probabilities_RV = sorted_RV.masked_fill(~is_kept_RV, -torch.inf).double().softmax(-1)
    mass_before_RV = probabilities_RV.cumsum(-1) - probabilities_RV
    # top_p = 1 keeps everything: the sum of many tiny probabilities may round up to 1 before the last token.
    is_kept_RV &= (mass_before_RV < top_p_R[:, None]) | (top_p_R[:, None] == 1)
    return torch.empty_like(is_kept_RV).scatter_(1, order_RV, is_kept_RV)


def truncated_logits(logits_PV: Tensor, token_ids_P: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """Return the logits with every removed token at the lowest float, so that its probability is 0.

    `token_ids_P`, the tokens that were drawn, always remain: with newer weights a drawn token may lie outside the set,
    and its log-probability must stay finite. Gradients flow through the tokens that remain. Without truncation
    (`top_p` 1, `top_k` 0) this returns `logits_PV` itself.
    """
    if top_p == 1 and top_k == 0:
        return logits_PV
    with torch.no_grad():
        parts = []
        for logits_RV in logits_PV.split(CHUNK_ROWS):
            rows = len(logits_RV)
            top_p_R = torch.full((rows,), top_p, device=logits_RV.device)
            top_k_R = torch.full((rows,), top_k, device=logits_RV.device)
            parts.append(kept_tokens(logits_RV, top_p_R, top_k_R))
        is_kept_PV = torch.cat(parts).scatter_(1, token_ids_P[:, None], True)
    # Not -inf: the entropy multiplies log-probabilities with probabilities, and 0 times infinity is not a number.
    return logits_PV.masked_fill(~is_kept_PV, torch.finfo(logits_PV.dtype).min)
