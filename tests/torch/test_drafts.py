# SPDX-License-Identifier: MIT
"""Drafted tokens: bits of plain steps, tokens of plain `generate`, and what cannot be taken back."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from conftest import POLICIES
from families import ALIBI, made
from kvmeld_torch import Cache, drafts
from kvmeld_torch.attention import Own
from kvmeld_torch.layer import Layer
from kvmeld_torch.rotation import Rotation
from test_cache import GREEDY, generate
from test_families import logits, prompt
from test_ops import same
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

HEADS, GROUP, DIM, TOKENS = 3, 2, 8, 60


class One(SimpleNamespace):
    """A cache of one layer, for random rows."""

    def __init__(self, policy, budget, rows=None):
        whole = {"shared": False, "replay": False, "drafting": False, "grows": False}
        super().__init__(budget=budget, policy=policy, rows=rows, **whole)
        self.layer = Layer(self, Rotation())
        self.compressed = [self.layer]
        shape = {"num_attention_heads": HEADS * GROUP, "num_key_value_heads": HEADS, "head_dim": DIM}
        config = LlamaConfig(hidden_size=HEADS * GROUP * DIM, **shape)
        self.own = Own(LlamaAttention(config, 0), DIM**-0.5, {})

    def text_for(self, _slots):
        return self.policy

    def slots_for(self, _seen, _head):
        return self.budget

    def read(self, rows, drafting=False):
        self.drafting = drafting
        self.layer.lazy_initialization(rows[1], rows[2])
        return self.layer.attend(self.own, *rows, None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [40, 200])
@pytest.mark.parametrize("rows_as", [None, "k6v4"])
def test_a_draft_s_bits_are_those_of_plain_steps(policy, budget, rows_as):
    plain, drafted = One(policy, budget, rows_as), One(policy, budget, rows_as)
    rows = [torch.randn(1, heads, TOKENS + 20, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
    wrong = [torch.randn(1, heads, 5, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
    for one in (plain, drafted):
        one.read([x[:, :, :TOKENS].clone() for x in rows])  # which is compressed in its place
    at = TOKENS
    for right, rejected in ((2, 3), (4, 0), (0, 5), (1, 1), (3, 2)):
        draft = [torch.cat([x[:, :, at : at + right], y[:, :, :rejected]], 2) for x, y in zip(rows, wrong)]
        out = drafted.read(draft, drafting=True)
        drafted.layer.crop(at + right)
        for t in range(right):
            step = plain.read([x[:, :, at + t : at + t + 1] for x in rows])
            assert torch.equal(step[:, 0], out[:, t])
        at += right
        assert drafted.layer.tokens == plain.layer.tokens == at
        same(drafted.layer.heads, plain.layer.heads)


def assisted(model, text, cache, **how):
    x = torch.tensor([text])
    with drafts(model):
        return model.generate(x, past_key_values=cache, max_new_tokens=24, **(GREEDY | {"eos_token_id": 0}), **how)


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_plain_generate(model, text, policy):
    for budget in (200, 0.4):
        for how in ({"prompt_lookup_num_tokens": 6}, {"assistant_model": other(model)}):
            plain, cache = Cache(policy, budget, replay=False), Cache(policy, budget, replay=False)
            wanted = generate(model, text[:150], plain)
            mine = assisted(model, text[:150], cache, **how)
            # transformers may go some tokens beyond the most.
            assert torch.equal(mine[:, : wanted.shape[1]], wanted), (budget, how)
            for a, b in zip(plain.layers, cache.layers):
                assert int(b.heads.seen[0]) - int(a.heads.seen[0]) == mine.shape[1] - wanted.shape[1]
                assert mine.shape != wanted.shape or torch.equal(a.heads.length, b.heads.length)


def other(model):
    """An assistant of the model's vocabulary that is right now and then."""
    config = LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(2)
    return LlamaForCausalLM(config).eval()


def test_a_model_that_assists_itself_needs_fewer_passes(model, plain, text):
    passes = []
    hook = model.model.register_forward_pre_hook(
        lambda _module, _args, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    tokens = assisted(model, text[:150], Cache("h2o", budget=200), assistant_model=plain)
    hook.remove()
    assert torch.equal(tokens, generate(plain, text[:150]))
    assert len(passes) < 18 and max(passes[1:]) > 2  # of 24 tokens


def test_the_forward_of_before_is_put_back(model):
    with drafts(model):
        outer = model.forward
        with drafts(model):
            assert model.forward is not outer
        assert model.forward is outer
    assert "forward" not in vars(model)
    hooked = model.forward = wraps(model.forward)(lambda *args, **given: type(model).forward(model, *args, **given))
    with drafts(model):
        pass
    assert model.forward is hooked
    del model.forward


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", *ALIBI[:1]])
def test_windows_are_taken_back_too(family):
    model = made(family, "kvmeld")
    tokens = prompt()[:, :20].repeat(1, 3)  # something to look up
    for budget in (200, 0.4):
        wanted = logits(model, Cache("h2o", budget), tokens, eos_token_id=0)[0]
        with drafts(model):
            mine = logits(model, Cache("h2o", budget), tokens, eos_token_id=0, prompt_lookup_num_tokens=5)[0]
        assert torch.equal(mine[:, : wanted.shape[1]], wanted)


def test_what_cannot_be_taken_back_is_refused(model, text):
    x = torch.tensor([text[:100]])
    cache = Cache("h2o", budget=0.4)
    words = r"kvmeld_torch.Cache: crop: expected at least {} tokens \(others are taken back .*, got {}$"
    with torch.no_grad():
        model(x[:, :80], past_key_values=cache)
        with pytest.raises(RuntimeError, match=words.format(80, 79)):
            cache.crop(79)
        with cache.draft():
            model(x[:, 80:90], past_key_values=cache)
        before = [layer.heads.length.clone() for layer in cache.layers]
        with pytest.raises(RuntimeError, match=words.format(80, 75)):
            cache.crop(-15)
        assert all(torch.equal(a, layer.heads.length) for a, layer in zip(before, cache.layers))
        cache.crop(-4)
        assert cache.get_seq_length() == 86
        with pytest.raises(RuntimeError, match=words.format(86, 85)):
            cache.crop(85)
        cache.crop(86)
        with cache.draft():
            model(x[:, 86:90], past_key_values=cache)
        model(x[:, 90:91], past_key_values=cache)
        with pytest.raises(RuntimeError, match=words.format(91, 90)):
            cache.crop(90)
    with pytest.raises(RuntimeError, match="crop: expected at least .* `with drafts"):
        model.generate(x, past_key_values=Cache("h2o", 0.4), prompt_lookup_num_tokens=4, **GREEDY | {"eos_token_id": 0})


def test_layers_without_attention_are_not_drafted():
    model, cache = made("lfm2", "kvmeld"), Cache("h2o", budget=0.4)
    with torch.no_grad():
        model(prompt(), past_key_values=cache, use_cache=True)
    with pytest.raises(RuntimeError, match="draft: expected layers with attention alone, got those of L"):
        with cache.draft():
            pass
