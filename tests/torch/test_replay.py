# SPDX-License-Identifier: MIT
"""kvzip's second reading of a prompt."""

import json
import math

import pytest
import torch
from conftest import ROOT, load
from kvmeld_torch import Cache, replay, second_reading
from test_cache import generate, padded

GOLDEN = json.loads((ROOT / "tests/data/kvzip.json").read_text())  # of kvpress's KVzipPress


def golden_words(text: str) -> list[int]:
    return GOLDEN["words"] if "Repeat" in text else []


def words(text: str) -> list[int]:
    return [9] if text == "\n" else [7, len(text)]


@pytest.mark.parametrize("share", list(GOLDEN["kept"]))
def test_kept_slots_are_kvzip_press_s(model, share):
    cache = Cache("kvzip", math.ceil(float(share) * len(GOLDEN["tokens"])), divide="scores")
    with torch.no_grad(), replay(model, golden_words):
        model(torch.tensor([GOLDEN["tokens"]]), past_key_values=cache)
    both = ours = theirs = 0
    wanted = iter(GOLDEN["kept"][share])
    for layer in cache.layers:
        for length, position in zip(layer.heads.length.tolist(), layer.heads.position.tolist()):
            mine, press = set(position[:length]), set(next(wanted))
            both, ours, theirs = both + len(mine & press), ours + len(mine), theirs + len(press)
    assert ours == theirs
    assert both / (ours + theirs - both) >= 0.98


def by_attention(tokens: list[int], parts: list[list[int]]) -> torch.Tensor:
    """The largest attention that a part's tokens give each of the prompt's [layers, KV heads, prompt]."""
    eager, n, most = load("eager"), len(tokens), torch.zeros(())
    for part in parts:
        given = eager(torch.tensor([tokens + part]), output_attentions=True).attentions
        seen = torch.stack([a[0, :, n:, :n].amax(1).unflatten(0, (4, -1)).amax(1) for a in given])
        most = torch.maximum(most, seen)
    return most


def test_scores_are_the_largest_attention_of_all_parts_in_a_batch(model, text, monkeypatch):
    monkeypatch.setattr(second_reading, "CHUNK", 50)
    seen = []
    monkeypatch.setattr(second_reading, "end_prompt", lambda layers: seen.append([x.pending for x in layers]))
    lengths = [120, 40]
    tokens, mask = padded(text, lengths)
    whole, part = words("\n\nRepeat the previous context exactly."), [7, 64]
    with torch.no_grad(), replay(model, words):
        model(tokens, attention_mask=mask, past_key_values=Cache("kvzip", 0.5))
        for b, n in enumerate(lengths):
            mine = tokens[b, -n:].tolist()
            parts = [whole + [9] + mine[:50]]
            parts += [part + mine[at - 8 : at] + [9] + mine[at : at + 50] for at in range(50, n, 50)]
            scores = torch.stack([pending[b].heads.columns[:, 0] for pending in seen[0]])
            torch.testing.assert_close(scores, by_attention(mine, parts), atol=1e-5, rtol=0)
            assert all(pending[b].heads.seen.tolist() == [n] * 4 for pending in seen[0])


def test_a_batch_is_each_prompt_alone(model, text):
    lengths = [150, 60, 111]
    tokens, mask = padded(text, lengths)
    for divide in ("scores", "even"):
        with replay(model, words):
            cache = Cache("kvzip", 0.3, divide=divide)
            together = generate(model, tokens, cache, mask=mask)
            for b, n in enumerate(lengths):
                alone = Cache("kvzip", 0.3, divide=divide)
                assert torch.equal(generate(model, tokens[b, -n:], alone)[0, n:], together[b, max(lengths) :])
                mine = cache.layers[1].heads.rows(4 * b, 4)
                assert mine.length.tolist() == alone.layers[1].heads.length.tolist()


def test_the_budget_is_that_of_all_heads_of_all_layers(model, text):
    held = {}
    for divide in ("scores", "even"):
        cache = Cache("kvzip", 50, divide=divide)
        with replay(model, words):
            generate(model, text[:300], cache, new=1)
        held[divide] = torch.stack([layer.heads.length for layer in cache.layers])
    assert held["even"].unique().tolist() == [50]
    assert int(held["scores"].sum()) == 50 * 16
    assert int(held["scores"].min()) >= 5 and held["scores"].sum(1).unique().numel() > 1  # 4 sinks and one


def test_a_second_turn_is_added(model, text):
    cache = Cache("kvzip", 50, divide="even")
    with replay(model, words):
        first = generate(model, text[:150], cache)
        generate(model, torch.cat([first, torch.tensor([text[600:640]])], 1), cache)
    heads = cache.layers[0].heads
    assert heads.seen.tolist() == [150 + 24 + 40 + 23] * 4
    assert heads.length.tolist() == [50 + 24 + 40 + 23] * 4


def test_a_prompt_that_was_not_read_again_does_not_decode(model, text):
    with pytest.raises(RuntimeError, match=r"expected `with replay\(model, encode\):`"):
        generate(model, text[:150], Cache("kvzip", 50))
    generate(model, text[:150], Cache("kvzip", 50, replay=False))
    generate(model, text[:150], Cache("kvzip", 200))  # which evicts nothing
    with replay(model, words), pytest.raises(RuntimeError, match="expected input_ids"), torch.no_grad():
        model(inputs_embeds=torch.randn(1, 150, 256), past_key_values=Cache("kvzip", 50))


def test_other_policies_are_read_once_in_it(model, text):
    with replay(model, words):
        cache = Cache("h2o", 200)
        generate(model, text[:150], cache)
    assert cache.layers[0].heads.seen.tolist() == [150 + 23] * 4
