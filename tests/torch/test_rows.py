# SPDX-License-Identifier: MIT
"""Rows in few bits: what they are, and what is lost."""

import copy
import io

import pytest
import torch
from conftest import load
from kvmeld_torch import Cache, Heads, ops
from prompts import BUDGET, GROUP, HEADS, TOKENS, prompt, rows
from test_cache import generate
from test_ops import same

FEW = ["q8_0", "q4_0", "k8v4", "k6v4", "k4v4"]


def blocks(x: torch.Tensor, bytes_of_codes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows of one block each: scales and codes."""
    assert x.shape[-1] == 2 + bytes_of_codes
    return x[..., :2].contiguous().view(torch.float16).float(), x[..., 2:]


def test_rows_in_eight_bits_are_read_as_ggml_reads_them():
    heads, _ = prompt("full_cache")
    few = heads.held_as("q8_0")
    for mine, wanted in ((few.keys, heads.keys), (few.values, heads.values)):
        assert mine.shape == (HEADS, TOKENS + 20, 34)
        scale, codes = blocks(mine[:, :TOKENS], 32)
        x = torch.nn.functional.pad(wanted[:, :TOKENS], (0, 16))
        torch.testing.assert_close(scale[..., 0], x.abs().amax(-1) / 127, atol=0, rtol=1e-3)
        assert (scale * codes.view(torch.int8) - x).abs().max() <= 0.5001 * scale.max()
    back = few.held_as("float32")
    assert (back.keys - heads.keys)[:, :TOKENS].abs().max() <= 0.5001 * scale.max()
    assert not back.in_few_bits and back.seen.tolist() == [TOKENS] * HEADS


@pytest.mark.parametrize(("rows", "largest"), [("k8v4", 0.012), ("k6v4", 0.06), ("k4v4", 0.3)])
def test_keys_are_held_less_their_mean_and_the_newest_in_half(rows, largest):
    heads, _ = prompt("full_cache")
    heads.keys += 50 * torch.randn(HEADS, 1, 16)
    few = heads.held_as(rows)
    back = few.held_as("float32")
    torch.testing.assert_close(few.key_mean.float(), heads.keys[:, 4:TOKENS].mean(1), atol=0.05, rtol=1e-3)
    in_half = [*range(4), *range(TOKENS - 16, TOKENS)]
    for name in ("keys", "values"):
        got, wanted = getattr(back, name)[:, :TOKENS], getattr(heads, name)[:, :TOKENS]
        rounding = 0 if name == "keys" else 2e-3  # values are in half as they are held, rotated
        torch.testing.assert_close(got[:, in_half], wanted[:, in_half].half().float(), atol=rounding, rtol=0)
        # A step of a block is at most its largest number by 8 (4 bits): rotation makes it twice the deviation or so.
        off = (got - wanted)[:, 4:-16].square().mean().sqrt()
        assert 0 < off < (largest if name == "keys" else 0.3), (name, off)


@pytest.mark.parametrize("rows_as", FEW)
@pytest.mark.parametrize("policy", ["fold", "h2o", "keepkv", "ems", "full_cache"])
def test_steps_in_few_bits(policy, rows_as):
    """Attention is that of the rows as they are read; packed heads make the padded ones' steps, to the bit."""
    wide, queries = prompt(policy, capacity=TOKENS + 60)
    wide.compress(queries, BUDGET)
    few = wide.held_as(rows_as)
    packed = few.packed([n + 40 for n in few.length.tolist()])
    for step in range(30):
        if step == 10:
            packed = copy.deepcopy(packed.packed([n + 45 for n in packed.length.tolist()]))
        q, k, v = rows(HEADS, GROUP, 16), rows(HEADS, 16), rows(HEADS, 16)
        if policy != "ems":
            out, numbers = few.attend(q)[0], few.held_as("float32").attend(q)[0]
            torch.testing.assert_close(out, numbers, atol=1e-4, rtol=0)  # queries may be in 16 bits
        assert torch.equal(few.step(q, k, v, [BUDGET]), packed.step(q, k, v, [BUDGET]))
    assert torch.equal(few.length, packed.length) and bool((few.seen == TOKENS + 30).all())
    same(few.held_as("float32"), packed.held_as("float32"))
    order = torch.tensor([2, 0])
    same(few.chosen(order).held_as("float32"), packed.chosen(order).held_as("float32"))
    newest = few.held_as("float32")
    last = [int((newest.position[h, : newest.length[h]] == TOKENS + 29).nonzero()) for h in range(HEADS)]
    if few.newest_keys.shape[1] and policy != "ems":
        assert torch.equal(newest.keys[list(range(HEADS)), last], k.half().float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": lambda x: x[..., :25]}, "keys: expected rows of 16 numbers in few bits, got 25 bytes each"),
        ({"keys": lambda x: x.view(torch.int8)}, "keys: expected Byte, got Char"),
        ({"rounded": lambda x: x + 17}, "rounded: expected 0 to 60 tokens, got 61 of head 0"),
        ({"position": lambda x: x - 1}, "position: expected at least 0 in slots in use, got another in head 0"),
        ({"key_mean": lambda x: x[:, :8]}, r"key_mean: expected \[3, 16\], got \[3, 8\]"),
        ({"newest_keys": lambda x: x[:, :3]}, "newest_keys: expected none, or 4 rows and up to 64 newest ones, got 3"),
        ({"newest_values": lambda x: x.float()}, "newest_values: expected Half, got Float"),
        ({"rounded": lambda _: None}, "cache: expected 9 tensors, or 13 of rows in few bits, got 12"),
    ],
)
def test_heads_in_few_bits_that_cannot_be_are_refused(change, message):
    few = prompt("h2o")[0].held_as("k6v4")
    for name, other in change.items():
        x = other(getattr(few, name))
        setattr(few, name, x if x is None else x.contiguous())
    before = [x.clone() for x in few.tensors]
    with pytest.raises(RuntimeError, match=message):
        few.step(rows(HEADS, GROUP, 16), rows(HEADS, 16), rows(HEADS, 16), [200])
    assert all(torch.equal(a, b) for a, b in zip(before, few.tensors))


