# SPDX-License-Identifier: MIT
"""Slots that all heads of a model share: `Cache("fold")` is what C++'s compressor with shared budgets is."""

import subprocess

import pytest
import torch
from conftest import load
from kvmeld_torch import Cache, _library
from kvmeld_torch.layer import Layer
from test_cache import generate, padded


def kept(cache: Cache) -> list[list[int]]:
    """Positions of the slots of every head of every layer."""
    return [
        position[:length]
        for layer in cache.layers
        for position, length in zip(layer.heads.position.tolist(), layer.heads.length.tolist())
    ]


@pytest.mark.parametrize("policy", ["fold", "h2o"])
def test_kept_slots_are_those_of_the_compressor(model, text, monkeypatch, policy):
    program = _library.path().with_name("kvmeld_torch_compressed")
    if not program.exists():
        pytest.skip(f"{program.name} is built by tests/run")
    rows = []
    first_prompt = Layer._first_prompt

    def recorded(layer, new):
        rows.extend(x[0].transpose(0, 1).flatten().clone() for x in (new.key, new.value, new.query))
        first_prompt(layer, new)

    monkeypatch.setattr(Layer, "_first_prompt", recorded)
    cache = Cache(policy, budget=0.1, divide="scores")
    with torch.no_grad():
        model(torch.tensor([text[:600]]), past_key_values=cache)
    config = model.config
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    sizes = [60, len(cache.layers), heads, config.num_attention_heads // heads, dim, 600]
    base = config.rope_parameters["rope_theta"]
    numbers = torch.cat(rows).numpy().tobytes()
    command = [program, policy, *map(str, sizes), str(base)]
    said = subprocess.run(command, input=numbers, capture_output=True, check=True)
    wanted = [[int(x) for x in line.split()] for line in said.stdout.decode().splitlines()]
    assert kept(cache) == wanted
    assert sum(map(len, wanted)) == 60 * len(wanted) and len({len(x) for x in wanted}) > 1


def test_the_budget_is_that_of_all_heads_of_all_layers(model, text):
    held = {}
    for divide in (None, "scores", "even"):
        cache = Cache("fold", 50, divide=divide)
        generate(model, text[:300], cache, new=1)
        held[divide] = torch.tensor([len(x) for x in kept(cache)])
    assert torch.equal(held[None], held["scores"])  # the best is the default
    assert held["even"].tolist() == [50] * len(held["even"])
    assert int(held["scores"].sum()) == 50 * len(held["scores"])
    by_layer = held["scores"].view(-1, 4).sum(1)
    assert by_layer.unique().numel() > 1


def test_decoding_and_further_turns_keep_to_it(model, text):
    for policy in ("fold", "h2o", "snapkv:window=8"):
        cache = Cache(policy, 60, divide="scores")
        first = generate(model, text[:300], cache, new=40)
        assert sum(map(len, kept(cache))) <= 60 * 16
        more = torch.cat([first, torch.tensor([text[600:640]])], 1)
        generate(model, more, cache, new=1)
        assert sum(map(len, kept(cache))) == 60 * 16
        assert {int(n) for layer in cache.layers for n in layer.heads.seen} == {300 + 40 + 40}


def test_a_batch_of_different_lengths_is_each_of_them_alone(model, text):
    """Half of its own length is what each shares; they are decoded together."""
    lengths = [150, 60, 150]
    tokens, mask = padded(text, lengths)
    together = Cache("fold", 0.5)
    out = generate(model, tokens, together, mask=mask)
    assert len(set(together.layers[0].decoding.policies)) == 2
    for b, n in enumerate(lengths):
        alone = Cache("fold", 0.5)
        assert torch.equal(generate(model, tokens[b, -n:], alone)[0, n:], out[b, max(lengths) :])
        assert kept(alone) == [
            position[:length]
            for heads in (layer.heads.rows(4 * b, 4) for layer in together.layers)
            for position, length in zip(heads.position.tolist(), heads.length.tolist())
        ]


def test_a_sequence_without_a_second_turn_keeps_its_slots(model, text):
    tokens, mask = padded(text, [150, 100])
    cache = Cache("fold", 0.5)
    generate(model, tokens, cache, mask=mask, new=1)
    before = [layer.heads.chosen(torch.arange(4, 8)) for layer in cache.layers]
    limits = [layer.decoding.trigger[4:] for layer in cache.layers]
    more = torch.tensor([text[600:620], [0] * 20])
    mask = torch.cat([mask, torch.tensor([[1] * 20, [0] * 20])], 1)
    position = (mask.cumsum(1) - 1)[:, -20:]
    with torch.no_grad():
        model(more, attention_mask=mask, position_ids=position, past_key_values=cache)
    for layer, was, limit in zip(cache.layers, before, limits):
        now = layer.heads.rows(4, 4)
        assert torch.equal(now.length, was.length) and layer.decoding.trigger[4:] == limit
        for h, n in enumerate(was.length.tolist()):
            assert torch.equal(now.keys[h, :n], was.keys[h, :n])


def test_a_chosen_sequence_goes_on_by_its_own_slots(model, text):
    tokens, mask = padded(text, [150, 60])
    cache, alone = Cache("fold", 0.5), Cache("fold", 0.5)
    with torch.no_grad():
        position = (mask.cumsum(1) - 1).clamp(min=0)
        model(tokens, attention_mask=mask, position_ids=position, past_key_values=cache)
        model(tokens[1:, -60:], past_key_values=alone)
        cache.batch_select_indices(torch.tensor([1]))
        for i in range(12):
            step = {"input_ids": torch.tensor([[text[700 + i]]]), "position_ids": torch.tensor([[60 + i]])}
            model(**step, attention_mask=torch.ones(1, 151 + i), past_key_values=cache)
            model(**step, past_key_values=alone)
    assert kept(cache) == kept(alone)


def test_it_is_better_than_equal_budgets(text):
    """The next tokens' distribution under a tenth of the slots is nearer to the full cache's."""
    full, model = load("sdpa"), load("kvmeld")
    tokens = torch.tensor([text[:940]])
    divergence = {}
    with torch.no_grad():
        wanted = full(tokens).logits[0, 900:].log_softmax(-1)
        for divide in ("scores", "even"):
            cache = Cache("fold", 0.1, divide=divide)
            model(tokens[:, :900], past_key_values=cache)
            logits = torch.cat([model(t, past_key_values=cache).logits[0] for t in tokens[:, 900:].split(1, 1)])
            divergence[divide] = float((wanted.exp() * (wanted - logits.log_softmax(-1))).sum(1).mean())
    assert divergence["scores"] < divergence["even"], divergence


def test_budgets_below_the_least_are_refused_with_the_library_s_words():
    for make, message in (
        (lambda: Cache("h2o", 4), r"h2o: expected a budget of at least 8 slots \(protected tokens and one.*, got 4"),
        (lambda: Cache("fold", 5), "fold: expected at least 7 slots to share, got 5"),
        (lambda: Cache("streaming_llm", divide="scores"), "expected a policy with a score per slot for shared budgets"),
    ):
        with pytest.raises(RuntimeError, match=message):
            make()
