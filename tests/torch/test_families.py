# SPDX-License-Identifier: MIT
"""Families of models: what is compressed of each, and that nothing else changes."""

import re

import pytest
import torch
from conftest import ROOT
from families import ALIBI, FAMILIES, MASK_FIRST, made
from kvmeld_torch import Cache, replay
from kvmeld_torch.layer import Layer
from transformers import DynamicCache
from transformers.models.bloom import modeling_bloom

TOKENS, NEW = 60, 16
TURNS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW}


def prompt(tokens=TOKENS, sequences=1):
    return torch.randint(2, 128, (sequences, tokens), generator=torch.Generator().manual_seed(3))


def logits(model, cache, tokens=None, **more):
    """Greedy tokens and the logits of each."""
    options = TURNS | {"return_dict_in_generate": True, "output_logits": True} | more
    out = model.generate(prompt() if tokens is None else tokens, past_key_values=cache, **options)
    return out.sequences, torch.stack(out.logits)


def full_layers(config) -> list[int]:
    """Those that the model's own configuration says have full attention."""
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if getattr(config, "sliding_window", None) is None else ""] * config.num_hidden_layers
    return [i for i, x in enumerate(types) if x in ("full_attention", "attention")]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate_and_full_layers_are_compressed(family):
    wanted, wanted_logits = logits(made(family, "eager"), None)
    model = made(family, "kvmeld")
    for policy in ("fold", "h2o", "ems:window=4") if family not in ALIBI else ("tova", "h2o", "snapkv:window=8"):
        tokens, mine = logits(model, Cache(policy, budget=200))
        assert torch.equal(tokens, wanted), policy
        torch.testing.assert_close(mine, wanted_logits, atol=2e-4 * float(wanted_logits.abs().max()), rtol=0)
        cache = Cache(policy, budget=18, divide="even")
        logits(model, cache)
        compressed = [i for i, layer in enumerate(cache.layers) if isinstance(layer, Layer)]
        assert compressed == full_layers(model.config)
        assert all(int(layer.heads.length.max()) <= 18 for layer in cache.compressed)


def test_a_second_reading_leaves_windows_as_they_were():
    def encode(text):
        return [5, len(text)]

    model = made("gemma3_text", "kvmeld")
    cache, whole = Cache("kvzip", budget=0.5), DynamicCache(config=model.config)
    with torch.no_grad(), replay(model, encode):
        model(prompt(), past_key_values=cache, use_cache=True)
        model(prompt(), past_key_values=whole, use_cache=True)
    for mine, other in zip(cache.layers, whole.layers):
        if not isinstance(mine, Layer):
            assert mine.cumulative_length == TOKENS and torch.equal(mine.keys, other.keys)
    model = made("lfm2", "kvmeld")
    with pytest.raises(RuntimeError, match="kvzip: expected layers that can read a prompt a second time, got those of"):
        logits(model, Cache("kvzip", budget=0.5))
    logits(model, Cache("kvzip", budget=0.5, replay=False))


@pytest.mark.parametrize("family", ["gemma3n_text", "falcon_h1"])
def test_families_whose_code_cannot_be_asked_are_refused_in_words(family):
    more = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
    more |= {"altup_num_inputs": 2, "laurel_rank": 8, "layer_types": ["full_attention"] * 4}
    more |= {"activation_sparsity_pattern": [0.0] * 4, "head_dim": 16}
    if family == "falcon_h1":
        more = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
        more |= {"mamba_expand": 1, "head_dim": 16}
    words = "kvmeld_torch.Cache: expected a model that runs on rows given to its layers and makes its own cache, got |"
    words += "kvmeld_torch.Cache: expected layers of which each has attention alone or a state alone, got |"
    words += "kvmeld_torch.Cache: expected a model that asks for what each of transformers' caches has, got one "
    with pytest.raises((RuntimeError, AttributeError), match=words):
        logits(made(family, "kvmeld", **more), Cache("h2o", budget=200))


