"""What `make bench-gpu` calculates from its measurements."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import EXPERIMENT, MODELS, OVERRIDES, model_of, peak_flops, step_flops, tokens_per_second
from nexrl.plan.model_size import llama_size
from nexrl.spec import load_experiment
from tests.support.marks import ROOT

SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTH = 64


def test_the_operations_of_a_step_are_those_that_pytorch_counts() -> None:
    model = model_of({**SHAPE, "num_key_value_heads": 2}, vocabulary=256)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(3, LENGTH, dtype=torch.long)).logits.sum().backward()
    size = llama_size(model.config.to_dict())
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    hidden_half = 3 * 6 * size.layers * size.heads * size.head_size * LENGTH**2  # eager attention computes it, too
    assert step_flops(size, [LENGTH] * 3) + hidden_half == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(("name", "billions"), [("0.5B", 0.49), ("1.5B", 1.54)])
def test_the_models_have_the_sizes_in_their_names(name: str, billions: float) -> None:
    size = llama_size({**MODELS[name], "vocab_size": 151_936, "tie_word_embeddings": True})
    assert size.parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_an_unknown_gpu_has_no_utilisation() -> None:
    assert peak_flops("NVIDIA H100 PCIe") < peak_flops("NVIDIA H100 80GB HBM3")
    with pytest.raises(SystemExit, match="its peak is not known"):
        peak_flops("NVIDIA T4")


def test_tokens_per_second_are_those_after_the_first_step() -> None:
    lines = [{"time": 9.0, "token_count": 50}, {"time": 9.5, "val/reward": 1}, {"time": 11.0, "token_count": 30}]
    assert tokens_per_second(lines) == 15.0


def test_the_experiment_of_the_loop_is_valid() -> None:
    experiment = load_experiment(ROOT / EXPERIMENT, OVERRIDES)
    assert experiment.spec.model.lora is None
    assert experiment.spec.trainer.device == "cuda"
