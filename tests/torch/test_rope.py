# SPDX-License-Identifier: MIT
"""What a model's layers rotate is checked against their code; what they hide is checked in their masks."""

import pytest
import torch
from kvmeld_torch import Cache
from kvmeld_torch.rope import rope_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

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
LLAMA4 = {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024}


def made(kind, **more):
    config = CONFIG_MAPPING[kind](**(SIZE | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation="kvmeld").eval()


def ropes(model):
    """Of its attention layers, in order."""
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention")]
    return [rope_of(layer, "fold") for layer in layers]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "starcoder2"])
def test_models_that_rotate_halves_are_taken_with_their_base(kind):
    more = {"sliding_window": None} if kind in ("mistral", "starcoder2") else {}
    parameters = {"rope_type": "default", "rope_theta": 30000.0}
    assert ropes(made(kind, rope_parameters=parameters, **more)) == [(30000.0,)] * 4


@pytest.mark.parametrize(
    ("kind", "more"),
    [("cohere", {}), ("ernie4_5", {}), ("llama4_text", LLAMA4 | {"no_rope_layers": [1] * 4}), ("glm", {"head_dim": 16})],
)
def test_models_that_rotate_otherwise_are_refused_by_policies_that_rotate(kind, more):
    model = made(kind, **more)
    with torch.no_grad(), pytest.raises(RuntimeError, match="fold rotates keys or queries: expected RoPE"):
        model(torch.full((1, 80), 7), past_key_values=Cache("fold", budget=64), use_cache=True)
    if kind != "llama4_text":
        with torch.no_grad():
            model(torch.full((1, 80), 7), past_key_values=Cache("h2o", budget=64), use_cache=True)


def test_layers_and_models_without_rotation_rotate_nothing():
    assert ropes(made("smollm3")) == [(2000000.0,)] * 3 + [()]
    assert ropes(made("gpt2", **GPT)) == [()] * 4
    assert ropes(made("opt", ffn_dim=96, word_embed_proj_dim=64)) == [()] * 4


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama4_text", LLAMA4 | {"attention_chunk_size": 32}),
        ("phimoe", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 32}),
    ],
)
def test_a_window_that_the_mask_alone_says_is_refused(kind, more):
    model = made(kind, **more)
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected a mask of causal attention"):
        model(torch.full((1, 80), 7), past_key_values=Cache("h2o", budget=64), use_cache=True)