@pytest.mark.skipif(MASK_FIRST, reason="of transformers 5.1")
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_layers_that_would_be_replaced_while_they_run_are_refused(family):
    shape = {"d_model": 64, "n_heads": 4, "n_layers": 4} if family == "mpt" else {"n_layer": 4, "n_head": 4}
    with pytest.raises(RuntimeError, match=r"Model: expected a version of transformers that .* \(5.2 or later\), got 5.1"):
        logits(made(family, "kvmeld", **shape), Cache("h2o", budget=200))


def test_policies_that_merge_are_refused_where_slots_have_distances():
    words = r"fold: expected attention without alibi_slopes \(it merges slots\), got some"
    for family in ALIBI:
        with pytest.raises(RuntimeError, match=words):
            logits(made(family, "kvmeld"), Cache("fold", budget=200))


def test_attention_in_the_layer_itself_is_refused_but_for_bloom_and_mpt(monkeypatch):
    for family in ("falcon", "gpt_neo"):
        shape = {"num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]]} if family == "gpt_neo" else {}
        wanted, model = logits(made(family, "eager", **shape), None), made(family, "kvmeld", **shape)
        assert torch.equal(logits(model, None)[1], wanted[1])  # with its own cache as before
        with pytest.raises(RuntimeError, match="attention by the interface of transformers, got .*Model with another"):
            logits(model, Cache("h2o", budget=200))
    if not MASK_FIRST:
        return
    monkeypatch.setattr(modeling_bloom.BloomAttention, "_merge_heads", lambda *_: torch.ones(1, 12, 64))
    words = r"BloomAttention: expected its own outputs \(up to [\d.]+\), got some that differ by [\d.]+"
    with pytest.raises(RuntimeError, match=words):
        logits(made("bloom", "kvmeld"), Cache("h2o", budget=200))


def row(family: str) -> str:
    """Of the table in docs/how-to/pytorch.md."""
    cache = Cache("h2o", budget=200)
    model = made(family, "kvmeld")
    logits(model, cache)
    kinds: dict[str, int] = {}
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, Layer):
            kind = "windowed" if getattr(layer, "is_sliding", False) else model.config.layer_types[i]
            name = kind.replace("_attention", "").replace("mamba", "linear")  # its name since 5.24
            kinds[name] = kinds.get(name, 0) + 1
    rotated = {"none": 0} if not cache.compressed else {}
    for layer in cache.compressed:
        n, dim = 2 * len(layer.rotates.frequencies), layer.heads.keys.shape[2]
        pairs = "interleaved" if layer.rotates.interleaved else "halves"
        part = "" if n == dim else f" of {'the last ' if layer.rotates.last else ''}{n} of {dim} dims"
        rotated[f"{pairs}{part}" if n else "none"] = 0
    spec = cache.compressed[0].spec if cache.compressed else None
    terms = [name for name, x in (("soft cap", spec and spec.soft_cap), ("sinks", spec and spec.sinks)) if x]
    terms += ["ALiBi"] if spec and spec.slopes else []
    kept = ", ".join(f"{n} {name}" for name, n in kinds.items()) or "none"
    more = "; ".join([", ".join(rotated), *terms])
    return f"| {family} | {len(cache.compressed)} of {len(cache.layers)} | {kept} | {more} |"


def test_the_table_of_the_docs_is_what_models_are(capsys):
    table = [row(family) for family in FAMILIES]
    with capsys.disabled():
        print("", *table, sep="\n")
    docs = (ROOT / "docs/how-to/pytorch.md").read_text()
    (written,) = re.findall(r"\| family \|.*\n\|[-|]*\|\n((?:\|.*\n)*)", docs)
    written = [row for row in written.splitlines() if row.split("|")[1].strip() in FAMILIES]
    assert written == table


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_next", "lfm2", "granitemoehybrid", *ALIBI[:1]])
def test_a_second_turn_a_batch_and_beams_are_generate_s(family):
    plain, model = made(family, "eager"), made(family, "kvmeld")
    tokens = prompt(sequences=2)
    assert torch.equal(logits(model, Cache("h2o", budget=200), tokens)[0], logits(plain, None, tokens)[0])
    beams = {"num_beams": 2, "max_new_tokens": 8}
    wanted = plain.generate(tokens, **(TURNS | beams))
    assert torch.equal(model.generate(tokens, past_key_values=Cache("h2o", budget=200), **(TURNS | beams)), wanted)
    cache, whole = Cache("h2o", budget=200), prompt(100)
    with torch.no_grad():
        model(whole[:, :80], past_key_values=cache, use_cache=True)
        steps = [model(t, past_key_values=cache, use_cache=True).logits for t in whole[:, 80:90].split(1, 1)]
        if family not in ("qwen3_next", "lfm2", "granitemoehybrid"):  # whose own caches take later turns token by token
            steps.append(model(whole[:, 90:], past_key_values=cache, use_cache=True).logits)
        mine, wanted = torch.cat(steps, 1), plain(whole).logits[:, 80:]
    torch.testing.assert_close(mine, wanted[:, : mine.shape[1]], atol=2e-4 * float(wanted.abs().max()), rtol=0)


