# SPDX-License-Identifier: MIT
"""Budgets in bytes: what is allocated, counted by hand."""

import re

import pytest
import torch
from conftest import ROOT
from families import made
from kvmeld_torch import Cache, ops
from kvmeld_torch.in_bytes import Bytes, Head
from test_cache import generate, padded
from test_families import logits
from test_families import prompt as random_tokens
from test_memory import TERMS, held

LAYERS, KV_HEADS, ROW = 4, 4, 32  # of the bundled model
ROWS = {  # bytes of a key and of a value of that dim
    None: 4 * ROW + 4 * ROW,
    "half": 2 * ROW + 2 * ROW,
    "q8_0": 34 + 34,
    "q4_0": 18 + 18,
    "k8v4": 34 + 18,
    "k6v4": 26 + 18,
    "k4v4": 18 + 18,
}


def slot_bytes(cache, rows=None) -> int:
    columns = ops.describe(cache.text_for(100), ROW, 1, 1)[0]
    return ROWS[rows] + 4 + 4 + 4 * columns  # log-mass, position, the policy's


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("policy", "divide"), [("h2o", "even"), ("fold", "scores"), ("snapkv", "scores"), ("ems", "even")]
)
def test_an_amount_is_filled_and_never_exceeded(model, text, policy, divide, rows):
    kib = 1500 if policy == "ems" else 700  # whose table is as long as the prompt was
    cache, amount = Cache(policy, divide=divide, bytes=f"{kib}KiB", rows=rows), kib << 10
    out = generate(model, text[:900], cache, new=1)
    for _ in range(2):
        one_slot_more = LAYERS * KV_HEADS * slot_bytes(cache, rows)
        assert cache.nbytes() <= amount, cache.nbytes()
        if policy != "ems":
            assert amount - one_slot_more < cache.nbytes()
        assert held(cache) <= cache.nbytes() + TERMS
        length = torch.stack([layer.heads.length for layer in cache.layers])
        assert int(length.sum()) <= cache.slots()[0] * length.numel() <= int(length.sum()) * 1.2
        out = generate(model, out, cache, new=40)


def test_slots_by_hand(model, text):
    """h2o has a number for each slot, and no memory of its own."""
    cache = Cache("h2o", bytes=400_000)
    generate(model, text[:400], cache, new=2)
    of_head = 400_000 / 16 - (4 + 4 + 4 * 8)  # length, tokens seen, measured
    assert cache.slots() == [int(of_head / (2 * 32 * 4 + 8 + 4)) - 1]  # and the place of the next token
    cache = Cache("h2o", bytes="25%", rows="k6v4")
    generate(model, text[:900], cache, new=1)
    # The newest 8 rows and the first 4 in half, the mean of the keys, how many tokens are rounded.
    of_head = 0.25 * 900 * 2 * 32 * 2 - 40 - 12 * 2 * 32 * 2 - 32 * 2 - 4
    assert cache.slots() == [int(of_head / (26 + 18 + 8 + 4)) - 1]


