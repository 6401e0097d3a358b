# SPDX-License-Identifier: MIT
"""Small random models of the families that people run."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.bloom import modeling_bloom

SIZE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
WINDOW = {"sliding_window": 24}
HEADS = {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}

FAMILIES = {
    "llama": {},
    "llama yarn": {"rope_parameters": YARN},
    "qwen2": {},
    "qwen3": HEADS,
    "gemma2": MIXED | HEADS | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": MIXED | HEADS | {"query_pre_attn_scalar": 16},
    "gpt_oss": MIXED | HEADS | EXPERTS,
    "mistral": WINDOW,
    "phi3": {"original_max_position_embeddings": 2048, "sliding_window": None},
    "phi3 longrope": {
        "original_max_position_embeddings": 40,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + 0.3 * i for i in range(8)],
        },
    },
    "phi": {},
    "phimoe": EXPERTS | WINDOW,
    "cohere": {},
    "cohere2": MIXED | HEADS,
    "ernie4_5": HEADS,
    "smollm3": {},
    "llama4_text": HEADS | {"num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 24},
    "olmo2": {},
    "olmo3": MIXED,
    "glm4": HEADS,
    "granite": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024},
    "gpt_neox": {},
    "bloom": {"n_layer": 4, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "use_cache": True},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 3,
    },
    "qwen3_next": HEADS
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
}

MASK_FIRST = hasattr(modeling_bloom, "create_causal_mask")  # since transformers 5.2
ALIBI = ["bloom", "mpt"] if MASK_FIRST else []
if not MASK_FIRST:
    del FAMILIES["bloom"], FAMILIES["mpt"]


def made(family: str, attention: str, dtype: torch.dtype = torch.float32, **more) -> PreTrainedModel:
    """The family's random model, the same each time; its weights large, so that attention matters."""
    torch.manual_seed(5)
    config = CONFIG_MAPPING[family.split()[0]](**(SIZE | FAMILIES.get(family, {}) | more))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(4)
            elif "sinks" in name:
                weight.normal_()
    return model
