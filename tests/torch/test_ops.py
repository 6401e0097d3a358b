# SPDX-License-Identifier: MIT
"""The operators by themselves: against slow loops and against one another."""

import math

import pytest
import torch
from conftest import POLICIES
from kvmeld_torch import Spec, ops
from prompts import BUDGET, DIM, GROUP, HEADS, TOKENS, copied, prompt, rows


def same(a, b):
    """All of what two sets of heads hold, to the bit."""
    assert torch.equal(a.length, b.length) and torch.equal(a.seen, b.seen) and torch.equal(a.measured, b.measured)
    assert torch.equal(a.memory, b.memory)
    for h, n in enumerate(a.length.tolist()):
        for name in ("keys", "values", "log_mass", "position"):
            assert torch.equal(getattr(a, name)[h, :n], getattr(b, name)[h, :n]), name
        assert torch.equal(a.columns[h, :, :n], b.columns[h, :, :n])


def test_attend_is_softmax_with_log_mass():
    heads, _ = prompt("full_cache")
    heads.length[:] = torch.tensor([1, 17, 60])
    heads.log_mass[:] = torch.randn_like(heads.log_mass)
    q = rows(HEADS, GROUP, DIM)
    out, log_sum_exp, probabilities = heads.attend(q, probabilities=True)
    for h in range(HEADS):
        n = int(heads.length[h])
        for g in range(GROUP):
            logits = [
                sum(q[h, g, i].item() * heads.keys[h, s, i].item() for i in range(DIM)) / math.sqrt(DIM)
                + heads.log_mass[h, s].item()
                for s in range(n)
            ]
            total = sum(math.exp(x) for x in logits)
            assert log_sum_exp[h, g].item() == pytest.approx(math.log(total), abs=1e-5)
            for s in range(n):
                assert probabilities[h, g, s].item() == pytest.approx(math.exp(logits[s]) / total, abs=1e-6)
            assert not probabilities[h, g, n:].any()
            for i in range(DIM):
                mean = sum(math.exp(x) / total * heads.values[h, s, i].item() for s, x in enumerate(logits))
                assert out[h, g, i].item() == pytest.approx(mean, abs=1e-5)


def causal_columns(heads, queries):
    """Column sums of a prompt's attention [heads, tokens], by loops in double."""
    sums = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for h in range(HEADS):
        for g in range(GROUP):
            for i in range(TOKENS):
                q = queries[h, g, i].double()
                logits = torch.stack([q @ heads.keys[h, s].double() / math.sqrt(DIM) for s in range(i + 1)])
                sums[h, : i + 1] += logits.softmax(0)
    return sums


def test_h2o_keeps_what_loops_say():
    heads, queries = prompt("h2o:sinks=0,recent=0.25")
    wanted = causal_columns(heads, queries)
    heads.compress(queries, BUDGET)
    recent = BUDGET // 4
    for h in range(HEADS):
        old = sorted(range(TOKENS - recent), key=lambda s: -wanted[h, s])[: BUDGET - recent]
        assert sorted(heads.position[h, :BUDGET].tolist()) == sorted(old) + list(range(TOKENS - recent, TOKENS))


@pytest.mark.parametrize("policy", POLICIES)
def test_strides_and_slices_change_no_bit(policy):
    across, queries = prompt(policy, transposed=True)
    along = copied(across)  # contiguous
    assert across.keys.stride() != along.keys.stride()
    before = across.keys.data_ptr()
    for heads in (across, along):
        heads.compress(queries, BUDGET)
    assert across.keys.data_ptr() == before
    same(across, along)
    if not across.policy.describe()["supports_decode"]:
        return
    for _ in range(5):
        q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
        assert torch.equal(across.step(q, k, v, [BUDGET]), along.step(q, k, v, [BUDGET]))
    same(across, along)


@pytest.mark.parametrize("policy", ["h2o", "fold", "keepkv"])
def test_heads_of_a_call_are_those_of_one_call_each(policy):
    together, queries = prompt(policy)
    alone = copied(together)
    budgets = [30, 40, 50]
    together.compress(queries, budgets)
    for h in range(HEADS):
        alone.rows(h, 1).compress(queries[h : h + 1], budgets[h])
    same(together, alone)
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
    out = together.step(q, k, v, budgets)
    assert torch.equal(alone.step(q[[2, 0]], k[[2, 0]], v[[2, 0]], budgets, heads=[2, 0]), out[[2, 0]])
    assert alone.seen.tolist() == [TOKENS + 1, TOKENS, TOKENS + 1]


