"""The forward pass: what it refuses, what it checks at start, what padding costs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.train_batch import TrainBatch, TrainSequence
from nexrl_trainer import forward
from nexrl_trainer.forward import ForwardPass, ForwardSettings
from nexrl_trainer.micro_batch import MicroBatch, split_batch
from nexrl_trainer.packing import PackingError, in_float32, packing_error, probe_batch
from tests.support.families import FAMILIES_BY_TYPE, VOCABULARY_SIZE, plain_logprobs

LLAMA = FAMILIES_BY_TYPE["llama"]


def sequence(tokens: int, first: int = 3) -> TrainSequence:
    ids = first + np.arange(tokens) % (VOCABULARY_SIZE - first)
    return TrainSequence(ids, np.arange(tokens) >= tokens // 2, np.zeros(tokens), 1.0)


class CentredLlama(LlamaForCausalLM):
    """A head that looks at all positions at once."""

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        output: CausalLMOutputWithPast = super().forward(*args, **kwargs)
        assert output.logits is not None
        output.logits = output.logits - output.logits.mean(dim=1, keepdim=True)
        return output


def test_a_head_that_cannot_be_applied_to_chosen_positions_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match=r"model\.path: llama is not supported: its head"):
        ForwardPass(CentredLlama(cast(LlamaConfig, LLAMA.config())), ForwardSettings())


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="temperature is 0"):
        ForwardPass(LLAMA.build(), ForwardSettings(temperature=0.0))


def test_logprobs_of_a_16_bit_model_come_from_a_head_in_float32() -> None:
    model = LLAMA.build(torch.bfloat16)
    batch = TrainBatch.pack([sequence(12)])
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    plain_logprobs(model, batch)
    hook.remove()
    logits_TV = torch.nn.functional.linear(seen[0][0].float(), model.lm_head.weight.float())
    expected_TV = logits_TV.log_softmax(-1).detach().numpy()
    positions, ids = np.arange(5, 11), batch.token_ids_N[6:]
    found = ForwardPass(model, ForwardSettings()).logprobs(batch)[6:]
    np.testing.assert_allclose(found, expected_TV[positions, ids], atol=1e-6)


def test_padded_rows_of_one_sequence_each_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_pass = ForwardPass(LLAMA.build(), ForwardSettings())
    masks: list[torch.Tensor | None] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        masks.append(kwargs["attn_mask"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    forward_pass.logprobs(TrainBatch.pack([sequence(12), sequence(30, first=4)]))
    assert masks == [None] * 2  # one micro-batch, two layers


def longrope_model() -> PreTrainedModel:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    settings = {"sliding_window": None, "rope_parameters": rope, "original_max_position_embeddings": 32}
    return replace(FAMILIES_BY_TYPE["phi3"], settings=settings).build()


def dynamic_rope_model() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return replace(LLAMA, settings={"rope_parameters": rope, "max_position_embeddings": 32}).build()


def dynamic_rope_of_a_layer_type_model() -> PreTrainedModel:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"sliding_attention": plain, "full_attention": plain | {"rope_type": "dynamic", "factor": 2.0}}
    settings = {"layer_types": list(rope), "rope_parameters": rope, "max_position_embeddings": 32}
    return replace(FAMILIES_BY_TYPE["gemma3_text"], settings=settings).build()


@pytest.mark.parametrize("build", [longrope_model, dynamic_rope_model, dynamic_rope_of_a_layer_type_model])
def test_a_rope_that_depends_on_the_longest_row_is_refused_where_it_does(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    with pytest.raises(FailedPreconditionError, match=r"Set inference\.maxTokensPerRow to 32 or less"):
        ForwardPass(model, ForwardSettings(max_sequence_tokens=33))
    forward_pass = ForwardPass(model, ForwardSettings(max_sequence_tokens=32))
    short = TrainBatch.pack([sequence(32), sequence(9)])
    np.testing.assert_allclose(forward_pass.logprobs(short), plain_logprobs(model, short), atol=1e-5)
    with pytest.raises(FailedPreconditionError, match="sequences of 33 tokens are not supported with"):
        forward_pass.logprobs(TrainBatch.pack([sequence(33)]))


def test_sequences_longer_than_the_context_are_refused_at_start_and_before_any_gradient() -> None:
    model = replace(LLAMA, settings={"max_position_embeddings": 40}).build()
    too_long = (
        r"50 tokens are longer than the context of llama, 40 tokens\. Set inference\.maxTokensPerRow to 40 or less"
    )
    with pytest.raises(InvalidArgumentError, match=f"inference.maxTokensPerRow: sequences of {too_long}"):
        ForwardPass(model, ForwardSettings(max_sequence_tokens=50))
    forward_pass = ForwardPass(model, ForwardSettings())
    with pytest.raises(InvalidArgumentError, match=f"train batch: sequences of {too_long}"):
        forward_pass.micro_batches(TrainBatch.pack([sequence(12), sequence(50)]))
    assert forward_pass.micro_batches(TrainBatch.pack([sequence(12), sequence(40)]))


def test_scaled_rope_reaches_beyond_max_position_embeddings() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    model = replace(LLAMA, settings={"rope_parameters": rope, "max_position_embeddings": 32}).build()
    forward_pass = ForwardPass(model, ForwardSettings(max_sequence_tokens=128))
    batch = TrainBatch.pack([sequence(128), sequence(9)])
    np.testing.assert_allclose(forward_pass.logprobs(batch), plain_logprobs(model, batch), atol=1e-5)


def test_a_sequence_longer_than_a_micro_batch_is_computed_alone() -> None:
    model = LLAMA.build()
    forward_pass = ForwardPass(model, ForwardSettings(max_tokens_per_micro_batch=16))
    batch = TrainBatch.pack([sequence(12), sequence(50)])
    np.testing.assert_allclose(forward_pass.logprobs(batch), plain_logprobs(model, batch), atol=1e-5)


def all_see_each_other(micro: MicroBatch) -> MicroBatch:
    return replace(micro, segments_BT=np.minimum(micro.segments_BT, 1))


def last_two_see_each_other(micro: MicroBatch) -> MicroBatch:
    return replace(micro, segments_BT=np.minimum(micro.segments_BT, micro.segments_BT.max() - 1))


def positions_off_by_one(micro: MicroBatch) -> MicroBatch:
    return replace(micro, position_ids_BT=micro.position_ids_BT + (micro.segments_BT > 0))


@pytest.mark.parametrize("fault", [all_see_each_other, last_two_see_each_other, positions_off_by_one])
@pytest.mark.parametrize("model_type", ["llama", "phi", "deepseek_v3"])
def test_a_wrong_packing_is_found(model_type: str, fault: Callable[[MicroBatch], MicroBatch]) -> None:
    forward_pass = ForwardPass(FAMILIES_BY_TYPE[model_type].build(), ForwardSettings())
    batch = probe_batch(32, 32, VOCABULARY_SIZE)
    (packed,), (plain,) = split_batch(batch, 32), split_batch(batch, 100, shared_row_tokens=0)
    with torch.inference_mode():
        assert packing_error(forward_pass.distributions, packed, plain).is_rounding
        assert not packing_error(forward_pass.distributions, fault(packed), plain).is_rounding


def test_a_model_whose_attention_has_no_effect_yet_shares_no_prompt() -> None:
    model = LLAMA.build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("o_proj.weight"):
                weight.zero_()
    forward_pass = ForwardPass(model, ForwardSettings())
    assert not forward_pass.shares_prompts
    assert "its attention has too little effect to check" in forward_pass.warnings[0]
    assert ForwardPass(LLAMA.build(), ForwardSettings()).shares_prompts


def test_weights_that_cannot_all_be_cast_to_float32_keep_their_type_and_every_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LLAMA.build(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert, casts = torch.Tensor.to, 0

    def failing(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nonlocal casts
        casts += 1
        if casts == 3:
            raise torch.OutOfMemoryError
        return convert(tensor, dtype)

    monkeypatch.setattr(torch.Tensor, "to", failing)
    with pytest.raises(torch.OutOfMemoryError), in_float32(model):
        pass
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_probe_that_runs_out_of_memory_is_not_taken_for_a_refusal_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_memory(*args: object) -> PackingError:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(forward, "packing_error", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        ForwardPass(LLAMA.build(), ForwardSettings())


def test_a_probe_in_float32_leaves_every_bit_as_it_was() -> None:
    model = LLAMA.build(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with in_float32(model):
        assert model.dtype == torch.float32
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
