from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import GenerationRequest, GenerationResult

VOCABULARY = 23
EOS = 1

ModelFactory = Callable[[int], PreTrainedModel]


def tiny_llama(seed: int) -> PreTrainedModel:
    """Grouped-query attention and tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform: an error in a log-probability must show
    )
    return reference(LlamaForCausalLM(config))


def tiny_qwen(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return reference(Qwen3ForCausalLM(config))


def tiny_gpt2(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
    )
    return reference(GPT2LMHeadModel(config))


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """With the attention that shares nothing with the engine's."""
    model.set_attn_implementation("eager")
    model.train(False)
    return model


@pytest.fixture(scope="session")
def make_llama() -> ModelFactory:
    return tiny_llama


@pytest.fixture
def model() -> PreTrainedModel:
    """The policy, untouched by any engine: the reference to compare with."""
    return tiny_llama(seed=1)


@pytest.fixture
def other_model() -> PreTrainedModel:
    return tiny_llama(seed=2)


@pytest.fixture(params=[tiny_llama, tiny_qwen, tiny_gpt2], ids=["llama", "qwen3", "gpt2"])
def model_factory(request: pytest.FixtureRequest) -> ModelFactory:
    factory: ModelFactory = request.param
    return factory


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    return engine_with


def engine_with(policy: PreTrainedModel | None, blank: PreTrainedModel | None = None, **limits: int) -> Engine:
    """An engine that starts from other weights than the policy's, and then loads the policy's as version 0."""
    engine = Engine(
        blank or tiny_llama(seed=99), eos_token_ids=(EOS,), limits=Limits(**{"max_tokens_per_row": 64, **limits})
    )
    if policy is not None:
        engine.load_weights(policy.state_dict(), version=0)
    return engine


@pytest.fixture(scope="session")
def run() -> Callable[[Engine, Sequence[GenerationRequest]], dict[str, GenerationResult]]:
    return run_all


def run_all(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    for request in requests:
        engine.submit(request)
    results = []
    while not engine.is_idle:
        results += engine.step()
    return {result.request_id: result for result in results}


@pytest.fixture
def reference_logprobs() -> Callable[..., Tensor]:
    return full_forward_logprobs


@torch.no_grad()
def full_forward_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """log p of each generated token, from one forward over prompt + completion without any cache. [T]"""
    logits_TV = model(input_ids=torch.tensor([[*prompt_ids, *token_ids]]), use_cache=False).logits[0]
    logprobs_TV = (logits_TV[len(prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    logprobs_T: Tensor = logprobs_TV.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return logprobs_T
