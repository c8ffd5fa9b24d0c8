"""A loss of the user in the learner: what it is given, that it trains like a built-in one, what its errors say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nexrl.errors import InvalidArgumentError, NexrlError
from nexrl.models import build_model, iter_weights
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.model import ScratchModel, ScratchModelSpec
from nexrl.train_batch import TrainBatch
from nexrl_trainer.forward import ForwardSettings
from nexrl_trainer.micro_batch import split_batch
from nexrl_trainer.step import Learner, LearnerSettings

MODEL = ScratchModel(
    scratch=ScratchModelSpec(
        alphabet="0123456789=", hidden_size=16, intermediate_size=32, layers=2, heads=2, max_positions=32
    )
)

CODE = """
import torch
from nexrl.algorithm import LossInputs, LossOutputs


def same_as_ppo_clip(inputs, *, low, high):
    ratio_T = (inputs.logprobs_T - inputs.rollout_logprobs_T).clamp(-20.0, 20.0).exp()
    unclipped_T = ratio_T * inputs.advantages_T
    clipped_T = ratio_T.clamp(1 - low, 1 + high) * inputs.advantages_T
    loss = -(inputs.weights_T * torch.minimum(unclipped_T, clipped_T)).sum()
    return LossOutputs(loss, (clipped_T < unclipped_T).detach())


def sequence_ratio(inputs):
    "GSPO: one ratio for each sequence, the geometric mean of its tokens' ratios."
    sequences = int(inputs.sequence_T.max()) + 1
    log_ratio_T = inputs.logprobs_T - inputs.rollout_logprobs_T
    sums_S = torch.zeros(sequences).index_add(0, inputs.sequence_T, log_ratio_T)
    lengths_S = torch.zeros(sequences).index_add(0, inputs.sequence_T, torch.ones_like(log_ratio_T))
    ratio_T = (sums_S / lengths_S).clamp(-20.0, 20.0).exp()[inputs.sequence_T]
    loss = -(inputs.weights_T * ratio_T * inputs.advantages_T).sum()
    return LossOutputs(loss, torch.zeros_like(loss_mask(inputs)))


def loss_mask(inputs):
    return inputs.weights_T > 0


SEEN = []


def reads_columns(inputs):
    SEEN.append({name: column.clone() for name, column in inputs.columns.items()})
    return LossOutputs(-(inputs.columns["gain"] * inputs.logprobs_T).sum(), ~loss_mask(inputs))


def raises(inputs):
    return inputs.columns["levle"]


def exits(inputs):
    raise SystemExit(1)


def vector(inputs):
    return LossOutputs(inputs.logprobs_T, loss_mask(inputs))


def double(inputs):
    return LossOutputs(inputs.logprobs_T.double().sum(), loss_mask(inputs))


def nothing(inputs):
    return inputs.logprobs_T.sum()


def constant(inputs):
    return LossOutputs(inputs.weights_T.sum(), loss_mask(inputs))


def only_positive(inputs):
    "A constant where no token has a positive advantage."
    is_positive_T = inputs.advantages_T > 0
    loss = torch.zeros(())
    if is_positive_T.any():
        loss = -(inputs.weights_T * inputs.advantages_T * inputs.logprobs_T)[is_positive_T].sum()
    return LossOutputs(loss, ~is_positive_T)


def not_finite(inputs):
    return LossOutputs((inputs.logprobs_T * float("inf")).sum(), loss_mask(inputs))


CALLS = []


def fails_once(inputs):
    CALLS.append(len(inputs.logprobs_T))
    if len(CALLS) == 2:
        raise ConnectionError("away")
    return LossOutputs(-(inputs.weights_T * inputs.logprobs_T).sum(), ~loss_mask(inputs))


def gradient_not_finite(inputs):
    "The classic: a ratio that overflows where a minimum removes it."
    ratio_T = (1000 + inputs.logprobs_T).exp()
    return LossOutputs(torch.minimum(ratio_T, torch.ones_like(ratio_T)).sum(), loss_mask(inputs))


