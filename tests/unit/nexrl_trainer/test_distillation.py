"""On-policy distillation: the teacher's term in the advantages, and which teachers are refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexrl.algorithm import LossInputs, PreparedBatch
from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.models import build_model
from nexrl.rpc.server import ServiceProcess
from nexrl.spec import ExperimentSpec
from nexrl.spec.model import ScratchModel, ScratchModelSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer import server
from nexrl_trainer.build import teacher_logprobs
from nexrl_trainer.distillation import distilled
from nexrl_trainer.losses import LOSSES
from tests.support.services import settings, small_experiment

NOBODY = "127.0.0.1:1"
"""An address where nothing listens."""
ALPHABET = "0123456789"  # of `small_experiment`

Logprobs = tuple[float, float]


def save_teacher(folder: Path, alphabet: str = ALPHABET, seed: int = 7, **shape: Any) -> Path:
    """Write a model with another shape and other weights than the experiment's, as a checkpoint of it would be."""
    scratch = ScratchModelSpec(alphabet=alphabet, **{"hidden_size": 24, "layers": 2, "heads": 2, **shape})
    source = ScratchModel(scratch=scratch)
    build_model(source, seed).save_pretrained(folder)
    build_tokenizer(source).save_pretrained(folder)
    return folder


def spec_with(teacher: Path, **sections: Any) -> ExperimentSpec:
    algorithm = {"teacher": {"path": str(teacher)}, **sections.pop("algorithm", {})}
    return small_experiment(algorithm=algorithm, **sections).spec


