# SPDX-License-Identifier: MIT
"""Rotations that are measured are those of the models' own tables."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType

import pytest
import torch
from families import made
from kvmeld_torch import rotation
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama


def tables(model, tokens=500):
    return rotation.measured(model.base_model, tokens)


FAMILIES = ("llama", "llama yarn", "llama3", "phi", "gpt_neox", "cohere", "glm4", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_the_model_s(family):
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    model = made("llama", "kvmeld", rope_parameters=scaling) if family == "llama3" else made(family, "kvmeld")
    wanted = model.base_model.rotary_emb.inv_freq.double()
    for layer in tables(model).values():
        measured = torch.tensor(layer.frequencies, dtype=torch.float64)
        torch.testing.assert_close(measured, wanted, rtol=1e-4, atol=1e-8)
        assert layer.interleaved == (family in ("cohere", "glm4"))
        assert layer.last == (family == "deepseek_v3")


def test_each_layer_is_measured():
    pairs = {family: [len(x.frequencies) for x in tables(made(family, "kvmeld")).values()] for family in NONE}
    assert pairs == NONE
    two = tables(made("gemma3_text", "kvmeld"))  # of other bases
    assert two[0].frequencies[-1] > 30 * two[1].frequencies[-1]


NONE = {"smollm3": [8, 8, 8, 0], "llama4_text": [8, 8, 8, 0], "cohere2": [8, 0, 8, 0], "gpt2": [0, 0, 0, 0]}


def test_a_factor_on_position_changes_the_table():
    """Phi 3's long factors are used from 101 tokens on."""
    model = made("phi3 longrope", "kvmeld", original_max_position_embeddings=100)
    short, long = (tables(model, n)[0].frequencies for n in (90, 120))
    assert long[5] == pytest.approx(short[5] / 2.5, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_give_the_table_to_their_rounding(dtype):
    wanted = tables(made("llama", "kvmeld"))[0].frequencies
    measured = tables(made("llama", "kvmeld", dtype=dtype))[0].frequencies
    assert len(measured) == len(wanted)
    turns = (torch.tensor(measured) - torch.tensor(wanted)) * 499
    assert float(turns.abs().max()) < (0.02 if dtype == torch.bfloat16 else 0.003)


def test_the_model_s_random_numbers_are_left_alone():
    model = made("llama", "kvmeld")
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    tables(model)
    assert torch.equal(torch.rand(3), wanted)


def test_another_thread_runs_the_model_meanwhile():
    """What measures it is on no module of the model's."""
    model, ids = made("llama", "eager"), torch.arange(12)[None]
    wanted = model(ids).logits
    with rotation._one_row_a_sequence(model.base_model, 12), ThreadPoolExecutor(1) as other:
        assert not any(m._forward_pre_hooks for m in model.modules())
        got = other.submit(lambda: model(ids).logits).result()
    assert torch.equal(got, wanted)


def test_a_forward_of_a_module_s_own_is_measured_apart_too():
    """As accelerate puts one in each module that it moves between devices."""
    model = made("llama", "kvmeld")
    wanted = tables(model)
    for m in model.modules():
        m.forward = partial(lambda module, *args, **given: type(module).forward(module, *args, **given), m)
    assert tables(model) == wanted
    model.base_model.forward = MethodType(type(model.base_model).forward, model.base_model)
    assert tables(model) == wanted


def test_dims_too_short_to_be_seen_to_move_rotate_with_the_others():
    """As dim 0 of Gemma 3 270M's layer 12, which its norm makes small."""
    model = made("qwen3", "kvmeld")
    attention = model.base_model.layers[1].self_attn
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight[torch.tensor([0, 8, 2, 7])] = 1e-9  # the first pair, and one dim of two others
    measured, wanted = (tables(model)[layer] for layer in (1, 0))
    assert len(measured.frequencies) == 8 and not measured.last and not measured.interleaved
    for pair in (1, 3, 4, 5, 6):
        assert measured.frequencies[pair] == pytest.approx(wanted.frequencies[pair], rel=1e-4)


def test_layers_that_are_not_compressed_may_rotate_otherwise(monkeypatch):
    model = made("gemma3_text", "kvmeld")
    rotate = modeling_gemma3.apply_rotary_pos_emb

    def otherwise(q, k, cos, sin):
        q, k = rotate(q, k, cos, sin)
        return q, k * (1 + cos[:, None, :, :1]) if cos[0, 1, -1] != wide else k

    wide = model.base_model.rotary_emb(torch.zeros(1), torch.arange(12)[None], "full_attention")[0][0, 1, -1]
    monkeypatch.setattr(modeling_gemma3, "apply_rotary_pos_emb", otherwise)
    assert list(rotation.measured(model.base_model, 12, [1, 3])) == [1, 3]
    with pytest.raises(RuntimeError, match="expected queries and keys rotated in pairs"):
        tables(model, 12)


@pytest.mark.parametrize("change", [lambda q, at: q * (1 + at), lambda q, at: q + at, lambda q, at: q.roll(1, -1) * at])
def test_rows_that_are_not_rotated_are_refused(monkeypatch, change):
    rotate = modeling_llama.apply_rotary_pos_emb

    def otherwise(q, k, cos, sin):
        q, k = rotate(q, k, cos, sin)
        return q, change(k, cos[:, None, :, :1])

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", otherwise)
    words = r"LlamaAttention: expected queries and keys rotated in pairs .*, got rows that differ by \d.*\(rounding: \d"
    with pytest.raises(RuntimeError, match=words):
        tables(made("llama", "kvmeld"))