number = 5
without_signature = max
"""


@pytest.fixture
def learner(tmp_path: Path) -> Callable[..., Learner]:
    """Builds learners with the same weights; their loss may be in `<name of the folder>_loss`, which is CODE."""
    module = f"loss_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(CODE)

    def build(loss: str, max_tokens: int = 8192, **algorithm: object) -> Learner:
        named = loss if loss == "ppo_clip" else f"{module}:{loss}"
        settings = AlgorithmSpec.model_validate({"loss": named, "learning_rate": 1e-2, **algorithm})
        forward = ForwardSettings(max_tokens_per_micro_batch=max_tokens)
        return Learner(build_model(MODEL, seed=0), LearnerSettings(settings, 10, forward, tmp_path))

    return build


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_weights(learner.model)}


def test_a_loss_of_the_user_that_is_a_built_in_one_trains_bit_for_bit_alike(
    learner: Callable[..., Learner], build_batch: Callable[..., TrainBatch]
) -> None:
    common = {"entropy_coefficient": 0.01, "kl_coefficient": 0.1}
    built_in = learner("ppo_clip", clip_low=0.1, clip_high=0.3, **common)
    own = learner("same_as_ppo_clip", loss_config={"low": 0.1, "high": 0.3}, **common)
    before = weights(own)
    for seed in range(3):
        assert built_in.train(build_batch(seed)) == own.train(build_batch(seed))
    assert all(torch.equal(tensor, weights(own)[name]) for name, tensor in weights(built_in).items())
    assert not all(torch.equal(tensor, weights(own)[name]) for name, tensor in before.items())


@pytest.mark.parametrize(("name", "max_tokens"), [("sequence_ratio", 16), ("only_positive", 12)])
def test_a_loss_over_whole_sequences_does_not_depend_on_the_split(
    learner: Callable[..., Learner], build_batch: Callable[..., TrainBatch], name: str, max_tokens: int
) -> None:
    # Without a KL term, whose gradient would stand in for that of the loss.
    batch = replace(build_batch(seed=1, sequences=8), reference_logprobs_N=None)
    whole, split = learner(name), learner(name, max_tokens=max_tokens)
    assert len(split_batch(batch, max_tokens)) > 1
    expected, metrics = whole.forward_backward(batch), split.forward_backward(batch)
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-5)
    gradients = (
        torch.cat([p.grad.flatten() for p in of.model.parameters() if p.grad is not None]) for of in (whole, split)
    )
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 16, 8192])
def test_a_sequence_is_never_split_over_micro_batches(build_batch: Callable[..., TrainBatch], max_tokens: int) -> None:
    batch = build_batch(seed=2, sequences=12)
    parts = [set(batch.sequence_of_tokens[micro.tokens_P]) for micro in split_batch(batch, max_tokens)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 12


def test_columns_reach_the_loss_at_the_tokens_that_they_belong_to(
    learner: Callable[..., Learner], build_batch: Callable[..., TrainBatch]
) -> None:
    plain = build_batch(seed=3, sequences=8)
    own = learner("reads_columns", max_tokens=16)
    tokens_N = np.arange(len(plain.token_ids_N))
    columns: dict[str, NDArray[Any]] = {
        "place": tokens_N,
        "row": np.arange(8),
        "gain": np.linspace(0, 1, len(tokens_N), dtype=np.float32),
    }
    batch = replace(plain, columns=columns)
    own.train(batch)
    seen = __import__(own.settings.algorithm.loss.partition(":")[0]).SEEN
    places, rows = (torch.cat([columns[name] for columns in seen]).numpy() for name in ("place", "row"))
    assert sorted(places) == tokens_N[plain.loss_mask_N].tolist()
    np.testing.assert_array_equal(rows, plain.sequence_of_tokens[places])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"KeyError \(.*py:\d+\): 'no column levle; there are: level'"),
        ("exits", r"SystemExit \(.*\): 1"),
        ("vector", r"loss is torch.float32 \[\d+\]; torch.float32 \[\] is needed"),
        ("double", r"loss is torch.float64 \[\]; torch.float32 \[\] is needed"),
        ("nothing", "returned Tensor; a nexrl.algorithm.LossOutputs is needed"),
        ("constant", "loss does not depend on logprobs_T in any micro-batch of the step"),
        ("not_finite", "the loss of the step is -inf"),
        ("gradient_not_finite", "its gradient by logprobs_T is not finite; clamp log ratios before exp"),
    ],
)
def test_an_error_of_a_loss_names_it(
    learner: Callable[..., Learner], build_batch: Callable[..., TrainBatch], name: str, message: str
) -> None:
    batch = build_batch(seed=0)
    batch = replace(batch, columns={"level": batch.advantages_N})
    with pytest.raises(NexrlError, match=f"algorithm.loss loss_of_.*:{name}: {message}"):
        learner(name).train(batch)


def test_a_batch_that_failed_halfway_is_trained_again_as_if_it_had_not(
    learner: Callable[..., Learner], build_batch: Callable[..., TrainBatch]
) -> None:
    batch = build_batch(seed=1, sequences=8)
    failing, sound = (learner("fails_once", max_tokens=16) for _ in range(2))
    assert len(split_batch(batch, 16)) > 1
    with pytest.raises(NexrlError, match=r"ConnectionError \(.*\): away"):
        failing.train(batch)
    assert failing.train(batch) == sound.train(batch)
    assert all(torch.equal(tensor, weights(sound)[name]) for name, tensor in weights(failing).items())


@pytest.mark.parametrize(("name", "message"), [("number", "not a function but int"), ("absent", "has no absent")])
def test_a_loss_that_cannot_be_called_is_refused_at_start(
    learner: Callable[..., Learner], name: str, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        learner(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"low": 0.1, "hihg": 0.3}, "missing a required argument: 'high'"),
        ({"low": 0.1, "high": 0.3, "scale": 1}, "got an unexpected keyword argument 'scale'"),
        ({"low": 0.1, "high": 0.3, "inputs": 1}, "multiple values for argument 'inputs'"),
    ],
)
def test_a_loss_config_that_the_loss_does_not_take_is_refused_at_start(
    learner: Callable[..., Learner], config: dict[str, float], message: str
) -> None:
    refused = r"algorithm\.lossConfig: loss_of_.*:same_as_ppo_clip does not accept it"
    with pytest.raises(InvalidArgumentError, match=rf"{refused}: {message}; it takes \(inputs, \*, low, high\)"):
        learner("same_as_ppo_clip", loss_config=config)


def test_a_loss_without_a_signature_is_not_checked(learner: Callable[..., Learner]) -> None:
    learner("without_signature", loss_config={"low": 0.1})


def test_one_token_with_an_absurd_logprob_leaves_metrics_and_weights_finite(
    learner: Callable[..., Learner], build_batch: Callable[..., TrainBatch]
) -> None:
    batch = build_batch(seed=4)
    batch.rollout_logprobs_N[np.flatnonzero(batch.loss_mask_N)[0]] = -9000.0
    own = learner("ppo_clip")
    metrics = own.train(batch)
    assert all(np.isfinite(value) for value in metrics.figures().values())
    assert all(torch.isfinite(tensor).all() for tensor in weights(own).values())
