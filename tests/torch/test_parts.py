# SPDX-License-Identifier: MIT
"""Prompts in parts, and turns of a chat: what was just read stays until it is answered."""

import copy
import math

import pytest
import torch
from conftest import POLICIES
from kvmeld_torch import Cache
from test_cache import GREEDY, generate, padded
from test_shared import kept
from transformers import DynamicCache

WHOLE = ("ems", "kvzip")  # whose prompts cannot come in parts


def read(model, text, cache, part, each=lambda _: None):
    x = torch.tensor([text])
    with torch.no_grad():
        for at in range(0, len(text), part):
            model(x[:, at : at + part], past_key_values=cache)
            each(at)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in WHOLE])
def test_generate_in_parts_is_generate_while_nothing_is_evicted(model, plain, text, policy):
    x, cache = torch.tensor([text[:150]]), Cache(policy, budget=200)
    out, wanted = (
        m.generate(x, past_key_values=c, max_new_tokens=12, prefill_chunk_size=64, **GREEDY)
        for m, c in ((model, cache), (plain, DynamicCache()))
    )
    assert torch.equal(out, wanted)
    assert cache.layers[0].heads.length.tolist() == [161] * 4


@pytest.mark.parametrize(
    ("policy", "divide"),
    [(p, "even") for p in ("h2o", "tova", "snapkv:window=8", "streaming_llm", "key_diff")] + [("h2o", "scores")],
)
def test_what_is_kept_of_few_parts_is_what_is_kept_of_the_whole(model, text, policy, divide):
    parts, whole = Cache(policy, 80, divide=divide), Cache(policy, 80, divide=divide)
    read(model, text[:150], parts, 50)
    read(model, text[:150], whole, 150)
    both = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in zip(kept(parts), kept(whole))]
    assert sum(both) / len(both) > 0.99  # rounding may exchange slots of equal scores


@pytest.mark.parametrize(("policy", "divide"), [("fold", "scores"), ("h2o", "scores"), ("h2o", "even"), ("fold", "even")])
def test_the_part_just_read_stays_and_memory_is_bounded(model, text, policy, divide):
    cache, part = Cache(policy, 0.1, divide=divide), 100

    def check(at: int) -> None:
        for layer in cache.layers:
            heads, seen = layer.pending[0].heads, at + part
            held = heads.position[:, : int(heads.length.max())]
            assert all(set(range(at, seen)) <= set(row) for row in held.tolist())
            assert int(heads.length.max()) <= heads.capacity <= max(32, math.ceil(0.1 * seen)) + 2 * part

    read(model, text[:900], cache, part, check)
    generate(model, text[:901], cache, new=1)
    assert sum(map(len, kept(cache))) == math.ceil(0.1 * 901) * 16


def test_a_batch_in_parts_is_each_of_them_alone(model, text):
    tokens, mask = padded(text, [150, 90])
    for policy in ("fold", "h2o"):
        together = Cache(policy, 0.5)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            for at in range(0, 150, 50):
                now = slice(at, at + 50)
                given = {"attention_mask": mask[:, : at + 50], "position_ids": position[:, now]}
                if at == 0:  # a sequence begins in the second part: all of the first is refused
                    given["attention_mask"], given["position_ids"] = mask[:, :100], position[:, :100]
                    model(tokens[:, :100], past_key_values=together, **given)
                elif at == 100:
                    model(tokens[:, now], past_key_values=together, **given)
            for b, (first, n) in enumerate(((100, 150), (40, 90))):
                alone = Cache(policy, 0.5)
                model(tokens[b : b + 1, 150 - n : 150 - n + first], past_key_values=alone)
                model(tokens[b : b + 1, -50:], past_key_values=alone)
                assert kept(alone) == [
                    position[:length]
                    for heads in (layer.heads.rows(4 * b, 4) for layer in together.layers)
                    for position, length in zip(heads.position.tolist(), heads.length.tolist())
                ]


def test_a_turn_is_answered_before_it_is_compressed(model, text):
    cache = Cache("h2o", 60)
    first = generate(model, text[:300], cache, new=8)
    question = torch.tensor([text[600:640]])
    with torch.no_grad():
        model(torch.cat([first[:, -1:], question], 1), past_key_values=cache)
    assert all(p.heads.length.tolist() == [60 + 41] * 4 for layer in cache.layers for p in layer.pending)
    assert all(layer.heads.length.tolist() == [60] * 4 for layer in cache.layers)


@pytest.mark.parametrize("policy", WHOLE)
def test_policies_that_compress_a_first_part_alone_refuse_the_next(model, text, policy):
    words = f"kvmeld_torch.Cache: {policy}: expected a prompt in one part, got another before a token was decoded"
    with pytest.raises(RuntimeError, match=words):
        read(model, text[:150], Cache(policy, 200), 50)


def test_copies_of_one_context_answer_as_it_would(model, text):
    """copy.deepcopy: one context, many questions."""
    context = torch.tensor([text[:300]])
    for compressed in (False, True):
        cache = Cache("fold", 0.3)
        with torch.no_grad():
            model(context, past_key_values=cache)
        if compressed:
            cache.compress()
            assert sum(layer.heads.length.sum() for layer in cache.layers) == 90 * 16
        for at in (500, 700):
            x = torch.cat([context, torch.tensor([text[at : at + 30]])], 1)
            one, other = copy.deepcopy(cache), copy.deepcopy(cache)
            assert torch.equal(generate(model, x, one), generate(model, x, other))
        assert cache.get_seq_length() == 300
