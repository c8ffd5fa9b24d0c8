"""Checks that a packing of sequences into rows leaves log-probabilities as they are. Any packing can use it.

Suffixes as in `micro_batch`: _P predicted tokens, _V vocabulary, _T columns.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer.micro_batch import MicroBatch

MIN_PROBE_COLUMNS = 3
"""One of context, and one of each of two sequences."""

_MAX_ROUNDINGS, _MAX_SHARE = 16, 2e-4
_MIN_WORST_ROUNDINGS = 10
_FIRST_TOKEN_ID, _TOKEN_IDS = 3, 1000
_PROBE_SEED = 0


@dataclass(frozen=True)
class PackingError:
    """Largest difference between the log-probabilities of a packed and a plain batch, and what rounding explains."""

    difference: float
    allowed: float
    is_measurable: bool
    """False if even a row whose sequences all see each other computes the same: the comparison then shows nothing."""

    @property
    def is_rounding(self) -> bool:
        """True if the packing computes what the plain batch computes. False for NaN, and if nothing can be measured."""
        return self.is_measurable and self.difference <= self.allowed


def packing_error(logprobs: Callable[[MicroBatch], Tensor], packed: MicroBatch, plain: MicroBatch) -> PackingError:
    """Compare two micro-batches that predict the same tokens. `logprobs` returns float32 log-probabilities [P, V].

    Rounding grows with the depth of a model, and a leak between sequences shrinks with the size of its weights. What
    is allowed is therefore a share of the worst error: that of a row whose sequences all see each other.

    The limit is at least 8 times away from all that was measured. As difference / allowed, on CPUs, and nearly equal
    for weights of float32 and of bfloat16:
    - right packings: at most 0.1 with SmolLM2-135M and with 12 and 24 random layers of Llama, Qwen3, OLMoE and
      GPT-NeoX; 0 with the tiny models of the 59 families in the tests that can share, four seeds each;
    - wrong packings: at least 8 with the tiny models of the 34 other families (lowest: LFM2); at least 11 with sound
      families whose positions are off by one (lowest: DeepSeek-V3; SmolLM2: 4000).

    If the worst error is below 10 times the limit of rounding, no packing passes. A model whose attention has no effect
    yet, as with output projections of zeros, would pass with any, and compute wrongly after its first steps. The lowest
    worst error of the families that can share is 112 times the limit (nanochat).

    A leak of less than 16 roundings is not found: recurrent layers have one if their weights are a third of the usual
    initial size. XGLM in bfloat16 does not share, though it could, if its position table is shorter than the row.
    """
    leaking = replace(packed, segments_BT=np.minimum(packed.segments_BT, 1))
    expected_PV, packed_PV, leaking_PV = (_in_token_order(logprobs(m), m) for m in (plain, packed, leaking))
    difference, worst = (float((found_PV - expected_PV).abs().max()) for found_PV in (packed_PV, leaking_PV))
    rounding = _MAX_ROUNDINGS * torch.finfo(torch.float32).eps * float(expected_PV.abs().max())
    is_measurable = worst >= _MIN_WORST_ROUNDINGS * rounding
    return PackingError(difference, max(rounding, _MAX_SHARE * worst), is_measurable)


def probe_batch(row_tokens: int, max_positions: int, vocabulary_size: int) -> TrainBatch:
    """Return random sequences of one context that fill a shared row of `row_tokens` columns.

    The first one is as long as a sequence in such a row can be, so that it is longer than any sliding window that a
    shared row must respect. The columns after it must not see it. No sequence has more than `max_positions` columns.
    """
    random = np.random.default_rng(_PROBE_SEED)
    last_id = min(vocabulary_size, _FIRST_TOKEN_ID + _TOKEN_IDS)  # higher ones may stand for images or sound
    longest = min(row_tokens - 1, max_positions)
    own = max(longest // 4, 1)
    context = longest - own
    context_ids = random.integers(_FIRST_TOKEN_ID, last_id, context)
    return TrainBatch.pack(
        [
            TrainSequence(
                token_ids=np.concatenate([context_ids, random.integers(_FIRST_TOKEN_ID, last_id, inputs + 1)]),
                loss_mask=np.arange(context + inputs + 1) >= context,
                rollout_logprobs=np.zeros(context + inputs + 1),
                advantage=0.0,
            )
            for inputs in (min(own, row_tokens - column) for column in range(context, row_tokens, own))
        ]
    )


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Hold the weights in float32 while the block runs: rounding to 16 bits would hide a small leak between sequences.

    Going back restores the same bits. Needs the memory of the float32 weights for that time.
    """
    dtypes = {name: tensor.dtype for name, tensor in _tensors(model) if tensor.dtype in (torch.bfloat16, torch.float16)}
    try:  # the cast is inside: it may run out of memory halfway, and leaves no mixed types then
        _cast(model, dict.fromkeys(dtypes, torch.float32))
        yield
    finally:
        _cast(model, dtypes)


def _cast(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    # By name, since a forward pass may replace a buffer by a larger one.
    for name, tensor in _tensors(model):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _in_token_order(logprobs_PV: Tensor, micro: MicroBatch) -> Tensor:
    return logprobs_PV[torch.from_numpy(np.argsort(micro.tokens_P)).to(logprobs_PV.device)].float()