def test_a_model_with_windows_alone_says_that_nothing_is_compressed(recwarn):
    cache = Cache("h2o", budget=0.3)
    logits(made("mistral", "kvmeld"), cache)
    said = [str(w.message) for w in recwarn.list if "kvmeld" in str(w.message)]
    assert said == ["kvmeld_torch.Cache: MistralModel: nothing is compressed, as no layer has full attention"]
    assert not cache.compressed and cache.nbytes() == 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "lfm2"])
def test_a_saved_cache_goes_on_to_the_same_tokens(family, tmp_path):
    model, cache, steps = made(family, "kvmeld"), Cache("fold", budget=0.3), prompt(70)
    with torch.no_grad():
        model(steps[:, :60], past_key_values=cache, use_cache=True)
        torch.save(cache, tmp_path / "cache.pt")
        again = torch.load(tmp_path / "cache.pt", weights_only=False)
        for token in steps[:, 60:].split(1, 1):
            mine, other = (model(token, past_key_values=c, use_cache=True).logits for c in (cache, again))
            assert torch.equal(mine, other)


def test_budgets_below_the_least_are_refused_with_the_library_s_words():
    words = r"h2o: expected a budget of at least 8 slots \(protected tokens and one more\), got 4"
    with pytest.raises(RuntimeError, match=words):
        Cache("h2o", budget=4)


def test_input_that_no_cache_can_hold_is_refused_in_words():
    model, ids = made("llama", "kvmeld"), prompt()
    n = ids.shape[1]
    of_numbers = torch.full((1, 1, n, n), float("-inf")).triu(1)
    row_of_padding = torch.ones(2, n, dtype=torch.long)
    row_of_padding[1] = 0
    words = r"expected a mask \[batch, tokens\] or of booleans, got torch.float32"
    with pytest.raises(RuntimeError, match=words), torch.no_grad():
        model(ids, past_key_values=Cache("h2o", budget=200), attention_mask=of_numbers)
    with pytest.raises(RuntimeError, match="expected a token of every sequence, got a row of padding alone"):
        logits(model, Cache("h2o", budget=200), ids.repeat(2, 1), attention_mask=row_of_padding)
    words = r"expected tokens from position 60 on \(use_cache=True\), got some from 0 on"
    with pytest.raises(RuntimeError, match=words):
        logits(model, Cache("h2o", budget=200), ids, use_cache=False)


def test_what_a_layer_does_besides_is_refused_with_both_numbers():
    """A window that no configuration tells of; an attention that no spec says."""
    model = made("llama", "kvmeld")
    attention = model.model.layers[2].self_attn
    forward = attention.forward
    mask = torch.ones(80, 80).tril().triu(-30).bool()[None, None]
    with pytest.raises(RuntimeError, match="expected a mask of causal attention"), torch.no_grad():
        model(prompt(80), attention_mask=mask, past_key_values=Cache("h2o", budget=64))
    attention.forward = lambda *x, **given: forward(*x, **given, s_aux=torch.ones(4))
    with pytest.raises(RuntimeError, match=r"LlamaAttention: expected the outputs of its own .*, such as [-.\d]+, got"):
        logits(model, Cache("h2o", budget=64))
    attention.forward = lambda *x, **given: forward(*x, **given, sliding_window=30)
    with pytest.raises(RuntimeError, match="a layer of full attention with sliding_window=30"):
        logits(model, Cache("h2o", budget=64))