@given(
    sequences=st.lists(
        st.tuples(
            st.lists(st.tuples(st.booleans(), st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=6),
            st.one_of(st.floats(-3, 3), st.none()),
        ),
        max_size=4,
    ),
    coefficient=st.floats(0.01, 10),
)
def test_each_trained_token_gets_its_log_ratio_to_the_teacher_on_top_of_its_advantage(
    sequences: Sequence[tuple[Sequence[tuple[bool, float, float]], float | None]], coefficient: float
) -> None:
    given_sequences, teacher, expected, total, count = [], [], [], 0.0, 0
    for tokens, of_sequence in sequences:
        mask = [False, *(is_trained for is_trained, _, _ in tokens)]
        rollout: list[Any] = [0.0, *(np.float32(q) for _, q, _ in tokens)]
        own: list[Any] = [0.0, *(np.float32(nu) for _, _, nu in tokens)]
        advantage: Any = np.linspace(-1, 1, len(mask)) if of_sequence is None else of_sequence
        given_sequences.append(TrainSequence([4] * len(mask), mask, rollout, advantage))
        teacher.append(np.array(own, np.float32))
        expected_T = np.broadcast_to(np.asarray(advantage, np.float64), len(mask)).copy()
        for place, is_trained in enumerate(mask):
            if is_trained:
                log_ratio = min(max(float(own[place]) - float(rollout[place]), -20.0), 20.0)
                expected_T[place] += coefficient * log_ratio
                total, count = total - log_ratio, count + 1
        expected.append(expected_T)
    made = distilled(PreparedBatch(given_sequences, {"other": 1.0}), lambda _: teacher, coefficient)
    for sequence, expected_T in zip(made.sequences, expected, strict=True):
        np.testing.assert_allclose(sequence.advantage, expected_T, rtol=1e-6, atol=1e-5)
    assert made.metrics == {"other": 1.0, "teacher_kl": pytest.approx(total / max(count, 1), rel=1e-5, abs=1e-5)}


@given(
    logits=st.lists(st.floats(-2, 2), min_size=4, max_size=4),
    teacher_logits=st.lists(st.floats(-2, 2), min_size=4, max_size=4),
)
@pytest.mark.parametrize("loss", ["reinforce", "cispo", "dppo_tv", "ppo_clip"])
def test_on_policy_the_expected_gradient_is_that_of_the_reverse_kl_to_the_teacher(
    loss: str, logits: list[float], teacher_logits: list[float]
) -> None:
    """Each token of the vocabulary is a sample that weighs as much as its probability, so no sampling is needed."""
    logits_V = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.tensor(teacher_logits, dtype=torch.float64).log_softmax(-1)
    logprobs_V = logits_V.log_softmax(-1)
    rollout_V = logprobs_V.detach()
    kl = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    wanted_V = torch.autograd.grad(kl, logits_V, retain_graph=True)[0]

    def teacher(sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        return [np.array([0.0, teacher_V[token]], np.float32) for token in range(4)]

    samples = [TrainSequence([4, token], [False, True], [0.0, float(rollout_V[token])], 0.0) for token in range(4)]
    made = distilled(PreparedBatch(samples), teacher, 1.0)
    advantages_V = torch.tensor(TrainBatch.pack(made.sequences).advantages_N[1::2])
    inputs = LossInputs(logprobs_V, rollout_V, advantages_V.double(), rollout_V.exp(), torch.arange(4))
    limits = {"cispo": {"clip_high": 4.0}}.get(loss, {"clip_low": 0.2, "clip_high": 0.2})
    value = LOSSES[loss](inputs, **({} if loss == "reinforce" else limits)).loss
    torch.testing.assert_close(torch.autograd.grad(value, logits_V)[0], wanted_V, atol=1e-6, rtol=1e-5)


def test_the_teacher_computes_with_its_own_weights_at_the_temperature_of_the_rollout(tmp_path: Path) -> None:
    spec = spec_with(save_teacher(tmp_path), rollout={"maxNewTokens": 8, "temperature": 1.5})
    teacher = teacher_logprobs(spec)
    assert teacher is not None
    batch = TrainBatch.pack([TrainSequence([4, 5, 9], [False, True, True], [0.0, -1.0, -1.0], 0.0)])
    assert spec.algorithm.teacher is not None
    model = build_model(spec.algorithm.teacher.model("float32"), 0)
    with torch.no_grad():
        logprobs = (model(torch.tensor([[4, 5, 9]])).logits[0] / 1.5).log_softmax(-1)
    expected = [0.0, float(logprobs[0, 5]), float(logprobs[1, 9])]
    np.testing.assert_allclose(teacher(batch), expected, rtol=1e-5, atol=1e-6)


def test_without_a_teacher_no_model_is_loaded() -> None:
    assert teacher_logprobs(small_experiment().spec) is None


@pytest.mark.parametrize(
    ("alphabet", "shape", "words"),
    [
        ("0123456789+", {}, r"algorithm\.teacher\.path: .*its tokenizer is not that of the model: 1 tokens differ"),
        ("1023456789", {}, "2 tokens differ, as '0'"),
        (ALPHABET, {"max_positions": 16}, r"algorithm\.teacher: inference\.maxTokensPerRow.*longer than the context"),
    ],
)
async def test_a_teacher_that_cannot_judge_the_policys_tokens_is_refused_at_the_start_of_the_trainer(
    tmp_path: Path, alphabet: str, shape: dict[str, int], words: str
) -> None:
    teacher = save_teacher(tmp_path / "teacher", alphabet, **shape)
    experiment = small_experiment(algorithm={"teacher": {"path": str(teacher)}})
    own_settings = settings(tmp_path, trajectory_pool=NOBODY, weight_sync=NOBODY)
    with pytest.raises((FailedPreconditionError, InvalidArgumentError), match=words):
        await ServiceProcess("test", own_settings, experiment).run(server.start)


def test_a_teacher_with_fewer_token_ids_than_the_policy_is_refused(tmp_path: Path) -> None:
    """Families of models share a tokenizer, and pad their embeddings to different sizes."""
    policy, teacher = (save_teacher(tmp_path / name) for name in ("policy", "teacher"))
    padded = build_model(ScratchModel(scratch=ScratchModelSpec(alphabet=ALPHABET + "ab")), 0)
    padded.save_pretrained(policy)
    spec = spec_with(teacher, model={"path": str(policy)})
    with pytest.raises(FailedPreconditionError, match="it has 14 token ids, and the model has 16"):
        teacher_logprobs(spec)


def test_a_teacher_that_is_gone_is_named_as_the_teacher(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"algorithm\.teacher: model\.path.*nowhere"):
        teacher_logprobs(spec_with(tmp_path / "nowhere"))
