"""One tiny model with random weights for each architecture family that transformers builds on a CPU.

Left out: DBRX, LongCat-Flash, MiMo-V2 and Zamba2, whose classes in transformers 5.23 do not run at this size, and Kimi
Linear, which takes seconds for a forward pass without its GPU kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nexrl.train_batch import TrainBatch

VOCABULARY_SIZE = 64
POSITIONS = 64
_SIZES = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OTHER_NAMES = {"ffn_dim": "intermediate_size", "d_ff": "intermediate_size", "max_seq_len": "max_position_embeddings"}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY_SIZE, "hidden_size_per_layer_input": 8}
_GEMMA4 = {**_PER_LAYER, "global_head_dim": 8, "final_logit_softcapping": 0.5, "sliding_window": 512}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
}


@dataclass(frozen=True)
class Family:
    """A model type, whether it supports shared rows, and the settings of its tiny model."""

    model_type: str
    shares_prompts: bool
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        """Return the configuration: 2 layers, hidden size 32, vocabulary 64."""
        defaults = AutoConfig.for_model(self.model_type)
        known = set(defaults.to_dict()) | set(defaults.attribute_map)
        sizes = {**_SIZES, **{name: _SIZES[same] for name, same in _OTHER_NAMES.items()}}
        chosen = {name: value for name, value in sizes.items() if name in known} | self.settings
        return type(defaults)(**chosen)

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
        """Return the model; equal seeds make equal weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
            model.eval()
            return model


def plain_logprobs(model: PreTrainedModel, batch: TrainBatch, temperature: float = 1.0) -> NDArray[np.float32]:
    """Return log-probabilities [N] from the whole model with its own head: one sequence at a time, without padding."""
    parts = []
    for ids in np.split(batch.token_ids_N, np.cumsum(batch.lengths_B)[:-1]):
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].float() / temperature
        logprobs_T = logits_TV[:-1].log_softmax(-1).gather(-1, torch.from_numpy(ids)[1:, None]).squeeze(-1)
        parts.append(np.concatenate([[0], logprobs_T.numpy()]))
    return np.concatenate(parts) * batch.loss_mask_N


