# SPDX-License-Identifier: MIT
"""Budgets that are a share of the tokens seen."""

import math

import pytest
import torch
from conftest import POLICIES
from families import made
from kvmeld_torch import Cache, drafts
from kvmeld_torch.cache import FLOOR
from test_cache import GREEDY, generate, padded
from test_families import logits, prompt

SHARED = ("fold", "h2o", "snapkv:window=8", "tova", "kvmerger", "compactor")  # some that divide by scores
PROMPTS_ALONE = ("attention_matching", "kvzip", "dropkv")


def by_divide():
    return [(p, "even") for p in POLICIES] + [(p, "scores") for p in SHARED]


@pytest.mark.parametrize(("policy", "divide"), by_divide())
def test_a_short_prompt_loses_nothing(model, plain, text, policy, divide):
    for tokens in (1, 18):
        cache = Cache(policy, divide=divide, replay=False)
        wanted = generate(plain, text[:tokens], new=12)
        assert torch.equal(generate(model, text[:tokens], cache, new=12), wanted)
        assert cache.layers[0].heads.length.tolist() == [tokens + 11] * 4


@pytest.mark.parametrize(("policy", "divide"), by_divide())
def test_a_share_of_one_loses_nothing_in_decode_either(model, plain, text, policy, divide):
    cache = Cache(policy, budget=1.0, divide=divide, replay=False)
    out = generate(model, text[:20], cache, new=60)
    assert torch.equal(out, generate(plain, text[:20], new=60))
    assert cache.layers[0].heads.length.tolist() == [79] * 4


@pytest.mark.parametrize("policy", ["h2o", "fold", "snapkv:window=8", "zsmerge"])
@pytest.mark.parametrize("divide", ["even", "scores"])
def test_a_share_follows_the_tokens_of_decode(model, text, policy, divide):
    cache = Cache(policy, budget=0.25, divide=divide)
    for seen in (150, 260, 420):
        more = seen - cache.get_seq_length()
        step = torch.tensor([text[cache.get_seq_length() : seen]])
        with torch.no_grad():
            for x in [step] if more == 150 else step.split(1, 1):
                model(x, past_key_values=cache)
        held = torch.stack([layer.heads.length for layer in cache.layers])
        budget = max(math.ceil(0.25 * seen), FLOOR) * held.numel()
        assert budget - held.numel() * (1 + budget // held.numel() // 32) <= int(held.sum()) <= budget


def test_each_sequence_of_a_batch_follows_its_own_tokens(model, text):
    lengths = [150, 40]
    tokens, mask = padded(text, lengths)
    for policy in ("fold", "h2o"):
        cache = Cache(policy, 0.5)
        together = generate(model, tokens, cache, mask=mask, new=60)
        for b, n in enumerate(lengths):
            alone = Cache(policy, 0.5)
            assert torch.equal(generate(model, tokens[b, -n:], alone, new=60)[0, n:], together[b, max(lengths) :])
            for mine, other in zip(cache.layers, alone.layers):
                assert mine.heads.rows(4 * b, 4).length.tolist() == other.heads.length.tolist()


def test_rejected_drafts_take_their_slots_back(model, text):
    wanted = generate(model, text[:150], Cache("fold", 0.4), new=60)
    with drafts(model):
        options = GREEDY | {"eos_token_id": 0, "max_new_tokens": 60, "prompt_lookup_num_tokens": 6}
        mine = model.generate(torch.tensor([text[:150]]), past_key_values=Cache("fold", 0.4), **options)
    assert torch.equal(mine[:, : wanted.shape[1]], wanted)


def test_the_floor_is_what_the_policy_needs_where_that_is_more():
    assert Cache("h2o", 0.01).slots_for(100) == FLOOR
    assert Cache("h2o", 0.5).slots_for(101) == 51
    assert FLOOR < Cache("snapkv:window=64", 0.01).slots_for(100) < 100
    assert Cache("h2o", 20).slots_for(1000) == 20


def test_windows_and_states_beside_it():
    for family in ("gemma2", "lfm2"):
        cache = Cache("h2o", budget=0.3, divide="even")
        logits(made(family, "kvmeld"), cache, prompt(120), max_new_tokens=30)
        assert all(int(layer.heads.length.max()) == math.ceil(0.3 * 149) for layer in cache.compressed)
