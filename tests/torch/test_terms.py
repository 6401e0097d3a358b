# SPDX-License-Identifier: MIT
"""What operators take of a model's attention, against slow loops."""

import math

import pytest
import torch
from kvmeld_torch import Spec, ops
from prompts import DIM, GROUP, HEADS, TOKENS, prompt, rows


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_terms_say_which_dims_rotate_in_pairs(interleaved, last):
    """fold's queries are moved by angles [queries, pairs] of 5 pairs, others' dims are as they were."""
    frequencies = (1.0, 0.3, 0.1, 0.03, 0.01)
    heads, queries = prompt("fold")
    heads.spec = Spec(GROUP, rope=frequencies, interleaved=interleaved, last=last)
    kept, positions = heads.observe(queries)
    first = DIM - 10 if last else 0
    i = torch.arange(5) * (2 if interleaved else 1) + first
    j = i + (1 if interleaved else 5)
    angles = (positions - torch.arange(4, TOKENS))[:, None] * torch.tensor(frequencies)
    wanted = queries[:, :, 4:].clone()
    a, b = wanted[..., i], wanted[..., j]
    wanted[..., i], wanted[..., j] = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    torch.testing.assert_close(kept, wanted, atol=1e-4, rtol=0)


def test_terms_of_attention_are_those_of_loops():
    """A cap, sinks, and ALiBi of a query at the newest position, in two sequences of one layer."""
    heads, _ = prompt("full_cache")
    heads = heads.chosen(torch.tensor([0, 1, 2, 2, 1, 0]))
    sinks, slopes = torch.randn(HEADS, GROUP), 0.1 * torch.rand(HEADS, GROUP)
    lists = {"sinks": tuple(sinks.flatten().tolist()), "slopes": tuple(slopes.flatten().tolist())}
    heads.spec = Spec(GROUP, soft_cap=3.0, **lists)
    q = 4 * rows(2 * HEADS, GROUP, DIM)
    out, log_sum_exp, _ = heads.attend(q)
    for h in range(2 * HEADS):
        for g in range(GROUP):
            keys, values = heads.keys[h, :TOKENS].double(), heads.values[h, :TOKENS].double()
            logits = 3 * ((keys @ q[h, g].double()) / math.sqrt(DIM) / 3).tanh()
            logits += slopes[h % HEADS, g] * (torch.arange(TOKENS) - (TOKENS - 1))
            total = logits.exp().sum() + sinks[h % HEADS, g].double().exp()
            assert log_sum_exp[h, g].item() == pytest.approx(total.log().item(), abs=1e-5)
            torch.testing.assert_close(out[h, g].double(), logits.exp() / total @ values, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0.0], "terms: expected 3 more numbers, got 1"),
        ([0.0, 0, 0, 2, 1.0], "terms: expected 2 more numbers, got 1"),
        ([0.0, 0, 0, -1], "terms: expected a length of 0 to 1e6, got -1"),
        ([0.0, 0, 0, 0, 0, 0, 7], "terms: expected no more numbers, got 1"),
        ([0.0, 0, 0, 0, 4, 0, 0, 0, 0, 0], "expected a number for each query head of a sequence, some of 6, got 4"),
        ([-1.0, 0, 0, 0, 0, 0], "expected a finite soft_cap above 0"),
        ([0.0, 0, 0, 9, *[1.0] * 9, 0, 0], "expected at most 16 rotated dimensions, got 18"),
    ],
)
def test_terms_that_cannot_be_are_refused(numbers, message):
    heads, _ = prompt("full_cache")
    with pytest.raises(RuntimeError, match=message):
        ops.attend(
            "full_cache", heads.tensors, rows(HEADS, GROUP, DIM), group=GROUP, terms=torch.tensor(numbers).double()
        )
