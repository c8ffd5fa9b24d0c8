"""Our backend of vLLM's weight transfer loads models of any shape: architectures, tied or not, buckets of any size."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nexrl.models import iter_weights
from nexrl.weights.packing import snapshot
from nexrl_inference.vllm.shared import LOADED, PLUGIN, SharedBuffers, manifest_to_json
from tests.support.vllm import MAX_DIFFERENCE

EXAMPLES, EXAMPLE_SECONDS = 12, 120.0
HEAD_SIZE = 32
POSITIONS = 64
TOKENS = 16
PROMPT = [5, 7, 11, 6, 9]
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": PLUGIN}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Models that vLLM's kernels for CPUs can run, as keyword arguments of a Hugging Face configuration."""
    groups, group_heads = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 1)]))
    return {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        "tie_word_embeddings": draw(st.booleans()),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": groups * group_heads,
        "num_key_value_heads": groups,
        "head_dim": HEAD_SIZE,
        "hidden_size": groups * group_heads * HEAD_SIZE,
        "intermediate_size": 32 * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(16, 400)),
    }


@pytest.fixture(scope="module")
def vllm() -> Iterator[ProcessPoolExecutor]:
    """A process that has imported vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**IN_ONE_PROCESS, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool


@pytest.mark.guide("L9")
@given(configuration=configurations(), bucket_bytes=st.integers(1, 200_000), seed=st.integers(0, 2**31))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a smaller example would take minutes to find
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.soak
def test_any_model_serves_what_was_sent(
    vllm: ProcessPoolExecutor, configuration: Mapping[str, Any], bucket_bytes: int, seed: int
) -> None:
    assert vllm.submit(difference, configuration, bucket_bytes, seed).result(EXAMPLE_SECONDS) < MAX_DIFFERENCE


def difference(configuration: Mapping[str, Any], bucket_bytes: int, seed: int) -> float:
    """Largest difference between log-probabilities that vLLM served and Hugging Face's, after each of two syncs."""
    torch.manual_seed(seed)
    model = build(configuration)
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        served = start(folder)
    found = []
    for version in (1, 2):
        for _, parameter in iter_weights(model):
            parameter.add_(0.2 * torch.randn_like(parameter))
        load(served, model, version, bucket_bytes)
        found.append(compare(served, model))
    return max(found)


def build(configuration: Mapping[str, Any]) -> PreTrainedModel:
    """The model with random weights."""
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(**configuration, **special, max_position_embeddings=POSITIONS)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    model.config.architectures = [type(model).__name__]
    return model


def start(folder: str) -> Any:
    """vLLM in this process, with other weights."""
    from vllm import LLM

    return LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=POSITIONS,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**24,
        weight_transfer_config={"backend": PLUGIN},
    )


def load(served: Any, model: PreTrainedModel, version: int, bucket_bytes: int) -> None:
    """As a replica has it loaded."""
    packed = snapshot(iter_weights(model), policy_version=version, bucket_bytes=bucket_bytes)
    buffers = SharedBuffers(packed.manifest)
    for buffer, content in zip(buffers, packed.buffers, strict=True):
        buffer.copy_(content)
    served.collective_rpc("start_weight_update")
    served.collective_rpc(
        "update_weights", args=({"path": buffers.path, "manifest": manifest_to_json(packed.manifest)},)
    )
    assert buffers.verdicts(1) == [LOADED]
    served.collective_rpc("finish_weight_update")
    served.reset_prefix_cache()


@torch.no_grad()
def compare(served: Any, model: PreTrainedModel) -> float:
    """Largest difference, over the tokens of a completion."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False, seed=1)
    (answer,) = served.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    tokens = answer.outputs[0].token_ids
    logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    told = torch.tensor([place[token].logprob for token, place in zip(tokens, answer.outputs[0].logprobs, strict=True)])
    return float((told - wanted).abs().max())
