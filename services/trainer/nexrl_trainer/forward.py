"""The forward pass: log-probabilities of a batch under one model. Training and the reference model share it.

Suffixes: _N tokens of a batch, _P predicted tokens of a micro-batch, _V vocabulary, _B _T rows and input positions.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.train_batch import TrainBatch
from nexrl.truncation import truncated_logits
from nexrl_trainer.head import Head, ResultT, check_head, run_to_head
from nexrl_trainer.micro_batch import SHARED_ROW_TOKENS, MicroBatch, split_batch
from nexrl_trainer.packing import MIN_PROBE_COLUMNS, PackingError, in_float32, packing_error, probe_batch
from nexrl_trainer.ranks import ONE_RANK, Ranks
from nexrl_trainer.token_scores import TokenScores, token_scores

log = logging.getLogger(__name__)

_HEAD_PROBE_TOKENS = 16


@dataclass(frozen=True)
class ForwardSettings:
    """What a forward pass needs to know besides the model.

    `temperature`, `top_p` and `top_k` must be those that the tokens were sampled with (see nexrl.truncation).
    `max_tokens_per_micro_batch` bounds memory; the result does not depend on it. A longer sequence is computed alone.
    `max_sequence_tokens`: longest sequence that a batch of the run may have, 0 if unknown.
    """

    temperature: float = 1.0
    max_tokens_per_micro_batch: int = 8192
    max_sequence_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0


class ForwardPass:
    """Computes log-probabilities under `model`, after checking at construction that it can for this model.

    `shares_prompts` is the result of another ForwardPass on a model of the same architecture, whose checks are then not
    repeated. `warnings` says what works, but slower than it could. Of several `ranks`, each computes its share of a
    batch, and rank 0 makes the checks for all. The model must be whole at construction, and may be sharded afterwards.
    Raises FailedPreconditionError for a model whose log-probabilities would be wrong, InvalidArgumentError if sequences
    may be longer than its context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ForwardSettings,
        *,
        shares_prompts: bool | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        if settings.temperature <= 0:
            raise InvalidArgumentError(f"temperature is {settings.temperature}; must be positive")
        self.model = model
        self.settings = settings
        self.ranks = ranks
        self.warnings: list[str] = []
        # Dropout would train another policy than the one that sampled.
        model.eval()
        self._check_sequence_length("inference.maxTokensPerRow", settings.max_sequence_tokens)
        row_tokens = max(min(SHARED_ROW_TOKENS, settings.max_tokens_per_micro_batch), MIN_PROBE_COLUMNS)
        if shares_prompts is None:
            # A comparison of floats may end differently on another rank, which would split batches differently.
            own = ranks.rank == 0 and self._check_model(row_tokens)
            shares_prompts = ranks.broadcast(bytes([own])) == bytes([True])
        self._shared_row_tokens = row_tokens if shares_prompts else 0

    @property
    def shares_prompts(self) -> bool:
        """True if samples of one task share the columns of their prompt."""
        return self._shared_row_tokens > 0

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probabilities of the trained tokens, 0 elsewhere. Shape [N]."""
        logprobs_N = np.zeros(len(batch.token_ids_N), np.float32)
        # Not inference_mode: FSDP uses the memory of gathered weights again in passes that have gradients.
        with torch.no_grad():
            for micro in self.micro_batches(batch):
                token_ids_P = self.tensor(batch.token_ids_N[micro.tokens_P])
                logprobs_N[micro.tokens_P] = self.scores(micro, token_ids_P).logprobs_P.cpu()
        of_all_ranks_N: NDArray[np.float32] = self.ranks.sum(self.tensor(logprobs_N)).cpu().numpy()
        return of_all_ranks_N

    def micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        """Return this rank's share of `batch`. All ranks get the same number of micro-batches, some of them empty.

        Raises what `check_batch` raises.
        """
        self.check_batch(batch)
        limit, ranks = self.settings.max_tokens_per_micro_batch, self.ranks
        return split_batch(batch, limit, self._shared_row_tokens, rank=ranks.rank, ranks=ranks.size)

    def check_batch(self, batch: TrainBatch) -> None:
        """Check that the model can compute the batch.

        Raises FailedPreconditionError if the result would depend on the split, InvalidArgumentError for a token that
        the model does not have, and for a sequence that is longer than the model's context.
        """
        vocabulary_size = self.model.config.get_text_config().vocab_size
        for token_id in (batch.token_ids_N.min(initial=0), batch.token_ids_N.max(initial=0)):
            if not 0 <= token_id < vocabulary_size:
                raise InvalidArgumentError(f"token_ids: {token_id}; must be from 0 to {vocabulary_size - 1}")
        self._check_sequence_length("train batch", int(max(batch.lengths_B, default=0)))

    def scores(self, micro: MicroBatch, token_ids_P: Tensor, *, entropy_has_gradient: bool = True) -> TokenScores:
        """Return log-probability and entropy of the trained tokens, under the truncated distribution."""

        def finish(head: Head) -> TokenScores:
            return token_scores(head, token_ids_P, self._distribution, entropy_has_gradient=entropy_has_gradient)

        return self.run(micro, finish)

    def distributions(self, micro: MicroBatch) -> Tensor:
        """Return the log-probabilities [P, V], float32, at the positions that predict a trained token.

        They are those before truncation. Holds the logits of all tokens: for checks.
        """
        return self.run(micro, lambda head: (head.logits() / self.settings.temperature).log_softmax(-1))

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Copy `array` to the model's device."""
        return torch.from_numpy(array).to(self.model.device)

    def run(self, micro: MicroBatch, finish: Callable[[Head], ResultT]) -> ResultT:
        """Run the model up to its head, at the positions that predict a trained token; return `finish` of the head."""
        inputs = {"input_ids": self.tensor(micro.input_ids_BT)}
        if micro.is_shared:
            inputs["position_ids"] = self.tensor(micro.position_ids_BT)
            inputs["attention_mask"] = self._attention_mask(micro)
        # Pass no positions: transformers would take padding for packed sequences and build a dense mask.
        return run_to_head(self.model, self.tensor(micro.positions_P), finish, **inputs)

    def _distribution(self, logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
        settings = self.settings
        if settings.temperature != 1:
            logits_RV = logits_RV / settings.temperature
        logits_RV = truncated_logits(logits_RV, token_ids_R, top_p=settings.top_p, top_k=settings.top_k)
        return functional.log_softmax(logits_RV, dim=-1)

    def _check_model(self, row_tokens: int) -> bool:
        """Check the head of the model. Returns whether sequences can share a row."""
        config = self.model.config.get_text_config()
        probe = probe_batch(row_tokens, _max_positions(config) or row_tokens, config.vocab_size)
        first_ids_T = probe.token_ids_N[: min(probe.lengths_B[0] - 1, _HEAD_PROBE_TOKENS)]
        check_head(self.model, self.tensor(first_ids_T[None]))
        return self._can_share(probe, row_tokens)

    def _can_share(self, probe: TrainBatch, row_tokens: int) -> bool:
        """True if sequences in one row have the log-probabilities that they have alone, as compared on this model."""
        (packed,) = split_batch(probe, row_tokens, row_tokens)
        (plain,) = split_batch(probe, len(probe.lengths_B) * row_tokens, shared_row_tokens=0)
        try:
            with in_float32(self.model), torch.inference_mode():
                error = packing_error(self.distributions, packed, plain)
        except torch.OutOfMemoryError:
            raise
        except Exception as refusal:  # a model that takes no mask of its caller's may raise anything
            log.info("probe of a shared row", exc_info=refusal)
            error = PackingError(float("inf"), 0.0, is_measurable=True)
        if error.is_rounding:
            return True
        why = f"it would compute other log-probabilities (difference {error.difference:.2g})"
        if not error.is_measurable:
            why = "its attention has too little effect to check that it would compute the same log-probabilities"
        self.warnings.append(
            f"samples of one task do not share their prompt in a row of {self.model.config.model_type}: {why}. "
            "Training is right, and slower"
        )
        return False

    def _attention_mask(self, micro: MicroBatch) -> Tensor:
        """Return what to add to the attention scores, [B, 1, T, T]: 0 where column i may look at column j."""
        segments_BT = self.tensor(micro.segments_BT)
        is_own_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
        is_seen_BTT = (is_own_BTT | (segments_BT[:, None, :] == 0)).tril()
        if self.model.config.get_text_config()._attn_implementation == "sdpa":
            return is_seen_BTT[:, None]
        # Eager attention adds the mask to the scores, where a boolean one would hide nothing.
        hidden = torch.finfo(self.model.dtype).min
        return torch.zeros_like(is_seen_BTT, dtype=self.model.dtype).masked_fill(~is_seen_BTT, hidden)[:, None]

    def _check_sequence_length(self, source: str, tokens: int) -> None:
        config = self.model.config.get_text_config()
        for kind, limit in _length_dependent_rope(config.to_dict()):
            if tokens > limit:
                raise FailedPreconditionError(
                    f"{source}: sequences of {tokens} tokens are not supported with {config.model_type}: "
                    f"above {limit} tokens its RoPE ({kind}) depends on the longest sequence of the micro-batch. Set "
                    f"inference.maxTokensPerRow to {limit} or less"
                )
        positions = _max_positions(config)
        if positions and tokens > positions and not _is_rope_scaled(config.to_dict()):
            raise InvalidArgumentError(
                f"{source}: sequences of {tokens} tokens are longer than the context of {config.model_type}, "
                f"{positions} tokens. Set inference.maxTokensPerRow to {positions} or less"
            )


def _max_positions(config: PreTrainedConfig) -> int | None:
    for name in ("max_position_embeddings", "max_seq_len"):
        if positions := getattr(config, name, None):
            return int(positions)
    return None


def _length_dependent_rope(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Type and limit (tokens) of each RoPE whose angles change for all tokens once a row is longer than the limit."""
    for rope in _ropes(config):
        match rope.get("rope_type"):
            case "dynamic":
                yield "dynamic", config["max_position_embeddings"]
            case "longrope":
                yield "longrope", rope["original_max_position_embeddings"]


def _is_rope_scaled(config: Mapping[str, Any]) -> bool:
    """True if a RoPE reaches beyond `max_position_embeddings`, as YaRN does. Each type has its own rule how far."""
    return any(rope.get("rope_type", "default") != "default" for rope in _ropes(config))


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    parameters = config.get("rope_parameters") or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))