def test_slots_are_those_that_a_compressor_in_cpp_finds():
    """Of Llama 3.1 8B, as `sizes` prints them, less the place of a decode step's token and a head's lengths."""
    page = (ROOT / "docs/reference/sizes.md").read_text()
    found = re.findall(r"^\| `?(half|\w\w\w\w)`?.*? \| [\d,]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    assert [row[0] for row in found] == ["half", "q8_0", "k8v4", "k6v4", "k4v4"]
    for rows, *wanted in found:
        for share, slots in zip(("20%", "10%", "5%"), wanted):
            head = Head(128, 128, 4, rows, count=32 * 8)
            assert 1 <= int(slots.replace(",", "")) - Bytes.of(share).slots(32768, head, "fold/1000000") <= 2


@pytest.mark.parametrize("rows", [None, "half", "k6v4"])
@pytest.mark.parametrize("policy", ["h2o", "fold", "snapkv"])
def test_a_share_of_the_bytes_follows_the_tokens_of_decode(model, text, policy, rows):
    cache = Cache(policy, bytes=0.3, rows=rows)
    so_far, slots = torch.tensor([text[:1200]]), []
    for new in (1, 60, 60):
        so_far = generate(model, so_far, cache, new=new)
        share = 0.3 * cache.get_seq_length() * LAYERS * KV_HEADS * 2 * ROW * 2
        ahead = LAYERS * KV_HEADS * slot_bytes(cache, rows) * (cache.slots()[0] // 16 + 8)
        assert 0.9 * share < cache.nbytes() <= held(cache) <= share + ahead + TERMS, cache.nbytes() / share
        slots.append(cache.slots()[0])
    assert slots[2] - slots[1] >= int(0.3 * 60 * 2 * ROW * 2 / slot_bytes(cache, rows))


def test_a_share_of_one_is_all_tokens_and_a_short_prompt_loses_nothing(model, plain, text):
    for tokens, share in ((20, 1), (20, 1.0), (20, 0.1), (2, "10%"), (150, "100%")):
        cache = Cache("fold", bytes=share)
        out = generate(model, text[:tokens], cache, new=12 if share != 1 else 60)
        assert torch.equal(out, generate(plain, text[:tokens], new=12 if share != 1 else 60))
        assert cache.layers[0].heads.length.tolist() == [out.shape[1] - 1] * 4
    cache = Cache("fold", bytes=1, rows="k8v4")
    generate(model, text[:600], cache, new=1)
    assert cache.layers[0].heads.length.tolist() == [600] * 4


def test_each_sequence_has_the_whole_budget(model, text):
    lengths = [400, 150]
    tokens, mask = padded(text, lengths)
    for given in ({"bytes": 0.5}, {"bytes": "200KiB"}, {"bytes": 0.4, "rows": "k6v4"}):
        for policy in ("fold", "h2o"):
            together = Cache(policy, **given)
            out = generate(model, tokens, together, mask=mask)
            for b, n in enumerate(lengths):
                alone = Cache(policy, **given)
                assert torch.equal(generate(model, tokens[b, -n:], alone)[0, n:], out[b, max(lengths) :])
                assert together.slots()[b] == alone.slots()[0]


def test_windows_and_other_dims_of_values():
    cache = Cache("h2o", bytes=200_000, divide="even")
    logits(made("gemma2", "kvmeld"), cache, random_tokens(1500), max_new_tokens=5)
    assert cache.slots() == [int((200_000 / (2 * 2) - 40) / (2 * 16 * 4 + 12)) - 1]  # 2 of 4 layers, of 2 heads
    cache = Cache("h2o", bytes=100_000, divide="even", rows="q8_0")
    logits(made("deepseek_v3", "kvmeld"), cache, random_tokens(), max_new_tokens=5)
    assert cache.nbytes() <= 100_000
    assert cache.slots() == [int((100_000 / (4 * 4) - 40 - 4) / (2 * 34 + 34 + 12)) - 1]  # keys of 48, values of 32


@pytest.mark.parametrize("given", [0, -1, 1.5, 2.5, "64MB", "101%", "0%", "12", "", float("nan"), float("inf")])
def test_no_bytes_are_refused(given):
    with pytest.raises(ValueError, match="Cache: expected bytes as 0.1, .*, got "):
        Cache("h2o", bytes=given)


def test_other_refusals():
    with pytest.raises(ValueError, match=r"Cache: expected a budget or bytes, got both \(0.1 and '10%'\)"):
        Cache("h2o", 0.1, bytes="10%")
    with pytest.raises(RuntimeError, match="make_storage: expected one of float32, half, .*, got 'k3v4'"):
        Cache("h2o", rows="k3v4")
    with pytest.raises(RuntimeError, match="streaming_llm: expected a policy with a score per slot"):
        Cache("streaming_llm", divide="scores", bytes=0.1)


@pytest.mark.parametrize(("policy", "slots"), [("h2o", 8), ("fold", 8)])
def test_too_few_bytes_are_refused_and_nothing_changes(model, text, policy, slots):
    cache = Cache(policy, bytes=3000)
    words = rf"Cache: bytes: expected at least (\d+) \({slots} slots in each of 16 heads, .* {policy} keeps\), got 3000"
    with pytest.raises(RuntimeError, match=words) as refused:
        generate(model, text[:100], cache)
    assert cache.nbytes() == cache.get_seq_length() == 0 and not cache.layers
    least = int(re.search(words, str(refused.value))[1])
    with pytest.raises(RuntimeError, match=f"expected at least {least} "):
        generate(model, text[:100], Cache(policy, bytes=least - 16))
    cache = Cache(policy, bytes=least)
    generate(model, text[:100], cache)
    assert cache.slots() == [slots] and cache.nbytes() == least
