"""The operators by themselves: against slow loops, against one another, and what they refuse."""

import math

import pytest
import torch
from conftest import POLICIES
from kvfold_torch import Heads, Policy, ops

HEADS, GROUP, DIM, TOKENS = 3, 2, 16, 60
BUDGET = 40


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def prompt(policy, *, capacity=TOKENS + 20, dtype=torch.float32, transposed=False):
    """Heads that hold a prompt, and its queries."""
    if transposed:  # [capacity, heads, dim] in memory, and values by columns
        keys = rows(capacity, HEADS, DIM, dtype=dtype).transpose(0, 1)
        values = rows(HEADS, DIM, capacity, dtype=dtype).transpose(1, 2)
    else:
        keys, values = rows(HEADS, capacity, DIM, dtype=dtype), rows(HEADS, capacity, DIM, dtype=dtype)
    heads = Heads.over(Policy(policy), keys, values, group=GROUP, tokens=TOKENS)
    return heads, rows(HEADS, GROUP, TOKENS, DIM, dtype=dtype)


def copied(heads):
    return heads.chosen(torch.arange(heads.heads))


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


def test_column_scores_are_sums_of_causal_attention():
    heads, queries = prompt("h2o")
    total, window, decayed = heads.column_scores(queries, window=TOKENS, decay=1.0)
    wanted = causal_columns(heads, queries)
    for sums in (total, window, decayed):
        torch.testing.assert_close(sums[:, :TOKENS].double(), wanted, atol=1e-4, rtol=0)
        assert not sums[:, TOKENS:].any()


def test_h2o_keeps_what_loops_say():
    heads, queries = prompt("h2o:sinks=0,recent=0.25")
    wanted = causal_columns(heads, queries)
    heads.compress(queries, BUDGET)
    recent = BUDGET // 4
    for h in range(HEADS):
        old = sorted(range(TOKENS - recent), key=lambda s: -wanted[h, s])[: BUDGET - recent]
        assert heads.position[h, :BUDGET].tolist() == sorted(old) + list(range(TOKENS - recent, TOKENS))


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
    if not across.policy.describe()["decodes"]:
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


@pytest.mark.parametrize("policy", POLICIES)
def test_plan_and_apply_are_compress(policy):
    whole, queries = prompt(policy)
    parts = copied(whole)
    whole.compress(queries, BUDGET)
    parts.observe(queries)
    before = copied(parts)
    plan = parts.plan(BUDGET, queries)
    same(parts, before)  # a plan reads
    parts.apply(plan, BUDGET)
    same(whole, parts)
    assert plan[0][:, 1].tolist() == [TOKENS] * HEADS


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
    check(ops.observe, "fold", copied(heads).tensors, queries)
    compressed = copied(heads)
    compressed.compress(queries, BUDGET)
    check(ops.step, "fold", compressed.tensors, q, k, v, [BUDGET])
    check(ops.attend, "fold", compressed.tensors, q, probabilities=True)
    check(ops.column_scores, compressed.tensors, queries)
    check(ops.foresight, heads.tensors, queries)
    observed = copied(heads)
    observed.observe(queries)
    plan = observed.plan(BUDGET, queries)
    check(ops.apply, "fold", copied(observed).tensors, plan)
    probabilities = torch.rand(HEADS, GROUP, heads.capacity)
    check(ops.observe_step, "h2o", prompt("h2o")[0].tensors, probabilities)
    torch.library.opcheck(
        ops.plan, ("fold", observed.tensors, [BUDGET]), options | {"queries": queries}, test_utils=checks[:2]
    )


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