def test_conversions_that_cannot_be_are_refused():
    heads, _ = prompt("h2o")
    few = heads.held_as("k6v4")
    with pytest.raises(RuntimeError, match="convert: expected a capacity of at least 60 slots, got 59 of head 0"):
        ops.convert(Heads.empty(heads.policy, heads.spec, HEADS, 59, 16).tensors, heads.tensors, group=GROUP)
    with pytest.raises(RuntimeError, match="convert: expected 3 heads of 16 and 16 numbers, got 3 of 8 and 8"):
        ops.convert(Heads.empty(heads.policy, heads.spec, HEADS, 80, 8).tensors, heads.tensors, group=GROUP)
    with pytest.raises(ValueError, match="append: expected rows in numbers"):
        few.append(rows(HEADS, 1, 16), rows(HEADS, 1, 16))


def test_opcheck_in_few_bits():
    heads, _ = prompt("h2o")
    few, checks = heads.held_as("k6v4"), ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    q, k, v = rows(HEADS, GROUP, 16), rows(HEADS, 16), rows(HEADS, 16)
    options = {"group": GROUP}
    torch.library.opcheck(ops.step, ("h2o", few.tensors, q, k, v, [79]), options, test_utils=checks[:2])
    torch.library.opcheck(ops.attend, ("h2o", few.tensors, q), options, test_utils=checks)


@pytest.mark.parametrize(("rows_as", "largest"), [("half", 1e-5), ("q8_0", 2e-3), ("k8v4", 0.02), ("k6v4", 0.02)])
def test_all_tokens_in_few_bits_tell_the_text(model, plain, text, rows_as, largest):
    """KL of the next tokens from the full cache's: a prompt, and steps behind it."""
    tokens, far = torch.tensor([text[:340]]), []
    cache = Cache("fold", bytes=1, rows=rows_as)
    with torch.no_grad():
        wanted = plain(tokens).logits[0, 300:].log_softmax(-1)
        model(tokens[:, :300], past_key_values=cache)
        for t in range(300, 340):
            mine = model(tokens[:, t : t + 1], past_key_values=cache).logits[0, 0].log_softmax(-1)
            far.append(float((wanted[t - 300].exp() * (wanted[t - 300] - mine)).sum()))
    assert sum(far) / len(far) < largest, sum(far) / len(far)


def test_a_second_turn_copies_and_files(model, text):
    """Turns, beams' choices, deep copies and files in few bits go on as one sequence does."""
    cache = Cache("fold", bytes=0.5, rows="k6v4")
    first = generate(model, text[:300], cache, new=20)
    more = torch.cat([first, torch.tensor([text[600:640]])], 1)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    twice = copy.deepcopy(cache)
    twice.batch_repeat_interleave(2)
    wanted = generate(model, more, copy.deepcopy(cache))
    assert torch.equal(generate(model, more, other), wanted)
    assert torch.equal(generate(model, more.expand(2, -1), twice), wanted.expand(2, -1))
    assert all(layer.held.in_few_bits for layer in other.layers)


def test_numbers_of_other_dtypes_than_the_model_s(text):
    model, cache = load("kvmeld", torch.bfloat16), Cache("h2o", bytes=0.4, rows="float32")
    generate(model, text[:400], cache)
    assert all(layer.held.keys.dtype == torch.float32 for layer in cache.layers)
    assert cache.layers[0].heads.keys.dtype == torch.bfloat16
