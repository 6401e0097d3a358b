# SPDX-License-Identifier: MIT
"""The operators of a GPU equal the CPU's: by the kernels on the emulator, and on a card where there is one."""

import re

import pytest
import torch
from conftest import POLICIES, load
from devices import KERNELS, device, in_pages, near  # noqa: F401
from kvmeld_torch import Cache, Heads, Policy
from kvmeld_torch import heads as heads_module
from prompts import BUDGET, DIM, GROUP, HEADS, TOKENS, copied, prompt, rows


@pytest.mark.parametrize("policy", [*KERNELS, "fold:pins=1", "fold/40"])
def test_prompt_and_steps(device, policy):
    here, queries = prompt(policy)
    there = device.heads(here)
    for heads in (here, there):
        heads.compress(queries, BUDGET)
    near(here, there)
    for _ in range(6):
        q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
        out = [heads.step(q, k, v, [BUDGET]) for heads in (here, there)]
        torch.testing.assert_close(*out, atol=2e-5, rtol=2e-5)
    near(here, there)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=8"])
def test_16_bits(device, policy, dtype):
    here, queries = prompt(policy, dtype=dtype)
    there = device.heads(here)
    for heads in (here, there):
        heads.compress(queries, BUDGET)
    near(here, there, 2e-3)
    q, k, v = rows(HEADS, GROUP, DIM, dtype=dtype), rows(HEADS, DIM, dtype=dtype), rows(HEADS, DIM, dtype=dtype)
    out = here.step(q, k, v, [BUDGET]), there.step(q, k, v, [BUDGET])
    assert out[1].dtype == dtype
    torch.testing.assert_close(out[0], out[1].float(), atol=1e-2, rtol=1e-2)


def test_budgets_of_heads_and_some_heads(device):
    here, queries = prompt("h2o")
    there, budgets = device.heads(here), [30, 40, 50]
    for heads in (here, there):
        heads.compress(queries, budgets)
    near(here, there)
    for chosen in ([2, 0], [1], [2, 0]):  # lists are kept: the third is the first's
        n = len(chosen)
        q, k, v = rows(n, GROUP, DIM), rows(n, DIM), rows(n, DIM)
        out = [heads.step(q, k, v, budgets, heads=chosen) for heads in (here, there)]
        torch.testing.assert_close(*out, atol=2e-5, rtol=2e-5)
    near(here, there)


@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=8", "fold", "zsmerge"])
def test_a_prompt_in_chunks(device, policy):
    here, queries = prompt(policy)
    there = device.heads(here)
    for heads in (here, there):
        heads.compress(queries, BUDGET)
    more, k, v = rows(HEADS, GROUP, 15, DIM), rows(HEADS, 15, DIM), rows(HEADS, 15, DIM)
    for heads in (here, there):
        heads.append(k, v)
    kept = [heads.observe(more) for heads in (here, there)]
    for a, b in zip(*kept):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    near(here, there)
    for heads, (reference, positions) in zip((here, there), kept):
        heads.compress(reference, BUDGET, positions)
    near(here, there)


@pytest.mark.parametrize("policy", ["ems", "keepkv"])
def test_a_prompt_that_cannot_wait_is_refused(device, policy):
    here, queries = prompt(policy)
    with pytest.raises(RuntimeError, match=f"observe: expected a policy that need not see .* got {policy}"):
        device.heads(here).observe(queries)


def test_strides(device):
    across, queries = prompt("h2o", transposed=True)
    across.values = across.values.contiguous()
    there, here = device.heads(across), copied(across)
    if device.where == "emulated":
        there.heads.keys = across.keys  # [capacity, heads, dim] in memory
    for heads in (here, there):
        heads.compress(queries, BUDGET)
    near(here, there)