def bad_inputs():
    """(what is wrong, how, the message)"""
    return [
        ("an unknown policy", lambda h, c: c | {"policy": "h3o"}, "make_policy: one of"),
        ("a parameter it has not", lambda h, c: c | {"policy": "h2o:share=1"}, "h2o: one of"),
        ("a budget of nothing", lambda h, c: c | {"budget": [0]}, "a budget of at least 1 slot"),
        ("a budget below the protected", lambda h, c: c | {"budget": [4]}, "a budget of at least"),
        ("a budget above the capacity", lambda h, c: c | {"budget": [1000]}, "a capacity of at least"),
        ("budgets for other heads", lambda h, c: c | {"budget": [40, 40]}, "one for each of 3 heads"),
        ("no queries", lambda h, c: c | {"queries": None}, "reference queries expected"),
        ("queries of another rank", lambda h, c: c | {"queries": c["queries"][0]}, r"queries: \[heads, group, count"),
        ("queries of another group", lambda h, c: c | {"queries": c["queries"][:, :1]}, r"queries \[3, 2, 60, 16\]"),
        ("queries in double", lambda h, c: c | {"queries": c["queries"].double()}, "queries: Float, Half or"),
        ("queries on another device", lambda h, c: c | {"queries": c["queries"].to("meta")}, "tensors on one device"),
        ("keys of another rank", lambda h, c: h("keys", lambda x: x[None]), r"keys: \[heads, capacity, dim\]"),
        ("keys in double", lambda h, c: h("keys", lambda x: x.double()), "keys: Float, Half or BFloat16"),
        ("values of another dtype", lambda h, c: h("values", lambda x: x.half()), "values: Float expected, Half"),
        ("values of another size", lambda h, c: h("values", lambda x: x[:, 1:]), r"values \[3, 80, 16\] expected"),
        ("keys that overlap", lambda h, c: h("keys", lambda x: x[:1].expand(3, -1, -1)), "strides that do not overlap"),
        ("log-mass by strides", lambda h, c: h("log_mass", lambda x: x.t().contiguous().t()), "log_mass: a contiguous"),
        ("positions in 64 bits", lambda h, c: h("position", lambda x: x.long()), "position: Int expected, Long"),
        ("a length beyond the capacity", lambda h, c: h("length", lambda x: x + 30), "length: 0 to 80"),
        ("fewer tokens seen than held", lambda h, c: h("seen", lambda x: x - 1), "seen: at least 60"),
        ("another policy's columns", lambda h, c: h("columns", lambda x: x[:, :0]), "h2o: columns"),
        ("heads twice", lambda h, c: c | {"heads": [1, 1, 2]}, "each head once"),
        ("heads that are not there", lambda h, c: c | {"heads": [0, 1, 3]}, "heads: 0 to 2"),
    ]


@pytest.mark.parametrize("case", bad_inputs(), ids=lambda c: c[0])
def test_bad_input_is_refused_and_nothing_changes(case):
    _, change, message = case
    heads, queries = prompt("h2o")
    call = {"policy": "h2o", "cache": heads.tensors, "queries": queries, "budget": [BUDGET], "group": GROUP}
    names = ["keys", "values", "log_mass", "position", "length", "seen", "columns", "memory", "measured"]

    def with_tensor(name, make):
        i = names.index(name)
        return call | {"cache": heads.tensors[:i] + [make(heads.tensors[i])] + heads.tensors[i + 1 :]}

    before = copied(heads)
    with pytest.raises(RuntimeError, match=message):
        ops.compress(**change(with_tensor, call))
    for was, now in zip(before.tensors, heads.tensors):
        assert torch.equal(was, now)


def test_a_bad_step_is_refused_and_nothing_changes():
    heads, queries = prompt("h2o", capacity=TOKENS)
    q, k, v = rows(HEADS, GROUP, DIM), rows(HEADS, DIM), rows(HEADS, DIM)
    before = copied(heads)
    for change, message in (
        ({"q": q[:, :1]}, r"q \[3, 2, 16\] expected"),
        ({"k": k[None]}, r"k \[3, 16\] expected"),
        ({"v": v.int()}, "v: Float, Half or BFloat16"),
        ({"k": k.t().contiguous().t()}, "k: a contiguous tensor"),
        ({}, "room for one more token expected, all 60 slots"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.step("h2o", heads.tensors, **({"q": q, "k": k, "v": v} | change), budget=[BUDGET], group=GROUP)
    with pytest.raises(RuntimeError, match="compresses prompts only"):
        prompt("attention_matching")[0].step(q, k, v, [BUDGET])
    for was, now in zip(before.tensors, heads.tensors):
        assert torch.equal(was, now)


def test_a_bad_plan_is_refused_and_nothing_changes():
    heads, queries = prompt("h2o")
    heads.observe(queries)
    good = heads.plan(BUDGET)
    before = copied(heads)

    def changed(i, make):
        plan = [x.clone() for x in good]
        make(plan[i])
        return plan

    for plan, message in (
        (changed(2, lambda x: x[2, 3].fill_(60)), "sources 0 to 59 expected"),
        (changed(2, lambda x: x[2, 1].fill_(0)), "ascending anchors"),
        (changed(1, lambda x: x[1, 2].fill_(-1)), "sources 0 to 80 expected"),
        (changed(0, lambda x: x[2, 1].fill_(59)), "a plan of 60 slots expected, 59 of head 2"),
        (good[:7], "8 tensors expected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            heads.apply(plan)
    for was, now in zip(before.tensors, heads.tensors):
        assert torch.equal(was, now)


def test_tensors_on_a_gpu_are_refused_in_words_where_there_is_no_cuda():
    heads, queries = prompt("h2o")
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="kvfold::compress: built without CUDA: tensors on the CPU expected"):
        ops.compress.default.redispatch(cuda, "h2o", heads.tensors, queries, [BUDGET], group=GROUP)
