"""On-policy distillation: the policy's own samples, judged token by token by a frozen teacher.

Suffix: _T tokens of one sequence.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nexrl.algorithm import ForwardPass, PreparedBatch
from nexrl.errors import FailedPreconditionError, naming
from nexrl.models import build_config
from nexrl.spec.model import ModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.train_batch import TrainSequence
from nexrl_trainer.losses import MAX_LOG_RATIO


def distilled(prepared: PreparedBatch, teacher: ForwardPass, coefficient: float) -> PreparedBatch:
    """Add coefficient * (log p_teacher - log p_rollout) to the advantage of each trained token.

    The expectation of that term over the tokens of the rollout is -KL(rollout || teacher), the reverse KL. Sources:
    K. Lu, "On-Policy Distillation" (Thinking Machines, 2025), alone; slime (`opd_kl_coef`), added to the advantage of
    the rewards. The log ratio is clamped to +-MAX_LOG_RATIO, as in the losses. Metric: `teacher_kl`, the mean of
    log p_rollout - log p_teacher over all trained tokens.
    """
    sequences = prepared.sequences
    teacher_logprobs = teacher(sequences)
    log_ratios = [_log_ratio(*pair) for pair in zip(sequences, teacher_logprobs, strict=True)]
    tokens = sum(int(np.sum(sequence.loss_mask)) for sequence in sequences)
    kl = -sum(float(log_ratio_T.sum()) for log_ratio_T in log_ratios) / max(tokens, 1)
    added = [
        replace(sequence, advantage=sequence.advantage + coefficient * log_ratio_T)
        for sequence, log_ratio_T in zip(sequences, log_ratios, strict=True)
    ]
    return PreparedBatch(added, {**prepared.metrics, "teacher_kl": kl})


def check_teacher(teacher: ModelSpec, policy: ModelSpec) -> None:
    """Check that the teacher reads the policy's token ids as the policy does. Reads no weight.

    Raises InvalidArgumentError for a path without a model, FailedPreconditionError if it has another tokenizer, or
    fewer token ids than the policy may sample.
    """
    with naming("algorithm.teacher"):
        own, other = build_tokenizer(teacher).get_vocab(), build_tokenizer(policy).get_vocab()
        ids, needed_ids = (build_config(each).get_text_config().vocab_size for each in (teacher, policy))
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differing:
        raise FailedPreconditionError(
            f"algorithm.teacher.path: {teacher.path}: its tokenizer is not that of the model: {len(differing)} tokens "
            f"differ, as {differing[0]!r}; use a teacher of the same family, which has the same tokenizer"
        )
    if ids < needed_ids:
        raise FailedPreconditionError(
            f"algorithm.teacher.path: {teacher.path}: it has {ids} token ids, and the model has {needed_ids}; use a "
            "teacher with as many"
        )


def _log_ratio(sequence: TrainSequence, teacher_logprobs_T: NDArray[np.float32]) -> NDArray[np.float32]:
    """log p_teacher - log p_rollout of the trained tokens, 0 elsewhere. Shape [T]."""
    log_ratio_T = teacher_logprobs_T - np.asarray(sequence.rollout_logprobs, np.float32)
    return np.where(sequence.loss_mask, log_ratio_T.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO), np.float32(0))
