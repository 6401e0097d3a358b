# SPDX-License-Identifier: MIT
"""model.generate with a kvmeld_torch.Cache, on the bundled model."""

import pytest
import torch
from conftest import POLICIES, load
from kvmeld_torch import Cache
from transformers import DynamicCache, LlamaConfig

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def generate(model, tokens, cache=None, new=24, mask=None):
    x = torch.as_tensor(tokens)
    x = x if x.ndim == 2 else x[None]
    return model.generate(x, attention_mask=mask, past_key_values=cache, max_new_tokens=new, **GREEDY)


def padded(text, lengths):
    """Sequences of these lengths, padded on the left, and their mask."""
    width = max(lengths)
    tokens = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for b, n in enumerate(lengths):
        tokens[b, width - n :] = torch.tensor(text[400 * b : 400 * b + n])
        mask[b, width - n :] = 1
    return tokens, mask


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_those_of_generate_while_nothing_is_evicted(model, plain, text, policy):
    cache = Cache(policy, budget=200)
    assert torch.equal(generate(model, text[:150], cache), generate(plain, text[:150]))
    assert cache.layers[0].heads.length.tolist() == [150 + 23] * 4


def test_a_batch_of_different_lengths_is_each_of_them_alone(model, plain, text):
    lengths = [150, 60, 111]
    tokens, mask = padded(text, lengths)
    wanted = generate(plain, tokens, mask=mask)
    assert torch.equal(generate(model, tokens, Cache("h2o", budget=200), mask=mask), wanted)
    for policy in ("h2o", "fold", "ems", "snapkv:window=8", "attention_matching"):
        cache = Cache(policy, budget=0.65)
        together = generate(model, tokens, cache, mask=mask)
        for b, n in enumerate(lengths):
            alone = Cache(policy, budget=0.65)
            assert torch.equal(generate(model, tokens[b, -n:], alone)[0, n:], together[b, max(lengths) :]), policy
            mine = cache.layers[1].heads.rows(4 * b, 4)
            assert mine.length.tolist() == alone.layers[1].heads.length.tolist()


def two_turns(model, text, cache):
    first = generate(model, text[:150], cache)
    more = torch.cat([first, torch.tensor([text[600:640]])], 1)
    return generate(model, more, cache)


@pytest.mark.parametrize("policy", ["h2o", "fold", "ems", "attention_matching", "full_cache"])
def test_a_second_turn_is_generate_s_while_nothing_is_evicted(model, plain, text, policy):
    wanted = two_turns(plain, text, DynamicCache())
    assert torch.equal(two_turns(model, text, Cache(policy, budget=300)), wanted)


def test_a_second_turn_in_a_batch(model, plain, text):
    """Sequences of different lengths, and second prompts of different lengths."""

    def turns(m, cache):
        tokens, mask = padded(text, [150, 60])
        first = generate(m, tokens, cache, mask=mask)
        more, more_mask = padded(text[900:], [20, 35])
        tokens = torch.cat([first, more], 1)
        mask = torch.cat([mask, torch.ones(2, first.shape[1] - mask.shape[1], dtype=torch.long), more_mask], 1)
        return generate(m, tokens, cache, mask=mask)

    for policy in ("h2o", "ems"):
        assert torch.equal(turns(model, Cache(policy, budget=300)), turns(plain, DynamicCache()))


def test_padding_between_tokens_is_not_held(model, plain, text):
    """Behind a first turn of several lengths a second one of others leaves gaps."""
    tokens, mask = torch.tensor([text[:100]]), torch.ones(1, 100, dtype=torch.long)
    mask[:, 40:55] = 0
    for policy in ("h2o", "fold"):
        gaps, none = Cache(policy, budget=0.5), Cache(policy, budget=0.5)
        out = generate(model, tokens, gaps, mask=mask)[0, 100:]
        assert torch.equal(out, generate(model, tokens[:, mask[0].bool()], none)[0, 85:])
        more = torch.cat([tokens[0], out[:-1], tokens[0, :20]])[None]  # with a gap in the second turn
        behind = torch.cat([mask, torch.ones(1, 23 + 20, dtype=torch.long)], 1)
        behind[:, -15:-10] = 0
        position = (behind.cumsum(1) - 1)[:, -20:]
        turn = {"attention_mask": behind, "position_ids": position, "past_key_values": gaps}
        with torch.no_grad():
            logits = model(more[:, -20:], **turn).logits[0, -1]
            kept = behind[0, -20:].bool()
            wanted = model(more[:, -20:][:, kept], position_ids=position[:, kept], past_key_values=none).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        for a, b in zip(gaps.layers, none.layers):
            assert torch.equal(a.heads.position[:, :40], b.heads.position[:, :40])


def test_a_second_turn_keeps_the_budget(model, text):
    for policy in ("h2o", "fold", "zsmerge", "ems", "attention_matching"):
        cache = Cache(policy, budget=60, divide="even")
        two_turns(model, text, cache)
        heads = cache.layers[0].heads
        assert heads.seen.tolist() == [150 + 24 + 40 + 23] * 4
        assert int(heads.length.max()) <= (60 if policy != "attention_matching" else 60 + 23)