@pytest.mark.parametrize("together", [1, HEADS])
@pytest.mark.parametrize("policy", KERNELS)
def test_pages(device, policy, together):
    """The same bits wherever slots lie."""
    here, queries = prompt(policy)
    here = device.heads(here).heads
    caches, options = (here.tensors, in_pages(here, together)), here.spec.options
    for cache in caches:
        device.ops.compress(policy, cache, device.tensor(queries), [BUDGET], **options)
    for _ in range(4):
        token = [device.tensor(rows(*x)) for x in ((HEADS, GROUP, DIM), (HEADS, DIM), (HEADS, DIM))]
        assert torch.equal(*(device.ops.step(policy, cache, *token, [BUDGET], **options) for cache in caches))
    for a, b in zip(caches[0][2:7], caches[1][2:7]):
        assert torch.equal(a, b)
    if policy == "h2o":
        cache = [*caches[1][:8], caches[1][8][:, :0]]
        with pytest.raises(RuntimeError, match="table: expected"):
            device.ops.step(policy, cache, *token, [BUDGET], **options)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(KERNELS)))
def test_policies_without_kernels_are_refused(device, policy):
    here, queries = prompt(policy)
    there = device.heads(here)
    name = re.escape(policy.partition(":")[0])
    with pytest.raises(RuntimeError, match=f"kvmeld: {name}: expected a policy with kernels on a GPU"):
        there.compress(queries, BUDGET)
    assert torch.equal(here.keys, there.keys) and torch.equal(here.length, there.length)


def test_bad_input_is_refused_and_changes_nothing(device):
    here, queries = prompt("h2o")
    there = device.heads(here)
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)

    def refused(words, call):
        with pytest.raises(RuntimeError, match=words):
            call()
        assert torch.equal(here.keys, there.keys) and torch.equal(here.columns, there.columns)

    refused("expected h2o with a target of", lambda: there.compress(queries, 1))
    refused("budget: expected 1 or one for each of 3 heads, got 2", lambda: there.compress(queries, [30, 30]))
    refused(r"queries: expected \[", lambda: there.compress(queries[:, :, :, :-1], BUDGET))
    refused("expected Float, Half or BFloat16, got Double", lambda: there.step(q.double(), k, v, [BUDGET]))
    refused("heads: expected 0 to 2, got 3", lambda: there.step(q[:1], k[:1], v[:1], [BUDGET], heads=[3]))
    refused("divide: expected tensors on the CPU", lambda: device.ops.divide("h2o", here.scores(TOKENS), BUDGET))
    entries = device.heads(prompt("ems")[0])
    with pytest.raises(RuntimeError, match="expected a policy that attends by itself on a GPU, got ems"):
        entries.attend(q)
    gaps = device.heads(prompt("h2o", transposed=True)[0])
    gaps.heads.values = device.tensor(rows(HEADS, DIM, TOKENS + 20)).transpose(1, 2)
    with pytest.raises(RuntimeError, match="values: expected rows .* with an element stride of 1 on a GPU, got 80"):
        gaps.compress(queries, BUDGET)


@pytest.mark.parametrize("policy", ["h2o", "fold"])
def test_generate(device, policy, text, monkeypatch):
    """The same tokens of padded sequences, and again in a second turn."""
    prompts = torch.tensor([text[:45], text[100:145]])
    real = torch.ones_like(prompts)
    real[1, :12] = 0
    tokens = []
    for there in (False, True):
        model = load("kvmeld")
        if there:
            monkeypatch.setattr(heads_module, "ops", device.ops)
            monkeypatch.setattr(Heads, "packed", lambda self, capacities: self.moved(max(capacities)))
            model = model.to("cuda" if device.where == "cuda" else "cpu")
        cache, so_far, mask = Cache(policy, budget=24), prompts, real
        for more in (3, 2):
            out = model.generate(
                so_far.to(model.device),
                attention_mask=mask.to(model.device),
                past_key_values=cache,
                max_new_tokens=more,
                do_sample=False,
            ).cpu()
            so_far = torch.cat([out, prompts[:, :9]], 1)
            mask = torch.cat([mask, torch.ones(2, so_far.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        tokens.append(out)
    assert torch.equal(*tokens)


def test_the_policy_says_what_a_new_slot_is():
    for policy in POLICIES:
        heads, _ = prompt(policy)
        initial = Policy(policy).initial(heads.columns)
        assert initial.shape == (heads.columns.shape[1], 1)
        assert torch.equal(heads.columns, initial.expand_as(heads.columns))
