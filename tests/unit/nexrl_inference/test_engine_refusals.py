"""What the engine refuses, with which words, and that nothing changes then."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from nexrl.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NexrlError,
    ResourceExhaustedError,
)
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.requests import GenerationRequest, GenerationResult

MakeEngine = Callable[..., Engine]
Run = Callable[..., dict[str, GenerationResult]]


def test_nothing_is_generated_before_weights_are_loaded(make_engine: MakeEngine) -> None:
    with pytest.raises(FailedPreconditionError, match="no weights"):
        make_engine(None).submit(GenerationRequest("r", (5,), max_new_tokens=1))


def test_impossible_requests_are_refused_with_the_values(model: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(model, max_rows=4, max_tokens_per_row=16)
    with pytest.raises(InvalidArgumentError, match=r"prompt_token_ids: 16 tokens; .* max_tokens_per_row = 16"):
        engine.submit(GenerationRequest("r", (5,) * 16, max_new_tokens=1))
    with pytest.raises(InvalidArgumentError, match="n: 5; the engine has 4 rows"):
        engine.submit(GenerationRequest("r", (5,), max_new_tokens=1, n=5))
    with pytest.raises(InvalidArgumentError, match="token 23 is outside the vocabulary of 23"):
        engine.submit(GenerationRequest("r", (5, 23), max_new_tokens=1))
    assert engine.is_idle


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_ids", ()),
        ("max_new_tokens", 0),
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seeds", (-1,)),
        ("seeds", (1, 2)),
        ("drawn_tokens", 2),
    ],
)
def test_a_request_with_a_wrong_field_cannot_be_built(field: str, value: object) -> None:
    fields = {"request_id": "r", "prompt_ids": (5,), "max_new_tokens": 1, field: value}
    with pytest.raises(InvalidArgumentError) as caught:
        GenerationRequest(**fields)  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_full_queue_and_a_repeated_id_are_refused(model: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(model, max_waiting_requests=2)
    for name in "ab":
        engine.submit(GenerationRequest(name, (5,), max_new_tokens=1))
    with pytest.raises(AlreadyExistsError, match="'b'"):
        engine.submit(GenerationRequest("b", (5,), max_new_tokens=1))
    with pytest.raises(ResourceExhaustedError, match="2 requests are waiting"):
        engine.submit(GenerationRequest("c", (5,), max_new_tokens=1))


def test_wrong_weights_are_refused_and_change_nothing(
    model: PreTrainedModel, other_model: PreTrainedModel, make_engine: MakeEngine, run: Run
) -> None:
    engine = make_engine(model)
    request = GenerationRequest("r", (5, 6, 7), max_new_tokens=12, n=4, seeds=(11, 12, 13, 14))
    before = run(engine, [request])
    state = dict(other_model.state_dict())
    norm = state["model.norm.weight"]
    del state["model.norm.weight"]
    with pytest.raises(InvalidArgumentError, match=r"missing: model\.norm\.weight"):
        engine.load_weights(state, version=1)
    with pytest.raises(InvalidArgumentError, match="unexpected: extra"):
        engine.load_weights({**state, "model.norm.weight": norm, "extra": norm}, version=1)
    with pytest.raises(InvalidArgumentError, match=r"shape differs: model\.norm\.weight: \(31,\) for \(32,\)"):
        engine.load_weights({**state, "model.norm.weight": norm[:31]}, version=1)
    assert engine.policy_version == 0
    assert run(engine, [request]) == before


def test_weights_that_diverged_are_an_error_and_not_tokens(model: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(None)
    engine.load_weights({name: torch.full_like(t, torch.nan) for name, t in model.state_dict().items()}, version=0)
    engine.submit(GenerationRequest("r", (5,), max_new_tokens=1))
    with pytest.raises(NexrlError, match="not finite"):
        engine.step()


def test_a_model_without_a_language_head_is_refused(make_engine: MakeEngine, other_model: PreTrainedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="no output layer"):
        make_engine(None, blank=other_model.base_model)


def test_rows_longer_than_the_model_can_attend_to_are_refused(make_engine: MakeEngine) -> None:
    windowed = MistralForCausalLM(
        MistralConfig(vocab_size=23, hidden_size=32, intermediate_size=16, num_hidden_layers=1, sliding_window=8)
    )
    message = "max_tokens_per_row is 64; must be at most 8, the model's sliding_window"
    with pytest.raises(InvalidArgumentError, match=message):
        make_engine(None, blank=windowed)
    short = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23, hidden_size=32, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=32
        )
    )
    with pytest.raises(InvalidArgumentError, match="must be at most 32, the model's max_position_embeddings"):
        make_engine(None, blank=short)