def _text_config(model_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny language model that is a part of a larger model."""
    return Family(model_type, shares_prompts=False, settings=dict(settings)).config().to_dict()


FAMILIES = (
    # Dense, attention only
    Family("llama", shares_prompts=True),
    Family("qwen2", shares_prompts=True),
    Family("qwen3", shares_prompts=True),
    Family("gemma", shares_prompts=True),
    Family("gpt2", shares_prompts=True),
    Family("gpt_neox", shares_prompts=True),
    Family("gptj", shares_prompts=True, settings={"rotary_dim": 4}),
    Family("codegen", shares_prompts=True, settings={"rotary_dim": 4}),
    Family("opt", shares_prompts=True),
    Family("xglm", shares_prompts=True),
    Family("phi", shares_prompts=True),
    Family("phi3", shares_prompts=True, settings={"sliding_window": None}),
    Family("falcon", shares_prompts=True),
    Family("stablelm", shares_prompts=True),
    Family("starcoder2", shares_prompts=True, settings={"sliding_window": None}),
    Family("olmo2", shares_prompts=True),
    Family("glm4", shares_prompts=True),
    Family("granite", shares_prompts=True, settings={"logits_scaling": 8.0}),
    Family("cohere", shares_prompts=True, settings={"logit_scale": 0.0625}),
    Family("smollm3", shares_prompts=True),
    Family("nanochat", shares_prompts=True),
    Family("olmo", shares_prompts=True),
    Family("ernie4_5", shares_prompts=True),
    Family("hunyuan_v1_dense", shares_prompts=True),
    Family("seed_oss", shares_prompts=True),
    Family("arcee", shares_prompts=True),
    Family("apertus", shares_prompts=True),
    Family("helium", shares_prompts=True),
    Family("gpt_bigcode", shares_prompts=True),
    Family("ministral3", shares_prompts=True, settings={"sliding_window": None}),
    Family("minicpm3", shares_prompts=True),
    Family("diffllama", shares_prompts=True),
    Family("bitnet", shares_prompts=True),
    Family("nemotron", shares_prompts=True),
    Family("persimmon", shares_prompts=True),
    Family("internlm3", shares_prompts=True),
    Family("biogpt", shares_prompts=True),
    Family(
        "gemma3n_text",
        shares_prompts=True,
        settings={**_PER_LAYER, "num_kv_shared_layers": 0, "laurel_rank": 8, "sliding_window": 512},
    ),
    Family("gemma4_text", shares_prompts=True, settings=_GEMMA4),
    # Positions come from the distance between columns, or the model ignores the caller's mask
    Family("bloom", shares_prompts=False),
    Family("mpt", shares_prompts=False),
    Family("doge", shares_prompts=False),
    # Sliding window
    Family("mistral", shares_prompts=False),
    Family("gemma2", shares_prompts=False, settings={"final_logit_softcapping": 0.5}),
    Family("gemma3_text", shares_prompts=False),
    Family("cohere2", shares_prompts=False, settings=_WINDOW),
    Family("olmo3", shares_prompts=False, settings=_WINDOW),
    Family("exaone4", shares_prompts=False, settings=_WINDOW),
    Family("exaone_moe", shares_prompts=False),
    Family("afmoe", shares_prompts=False),
    Family("gpt_neo", shares_prompts=False, settings={"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    Family("gpt_oss", shares_prompts=False),
    Family("llama4_text", shares_prompts=False, settings={"attention_chunk_size": 8}),
    # Images and text: the settings of the language model are in `text_config`
    Family(
        "gemma3",
        shares_prompts=False,
        settings={"text_config": _text_config("gemma3_text", {}), "vision_config": {**_VISION, "patch_size": 8}},
    ),
    Family("gemma4", shares_prompts=True, settings={"text_config": _text_config("gemma4_text", _GEMMA4)}),
    # Mixture of experts
    Family("mixtral", shares_prompts=True, settings={"sliding_window": None}),
    Family("qwen2_moe", shares_prompts=True),
    Family("qwen3_moe", shares_prompts=True),
    Family("deepseek_v2", shares_prompts=True),
    Family("deepseek_v3", shares_prompts=True, settings={"head_dim": 4}),
    Family("glm4_moe", shares_prompts=True),
    Family("glm4_moe_lite", shares_prompts=True, settings={"head_dim": 4}),
    Family("olmoe", shares_prompts=True),
    Family("granitemoe", shares_prompts=True),
    Family("phimoe", shares_prompts=True, settings={"sliding_window": None}),
    Family("jetmoe", shares_prompts=True),
    Family("ernie4_5_moe", shares_prompts=True),
    Family("minimax_m2", shares_prompts=True),
    Family("dots1", shares_prompts=True, settings={"sliding_window": None}),
    Family("hunyuan_v1_moe", shares_prompts=True),
    Family("flex_olmo", shares_prompts=True),
    Family("solar_open", shares_prompts=True),
    Family("granitemoeshared", shares_prompts=True),
    Family("hy_v3", shares_prompts=True),
    # Recurrent or convolutional layers
    Family("qwen3_5_text", shares_prompts=False, settings=_DELTA_NET),
    Family("qwen3_5_moe_text", shares_prompts=False, settings=_DELTA_NET),
    Family("qwen3_next", shares_prompts=False, settings=_DELTA_NET),
    Family("olmo_hybrid", shares_prompts=False, settings=_DELTA_NET),
    Family("lfm2", shares_prompts=False, settings={"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    Family(
        "lfm2_moe", shares_prompts=False, settings={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    ),
    Family(
        "jamba",
        shares_prompts=False,
        settings={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Family("bamba", shares_prompts=False, settings={**_MAMBA, "attn_layer_indices": [1]}),
    Family(
        "granitemoehybrid",
        shares_prompts=False,
        settings={**_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    ),
    Family("falcon_h1", shares_prompts=False, settings={**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    Family(
        "nemotron_h",
        shares_prompts=False,
        settings={
            "layers_block_type": ["mamba", "moe", "attention"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 4,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    Family("minimax", shares_prompts=False, settings=_DELTA_NET),
    Family(
        "recurrent_gemma",
        shares_prompts=False,
        settings={"block_types": ["recurrent", "attention"], "attention_window_size": 8, "logits_soft_cap": 0.5},
    ),
    Family(
        "zamba",
        shares_prompts=False,
        settings={
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 4,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
        },
    ),
    Family("mamba", shares_prompts=False),
    Family("mamba2", shares_prompts=False, settings={"num_heads": 8, "state_size": 4, "n_groups": 1, "chunk_size": 16}),
    Family("falcon_mamba", shares_prompts=False),
    Family("rwkv", shares_prompts=False),
    Family("xlstm", shares_prompts=False, settings={"qk_dim_factor": 1.0, "chunk_size": 16}),
)

FAMILIES_BY_TYPE = {family.model_type: family for family in FAMILIES}
