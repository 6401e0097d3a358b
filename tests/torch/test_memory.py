# SPDX-License-Identifier: MIT
"""What a Cache takes: the storage of every tensor that can be reached from it, not its own word alone."""

import copy
import gc
from types import FunctionType, ModuleType

import pytest
import torch
from conftest import load
from kvmeld_torch import Cache
from prompts import BUDGET, DIM, GROUP, HEADS, TOKENS, prompt, rows
from test_cache import generate
from test_ops import same


def held(x) -> int:
    """Bytes of all storages behind `x`."""
    found, seen, left = {}, set(), [x]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        else:
            left += gc.get_referents(x)
    return sum(found.values())


TERMS = 4 * 200  # of each layer's rotation, in 64 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "fold", "kvzip"])
def test_no_more_than_the_budget_s_share_is_allocated(text, policy, dtype):
    model, cache = load("kvmeld", dtype), Cache(policy, 0.1, replay=False)
    of_token = 4 * 4 * 2 * 32 * dtype.itemsize  # 4 layers of 4 heads
    so_far = torch.tensor([text[:1000]])
    for new in (1, 60):
        so_far = generate(model, so_far, cache, new=new)
        seen = cache.get_seq_length()
        share = (0.1 * 1000 + seen - 1000 if policy == "kvzip" else 0.1 * seen) * of_token  # kvzip evicts no answer
        assert cache.nbytes() <= held(cache) <= cache.nbytes() + TERMS
        assert share < held(cache) <= (1.3 if dtype == torch.float32 else 1.5) * share, held(cache) / share


@pytest.mark.parametrize(("policy", "times"), [("h2o", 1.9), ("full_cache", 1)])  # steps that evict nothing write behind
def test_what_a_draft_may_be_taken_back_to_counts(model, text, policy, times):
    cache = Cache(policy, 0.2)
    with torch.no_grad():
        model(torch.tensor([text[:200]]), past_key_values=cache)
        before = cache.nbytes()
        with cache.draft():
            model(torch.tensor([text[200:204]]), past_key_values=cache)
    rows = 4 * 4 * (8 + 4 + 4) * 32 * 4  # queries, keys and values of the draft in 4 layers
    assert times * before < cache.nbytes() <= held(cache) <= cache.nbytes() + TERMS + rows


def test_packed_heads_step_as_padded_ones_do():
    """To the bit, through growth, choice and a copy."""
    for policy in ("fold", "h2o", "ems", "keepkv", "full_cache"):
        padded, queries = prompt(policy, capacity=TOKENS + 40)
        budgets = [40, 45, 50]
        padded.compress(queries, budgets)
        packed = padded.packed([n + 3 for n in padded.length.tolist()])
        assert packed.is_packed and packed.capacities == [n + 3 for n in padded.length.tolist()]
        assert packed.keys.numel() == sum(packed.capacities) * DIM
        same(padded, packed.padded())
        for step in range(9):
            if step == 3:
                packed = copy.deepcopy(packed.packed([n + 40 for n in packed.length.tolist()]))
            q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
            assert torch.equal(padded.step(q, k, v, budgets), packed.step(q, k, v, budgets)), policy
        same(padded, packed.padded())
        if policy != "ems":
            out = [x.attend(q, probabilities=True) for x in (padded, packed)]
            assert torch.equal(out[0][0], out[1][0]) and torch.equal(out[0][2][..., :40], out[1][2][..., :40])
        order = torch.tensor([2, 0])
        same(padded.chosen(order), packed.chosen(order).padded())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": lambda x: x + torch.tensor([0, 0, 0, 1])}, "measured: expected capacities of at least 1 slot"),
        ({"measured": lambda x: x - torch.tensor([0, 0, 0, 1])}, "measured: expected capacities of 123 slots of all"),
        ({"measured": lambda x: x[:, :3]}, r"measured: expected \[3, 4\], got \[3, 3\]"),
        ({"columns": lambda x: x[1:]}, r"columns: expected \[0\], got \[122\]"),
        ({"log_mass": lambda x: x.view(3, -1)}, r"log_mass: expected \[123\], got \[3, 41\]"),
        ({"length": lambda x: x + 2}, "length: expected 0 to 41 slots, got 42 of head 0"),
    ],
)
def test_packed_heads_that_cannot_be_are_refused(change, message):
    heads, queries = prompt("h2o")
    heads.compress(queries, BUDGET)
    heads = heads.packed([BUDGET + 1] * HEADS)
    for name, other in change.items():
        setattr(heads, name, other(getattr(heads, name)).contiguous())
    with pytest.raises(RuntimeError, match=message):
        heads.step(rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM), [BUDGET])