def test_evicting_all_but_a_share_still_tells_the_text(model, plain, text):
    """The next token's distribution under a compressed cache is near the full cache's."""
    prompt = torch.tensor([text[:900]])
    with torch.no_grad():
        wanted = plain(prompt).logits[0, -1].log_softmax(-1)
        near = {}
        for policy, budget in (("fold", 0.2), ("streaming_llm", 18)):
            cache = Cache(policy, budget)
            model(prompt[:, :-1], past_key_values=cache)
            logits = model(prompt[:, -1:], past_key_values=cache).logits[0, -1].log_softmax(-1)
            near[policy] = float((wanted.exp() * (wanted - logits)).sum())
    assert near["fold"] < 0.1 < near["streaming_llm"], near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits(text, dtype):
    """Rows stay as they come; logits are the full cache's to the rounding of 16 bits."""
    x = torch.tensor([text[:120]])
    logits = {}
    with torch.no_grad():
        for name, attention, cache in (("mine", "kvmeld", Cache("h2o", 200)), ("full", "sdpa", DynamicCache())):
            m = load(attention, dtype)
            m(x[:, :80], past_key_values=cache)
            m(x[:, 80:110], past_key_values=cache)
            each = [m(t, past_key_values=cache).logits for t in x[:, 110:].split(1, 1)]
            logits[name] = torch.cat(each, 1).float()
    assert cache.layers[0].keys.dtype == dtype
    torch.testing.assert_close(logits["mine"], logits["full"], atol=0.3 if dtype == torch.bfloat16 else 0.04, rtol=0)


def test_autocast_rounds_as_it_does_the_full_cache(model, plain, text):
    x = torch.tensor([text[:120]])
    logits = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for name, m, cache in (("mine", model, Cache("fold", 200)), ("full", plain, DynamicCache())):
            m(x[:, :80], past_key_values=cache)
            m(x[:, 80:110], past_key_values=cache)
            logits[name] = torch.cat([m(t, past_key_values=cache).logits for t in x[:, 110:].split(1, 1)], 1).float()
    torch.testing.assert_close(logits["mine"], logits["full"], atol=0.3, rtol=0)


def test_beams_move_with_their_caches(model, plain, text):
    options = GREEDY | {"num_beams": 3, "max_new_tokens": 12}
    x = torch.tensor([text[:80], text[300:380]])
    wanted = plain.generate(x, **options)
    assert torch.equal(model.generate(x, past_key_values=Cache("h2o", budget=150), **options), wanted)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda: Cache("h3o"), "make_policy: expected one of"),
        (lambda: Cache("h2o", budget=0), "expected a budget of a share up to 1"),
        (lambda: Cache("h2o", budget=10.5), "expected a budget of a share up to 1"),
        (lambda: Cache("h2o", divide="mine"), "expected divide even or scores, got mine"),
    ],
)
def test_bad_caches_are_refused(cache, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        cache()


def test_what_a_model_must_not_do_is_refused(model, plain, text):
    x = torch.tensor([text[:100]])
    with pytest.raises(RuntimeError, match='expected attn_implementation="kvmeld"'):
        generate(plain, x, Cache("h2o"))
    with pytest.raises(RuntimeError, match="expected inference"):
        model(x, past_key_values=Cache("h2o"))
    with pytest.raises(RuntimeError, match=r"crop: expected at least \d+ tokens .*, got 50"):
        cache = Cache("h2o")
        generate(model, x, cache)
        cache.crop(50)


def test_attention_of_a_later_prompt_is_that_of_its_tokens_in_turn():
    from kvmeld_torch import Heads, Policy, Spec
    from kvmeld_torch.attention import Own, later_prompt
    from transformers.models.llama.modeling_llama import LlamaAttention

    heads, group, dim, slots, tokens = 3, 2, 8, 20, 7
    cache = Heads.empty(Policy("full_cache"), Spec(group), heads, slots + tokens, dim)
    cache.keys.normal_(), cache.values.normal_(), cache.log_mass.normal_()
    cache.length[:] = torch.tensor([5, 20, 11])  # ragged, as after budgets of their own
    cache.seen[:] = 40
    q, k, v = (torch.randn(heads, *n, tokens, dim) for n in ((group,), (), ()))
    config = LlamaConfig(hidden_size=48, num_attention_heads=heads * group, num_key_value_heads=heads, head_dim=dim)
    own = Own(LlamaAttention(config, 0), dim**-0.5, {})
    out = later_prompt(own, cache, q, k, v)
    for t in range(tokens):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        assert cache.position.gather(1, cache.length[:, None].long() - 1).flatten().tolist() == [40 + t] * heads
        torch.testing.assert_close(out[:, :, t], cache.attend(q[:, :, t].contiguous())[0], atol=1e-5, rtol=0)


def test_sequences_of_a_batch_move_with_their_budgets(model, text):
    tokens, mask = padded(text, [150, 60, 111])
    cache = Cache("h2o", budget=0.5)
    generate(model, tokens, cache, mask=mask)
    layer = cache.layers[2]
    before = (layer.heads.length.tolist(), layer.decoding.target)
    keys = layer.heads.keys.clone()
    cache.reorder_cache(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    for new, old in enumerate([2, 2, 0, 0]):
        mine, then = slice(4 * new, 4 * new + 4), slice(4 * old, 4 * old + 4)
        assert torch.equal(layer.heads.keys[mine], keys[then])
        assert layer.heads.length[mine].tolist() == before[0][then] and layer.decoding.target[mine] == before[1][then]
    assert before[1][0] != before[1][8]