@pytest.mark.parametrize("policy", ["h2o", "fold", "d2o"])
def test_threads_change_no_bit(policy):
    one, queries = prompt(policy)
    many = copied(one)
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
    threads, out = torch.get_num_threads(), []
    for heads, count in ((one, 1), (many, 3)):
        torch.set_num_threads(count)
        heads.compress(queries, BUDGET)
        out.append(heads.step(q, k, v, [BUDGET]))
    torch.set_num_threads(threads)
    assert torch.equal(*out)
    same(one, many)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_waits_is_compressed_as_one_that_does_not(policy):
    whole, queries = prompt(policy)
    parts = copied(whole)
    whole.compress(queries, BUDGET)
    kept, positions = parts.observe(queries)
    assert parts.length.tolist() == [TOKENS] * HEADS
    parts.compress(kept, BUDGET, positions)
    same(whole, parts)


def test_queries_that_a_policy_plans_on_are_moved_as_it_wants():
    """fold's to positions to come: 56 of 60, as the first see too little; attention_matching's where they are."""
    turned = {}
    for policy, ahead in (("fold", True), ("attention_matching", False)):
        heads, queries = prompt(policy)
        heads.spec = Spec(GROUP, rope=tuple(10_000.0 ** (-2 * i / DIM) for i in range(DIM // 2)))
        kept, positions = heads.observe(queries)
        assert kept.shape == (HEADS, GROUP, TOKENS - 4, DIM)
        assert ahead or positions.tolist() == list(range(4, TOKENS))
        moved = [int(to) - i for i, to in enumerate(positions.tolist(), 4)]
        pair = torch.view_as_complex(torch.stack(queries[:, :, 4:].chunk(2, -1), -1))
        frequencies = 10_000.0 ** (-torch.arange(DIM // 2) * 2 / DIM)
        angles = torch.tensor(moved)[:, None] * frequencies
        wanted = torch.view_as_real(pair * torch.polar(torch.ones_like(angles), angles))
        torch.testing.assert_close(kept, torch.cat([wanted[..., 0], wanted[..., 1]], -1), atol=1e-4, rtol=0)
        turned[policy] = positions
    assert turned["fold"][0] == TOKENS and bool((turned["fold"].diff() >= 0).all())
    assert prompt("h2o")[0].observe(prompt("h2o")[1])[0].numel() == 0


def divided_by_loops(scores, slots, own, most):
    """Slots of each head: `own`, and as many as it has among the highest scores of all, at most `most`."""
    counts = [own] * len(scores)
    order = sorted(((-x, h, s) for h, row in enumerate(scores) for s, x in enumerate(row)))
    left = (slots - own) * len(scores)
    for _, h, _s in order:
        if left and counts[h] < own + most:
            counts[h] += 1
            left -= 1
    return counts


@pytest.mark.parametrize("policy", ["fold", "h2o", "kvzip"])
def test_shared_slots_are_those_of_the_highest_scores(policy):
    heads, queries = prompt(f"{policy}/{BUDGET}")
    heads.observe(queries)
    heads.columns *= torch.tensor([3.0, 1.0, 1 / 3])[:, None, None]
    scores = heads.scores(TOKENS)
    own = int(torch.isposinf(scores[0]).sum())  # what a head keeps whatever its score
    assert own > 0 and torch.isposinf(scores).sum(1).tolist() == [own] * HEADS
    slots = ops.divide(heads.policy.text, scores, BUDGET)
    assert sum(slots) == BUDGET * HEADS and len(set(slots)) > 1
    own += 8 if policy == "fold" else 0  # its clusters
    rows = [[x for x in row if not math.isinf(x)] for row in scores.tolist()]
    assert slots == divided_by_loops(rows, BUDGET, own, TOKENS - own - 1)
    wide = torch.nn.functional.pad(scores, (0, 7), value=-math.inf)
    assert ops.divide(heads.policy.text, wide, BUDGET) == slots
    assert ops.divide(heads.policy.text, scores, TOKENS) == [TOKENS] * HEADS  # nothing is evicted


def test_shared_slots_of_scissorhands_go_to_the_head_whose_attention_is_spread():
    """Its columns count where a slot is weak: by a column in place of its score the other heads had most."""
    heads, queries = prompt(f"scissorhands/{BUDGET}")
    heads.keys[1:, :TOKENS] *= 1e-3
    heads.keys[1:, 5], queries[1:] = 8.0, queries[1:].abs() + 1  # all attention to one token
    heads.observe(queries)
    slots = ops.divide(heads.policy.text, heads.scores(TOKENS), BUDGET)
    assert sum(slots) == BUDGET * HEADS and slots[0] == max(slots) > slots[1]


def test_shared_slots_that_cannot_be_are_refused():
    for text, message in (
        ("fold/5", "fold: expected at least 7 slots to share, got 5"),
        ("fold/x", "fold: expected policy/slots with 1 to 1e9 slots to share, got 'fold/x'"),
        ("streaming_llm/90", "streaming_llm: expected a policy with a score per slot for shared budgets, got one"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.describe(text, DIM, GROUP, TOKENS)
    with pytest.raises(RuntimeError, match=r"divide: expected scores \[heads, slots\], got 1 dimensions"):
        ops.divide("fold/40", torch.zeros(3), BUDGET)
    with pytest.raises(RuntimeError, match="h2o: expected a budget of at least 8 slots"):
        ops.budget_within("h2o", 7)


@pytest.mark.parametrize("policy", ["h2o", "keepkv", "tova", "expected_attention"])
def test_observed_steps_are_those_of_step(policy):
    """An engine's own attention, observed, is what `step` observes."""
    whole, queries = prompt(policy)
    whole.compress(queries, BUDGET)
    own = copied(whole)
    for _ in range(4):
        q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
        out = whole.step(q, k, v, [own.capacity - 1])  # nothing is evicted
        own.append(k[:, None], v[:, None])
        mine, log_sum_exp, probabilities = own.attend(q, probabilities=True)
        assert torch.equal(out, mine)
        ops.observe_step(policy, own.tensors, probabilities, log_sum_exp, q, group=GROUP)
    assert torch.equal(whole.measured, own.measured)
    torch.testing.assert_close(whole.columns, own.columns)
    torch.testing.assert_close(whole.memory, own.memory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["h2o", "fold", "d2o"])
def test_16_bits_are_floats_of_their_numbers(policy, dtype):
    small, queries = prompt(policy, dtype=dtype)
    large = copied(small)
    large.keys, large.values = small.keys.float(), small.values.float()
    small.compress(queries, BUDGET), large.compress(queries.float(), BUDGET)
    assert torch.equal(small.position, large.position)
    q, k, v = rows(HEADS, GROUP, DIM, dtype=dtype), rows(HEADS, DIM, dtype=dtype), rows(HEADS, DIM, dtype=dtype)
    out = small.step(q, k, v, [BUDGET])
    wanted = large.step(q.float(), k.float(), v.float(), [BUDGET])
    torch.testing.assert_close(out, wanted, atol=0.05 if dtype == torch.bfloat16 else 0.005, rtol=0)
    assert small.keys.dtype == dtype


def test_a_moved_cache_goes_on_as_it_was():
    for policy in ("ems", "fold", "h2o"):
        whole, queries = prompt(policy)
        whole.compress(queries, BUDGET)
        small = whole.moved(BUDGET + 1)
        assert small.capacity == BUDGET + 1
        for _ in range(5):
            q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
            assert torch.equal(whole.step(q, k, v, [BUDGET]), small.step(q, k, v, [BUDGET]))


def test_opcheck():
    """Schemas, fake kernels and functionalization, by PyTorch's own checks."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    heads, queries = prompt("fold")
    options = {"group": GROUP}
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)

    def check(op, *args, **more):
        torch.library.opcheck(op, args, options | more, test_utils=checks)

    check(ops.compress, "fold", copied(heads).tensors, queries, [BUDGET])
    compressed = copied(heads)
    compressed.compress(queries, BUDGET)
    check(ops.step, "fold", compressed.tensors, q, k, v, [BUDGET])
    check(ops.attend, "fold", compressed.tensors, q, probabilities=True)
    probabilities = torch.rand(HEADS, GROUP, heads.capacity)
    check(ops.observe_step, "h2o", prompt("h2o")[0].tensors, probabilities)
    more = ("fold", copied(heads).tensors, queries)
    torch.library.opcheck(ops.observe, more, options, test_utils=checks[:2])


def test_compile_keeps_a_graph():
    heads, queries = prompt("h2o")
    heads.compress(queries, BUDGET)
    other = copied(heads)

    def two_steps(tensors, q, k, v):
        first = ops.step("h2o", tensors, q, k, v, [BUDGET], group=GROUP)
        return ops.step("h2o", tensors, 2 * first, k + 1, v, [BUDGET], group=GROUP)

    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
    compiled = torch.compile(two_steps, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(heads.tensors, q, k, v), two_steps(other.tensors, q, k, v))
    same(heads, other)
